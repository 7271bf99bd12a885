"""Which checkpoints stay, whatever was saved and in which order: the rules as properties."""

import itertools
import math
from datetime import UTC, datetime
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.checkpoint.catalog import KEPT_QUARANTINED, NEVER_REMOVED, Entry, Retention, by_merit, decide

NOW = datetime(2026, 11, 22, tzinfo=UTC)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Entry], set[Path]]:
    """Commits, newest first, some of them quarantined, and those that a load found damaged."""
    count = draw(st.integers(0, 25))
    entries = []
    for commit in range(count, 0, -1):
        step = draw(st.integers(0, 12)) * draw(st.sampled_from([1, 5]))
        loss = draw(st.one_of(st.floats(), st.integers(-3, 3).map(float)))
        reason = draw(st.sampled_from(["", "", "", "", "runs die from it"]))
        path = Path(f"step-{step:08d}.g0.c{commit}")
        entries.append(Entry(step, path, {"loss": loss}, NOW, 0, commit, "1.0.0", 1, {}, reason))
    distrusted = draw(st.sets(st.sampled_from([entry.path for entry in entries]))) if entries else set()
    return entries, distrusted


KEEP = st.tuples(st.integers(1, 5), st.sampled_from([0, 1, 2, 5, 7]))


def outcome(
    history: tuple[list[Entry], set[Path]], keep: tuple[int, int]
) -> tuple[Retention, list[Entry], list[Entry], Entry | None]:
    """The decision, what stays, what of all is good, and the best."""
    entries, distrusted = history
    good = [entry for entry in entries if entry.path not in distrusted and not entry.quarantine]
    best = next(iter(by_merit(good, "loss", "min")), None)
    last, every = keep
    retention = decide(entries, keep_last_n=last, keep_every=every, best=best, distrusted=distrusted)
    gone = {entry.path for entry in retention.remove}
    return retention, [entry for entry in entries if entry.path not in gone], good, best


@settings(max_examples=40)
@given(histories(), KEEP)
def test_the_newest_two_good_ones_the_last_n_steps_and_the_best_stay(history, keep):
    _, stays, good, best = outcome(history, keep)
    assert set(map(id, good[:NEVER_REMOVED])) <= set(map(id, stays))
    assert best is None or best in stays
    steps = list(dict.fromkeys(entry.step for entry in good))[: keep[0]]
    assert set(steps) <= {entry.step for entry in stays if entry in good}


@settings(max_examples=40)
@given(histories(), KEEP, st.data())
def test_the_newest_good_one_on_which_replicas_agreed_stays_however_many_follow(history, keep, data):
    entries, distrusted = history
    paths = [entry.path for entry in entries]
    verified = data.draw(st.sets(st.sampled_from(paths))) if paths else set()
    retention = decide(entries, keep_last_n=keep[0], keep_every=keep[1], distrusted=distrusted, verified=verified)
    good = [each for each in entries if each.path not in distrusted and not each.quarantine and each.path in verified]
    assert not good or good[0] not in retention.remove


def firsts(good: list[Entry], every: int) -> list[Entry]:
    """The newest commit of the first step at or after each multiple."""
    newest = {entry.step: entry for entry in reversed(good)}
    numbers = {step // every for step in newest if every} - {0}
    return [newest[min(step for step in newest if step // every == number)] for number in numbers]


@settings(max_examples=40)
@given(histories(), KEEP)
def test_the_first_good_one_since_every_so_many_steps_stays(history, keep):
    _, stays, good, _ = outcome(history, keep)
    assert all(entry in stays for entry in firsts(good, keep[1]))


@settings(max_examples=40)
@given(histories(), KEEP)
def test_nothing_else_stays_but_evidence(history, keep):
    retention, stays, good, best = outcome(history, keep)
    newest = {entry.step: entry for entry in reversed(good)}
    quarantined = [entry for entry in history[0] if entry.quarantine]
    for entry in stays:
        if entry in good:
            wanted = entry in good[:NEVER_REMOVED] or entry is best or entry is newest[entry.step]
            assert wanted
        elif entry.quarantine:
            assert entry in quarantined[:KEPT_QUARANTINED]
        else:
            assert entry.commit > retention.oldest_kept_commit
    limit = keep[0] + NEVER_REMOVED + 1 + len(firsts(good, keep[1]))
    assert sum(entry in good for entry in stays) <= limit


@settings(max_examples=40)
@given(histories(), KEEP)
def test_deciding_again_removes_nothing_more(history, keep):
    retention, stays, _, _ = outcome(history, keep)
    again, *_ = outcome((stays, history[1]), keep)
    assert again.remove == []
    assert [entry.commit for entry in retention.remove] == sorted(entry.commit for entry in retention.remove)


@settings(max_examples=40)
@given(histories(), st.sampled_from(["min", "max"]))
def test_the_best_is_finite_and_of_equals_the_newest(history, mode):
    entries, _ = history
    ordered = by_merit(entries, "loss", mode)
    assert len(ordered) == sum(math.isfinite(entry.metrics["loss"]) for entry in entries)
    for better, worse in itertools.pairwise(ordered):
        ahead = worse.metrics["loss"] - better.metrics["loss"]
        assert ahead * (1 if mode == "min" else -1) > 0 or (ahead == 0 and better.commit > worse.commit)
