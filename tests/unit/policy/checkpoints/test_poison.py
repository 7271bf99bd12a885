"""Is it the checkpoint or the node? What the journal remembers, how a checkpoint is marked, and who heeds the mark."""

import json
from datetime import UTC, datetime

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmft.checkpoint import CheckpointManager
from slurmft.checkpoint.catalog import KEPT_QUARANTINED, Catalog
from slurmft.errors import CheckpointError
from slurmft.policy.checkpoints import COUNTING, Hopeless, NodeSuspected, Poisoned, Trial, examine
from slurmft.policy.verdict import PLANNED, Cause
from slurmft.storage.checkpoint_names import QUARANTINE, Quarantine, read_quarantine, usable, write_quarantine
from slurmft.storage.journal import Event
from slurmft.storage.verdicts import noted_resuming
from slurmft.supervisor.act import quarantined_in, trials_of


def died(*nodes: str, of: str = "x", cause: Cause = Cause.WORKER_ERROR, step: int = 40) -> Trial:
    return Trial(checkpoint=of, step=step, cause=cause.value, nodes=frozenset(nodes))


GOOD = Trial(checkpoint="x", step=40, cause=Cause.WORKER_ERROR.value, committed=True)


@pytest.mark.parametrize(
    ("trials", "outcome"),
    [
        ([died("n1")], None),
        ([died("n1"), died("n2")], Poisoned),
        ([died("n1"), died("n1")], NodeSuspected),
        ([died("n1"), died("n1"), died("n2")], Poisoned),
        ([died("n1"), died("n1"), died("n1")], Poisoned),
        ([died("n1"), GOOD, died("n2")], None),
        ([died("n1"), died("n2"), GOOD], None),
        ([died("n1"), died("n2", of="y")], None),
        ([died("n1"), died("n2", of="y"), died("n2")], Poisoned),
        ([died("n1"), died()], None),
        ([died(), died()], None),
        ([died("n1", "n2"), died("n1", "n2")], None),
        ([died("n1", "n2"), died("n2", "n3")], NodeSuspected),
        ([died("n1", "n2"), died("n3", "n4")], Poisoned),
        ([died("n1"), died("n2", cause=Cause.NODE_LOST)], None),
        ([died("n1"), died("n2", cause=Cause.PREEMPTED), died("n3", cause=Cause.SIGNAL_CRASH)], Poisoned),
        ([died("n1", cause=Cause.HANG), died("n2", cause=Cause.DATA_CORRUPTION)], Poisoned),
    ],
    ids=lambda value: "-".join("+".join(sorted(t.nodes)) or "?" for t in value) if isinstance(value, list) else None,
)  # fmt: skip
def test_examples(trials, outcome):
    found = examine(trials, poison_after=2)
    assert (found if outcome is None else type(found)) is outcome


def test_where_no_other_node_can_be_tried_the_checkpoint_is_given_up():
    assert isinstance(examine([died("n1"), died("n1")], poison_after=2, alone=True), Poisoned)
    assert isinstance(examine([died(), died()], poison_after=2, alone=True), Poisoned)
    assert examine([died("n1")], poison_after=2, alone=True) is None


def test_how_many_deaths_it_takes_is_configured():
    deaths = [died(f"n{number}") for number in range(5)]
    assert [type(examine(deaths[:count], poison_after=3)) for count in (1, 2, 3)] == [type(None), type(None), Poisoned]
    assert isinstance(examine(deaths[:1], poison_after=1), NodeSuspected)


def test_words_for_people():
    found = examine([died("n2"), died("n1")], poison_after=2)
    assert found == Poisoned(reason="2 attempts have died from x before their next save, on n1, n2")
    found = examine([died("n1"), died("n1")], poison_after=2)
    assert found == NodeSuspected(node="n1", reason="2 attempts have died from x before their next save, all on n1")


def test_going_back_further_has_an_end():
    deaths = [died("n1", step=40), died("n2", step=40)]
    assert isinstance(examine(deaths, poison_after=2, quarantined=[60]), Poisoned)
    again = examine(deaths, poison_after=2, quarantined=[40])
    assert isinstance(again, Hopeless) and "an earlier checkpoint of step 40" in again.reason
    assert isinstance(examine(deaths, poison_after=2, quarantined=[80, 70, 60], max_quarantines=3), Hopeless)


@given(
    st.lists(
        st.builds(
            Trial, checkpoint=st.sampled_from("xy"), step=st.just(1), cause=st.sampled_from([c.value for c in Cause]),
            nodes=st.frozensets(st.sampled_from(["n1", "n2", "n3"])), committed=st.booleans(),
        ),
        min_size=1,
    ),
    st.integers(2, 4),
)  # fmt: skip
def test_only_deaths_count_and_no_single_node_is_the_reason_to_give_a_checkpoint_up(trials, poison_after):
    found = examine(trials, poison_after=poison_after)
    name = trials[-1].checkpoint
    since = [trial for trial in trials if trial.checkpoint == name]
    last_good = max((at for at, trial in enumerate(since) if trial.committed), default=-1)
    deaths = [trial for trial in since[last_good + 1 :] if Cause(trial.cause) in COUNTING]
    if len(deaths) < poison_after:
        assert found is None
    elif isinstance(found, Poisoned) and len(deaths) <= poison_after:
        assert len(frozenset.union(*(death.nodes for death in deaths))) > 1
    assert not PLANNED & COUNTING and Cause.NODE_LOST not in COUNTING


# ---- the journal -----------------------------------------------------------------------------------------------------


def event(name: str, **details) -> Event:
    return Event(at=datetime.now(UTC), event=name, attempt="1.0.0", details=details)


def test_trials_come_back_from_the_journal_and_damage_does_not():
    name = "step-00000040.g1.c2"
    history = [
        event("checkpoint tried", checkpoint=name, cause="worker error", nodes=["n1"], committed=False),
        event("checkpoint tried", checkpoint="../../etc", cause="hang", nodes=["n1"]),
        event("checkpoint tried"),
        event("checkpoint tried", checkpoint=name, cause=None, nodes="n1", committed="yes"),
        event("verdict", checkpoint=name),
    ]
    assert trials_of(history) == [died("n1", of=name), Trial(checkpoint=name, step=40, cause="None")]


@pytest.mark.parametrize(
    ("history", "steps"),
    [
        ([], []),
        ([event("checkpoint quarantined", step=40)], [40]),
        ([event("checkpoint quarantined", step=40), event("verdict", saved_step=40)], [40]),
        ([event("checkpoint quarantined", step=40), event("verdict", saved_step=41)], []),
        ([event("verdict", saved_step=50), event("checkpoint quarantined", step=40)], [40]),
        ([event("checkpoint quarantined", step="x"), event("verdict", saved_step=None)], []),
    ],
    ids=["nothing", "one", "no save since", "a save since", "a save before", "damaged"],
)
def test_which_quarantines_the_run_has_not_got_beyond(history, steps):
    assert quarantined_in(history) == steps


# ---- the mark --------------------------------------------------------------------------------------------------------


def trainee() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def saved(tmp_path):
    """A manager with checkpoints of steps 10, 20 and 30, and their folders."""
    manager = CheckpointManager(tmp_path / "it's here", save_best=False)
    return manager, [manager.save(*trainee(), step=step, metrics={"loss": 1 / step}) for step in (10, 20, 30)]


def test_the_previous_checkpoint_is_loaded_and_it_is_said_why(saved, caplog):
    manager, folders = saved
    write_quarantine(folders[2], Quarantine(reason="2 attempts have died from it"))
    assert usable(manager.directory) == [folders[1].name, folders[0].name]
    loaded = manager.load_latest(*trainee())
    assert (loaded.step, loaded.skipped) == (20, ((folders[2], "manifest.json belongs to a quarantined checkpoint"),))
    assert "2 attempts have died from it" in caplog.text
    assert manager.load_best(*trainee()).step == 20, "the best one is quarantined as well"
    entries = Catalog(manager.directory).committed()
    assert [entry.quarantine for entry in entries] == ["2 attempts have died from it", "", ""]


def test_when_all_are_quarantined_nothing_is_loaded_and_nothing_begins_anew_unless_it_may(saved):
    manager, folders = saved
    for folder in folders:
        write_quarantine(folder, Quarantine(reason="dies"))
    with pytest.raises(CheckpointError, match="quarantined checkpoint"):
        manager.load_latest(*trainee())
    write_quarantine(folders[0], Quarantine(reason="dies", from_scratch=True))
    loaded = manager.load_latest(*trainee())
    assert (loaded.found, loaded.step, len(loaded.skipped)) == (False, 0, 3)


def test_damage_beside_a_quarantine_does_not_begin_anew(saved):
    manager, folders = saved
    write_quarantine(folders[1], Quarantine(reason="dies", from_scratch=True))
    for folder in (folders[0], folders[2]):
        (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        manager.load_latest(*trainee())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', "{}", "\0"], ids=repr)
def test_a_mark_that_cannot_be_read_says_nothing(saved, content):
    """What it says lets a checkpoint be removed."""
    manager, folders = saved
    (folders[2] / QUARANTINE).write_text(content)
    assert read_quarantine(folders[2]) is None
    assert manager.load_latest(*trainee()).step == 30


def test_quarantined_ones_do_not_count_as_kept_and_stay_for_a_while(saved, eventually):
    manager, folders = saved
    write_quarantine(folders[2], Quarantine(reason="dies"))
    for step in (40, 50):
        manager.save(*trainee(), step=step, metrics={"loss": 1.0})
    three_good_ones_and_the_quarantined = [50, 40, 30, 20]
    eventually(
        lambda: [one.step for one in Catalog(manager.directory).committed()] == three_good_ones_and_the_quarantined
    )
    for step in range(60, 120, 10):
        manager.save(*trainee(), step=step)
        write_quarantine(manager.save(*trainee(), step=step + 5), Quarantine(reason="dies"))
    manager.save(*trainee(), step=200)

    def kept() -> tuple[int, int]:
        marks = [bool(entry.quarantine) for entry in Catalog(manager.directory).committed()]
        return sum(marks), len(marks) - sum(marks)

    eventually(lambda: kept() == (KEPT_QUARANTINED, 3))


def test_the_best_checkpoint_is_a_good_one(tmp_path, eventually):
    manager = CheckpointManager(tmp_path, keep_last_n=1)
    best = manager.save(*trainee(), step=1, metrics={"loss": 0.1})
    manager.save(*trainee(), step=2, metrics={"loss": 0.2})
    write_quarantine(best, Quarantine(reason="dies"))
    for step in (3, 4, 5):
        manager.save(*trainee(), step=step, metrics={"loss": 0.3})
    newest_two_best_and_quarantined = [5, 4, 2, 1]
    eventually(lambda: [one.step for one in Catalog(tmp_path).committed()] == newest_two_best_and_quarantined)


def test_a_load_leaves_word_of_what_it_reads(saved, tmp_path, monkeypatch):
    manager, folders = saved
    monkeypatch.setenv("SLURMFT_ERROR_DIR", str(tmp_path))
    manager.load_latest(*trainee())
    assert noted_resuming(tmp_path) is None, "another directory than the run's is nobody's business"
    monkeypatch.setenv("SLURMFT_CHECKPOINT_DIR", str(manager.directory))
    manager.load_latest(*trainee())
    assert noted_resuming(tmp_path) == folders[2].name
    write_quarantine(folders[2], Quarantine(reason="dies"))
    manager.load_latest(*trainee())
    assert noted_resuming(tmp_path) == folders[1].name
    for folder in folders:
        write_quarantine(folder, Quarantine(reason="dies", from_scratch=True))
    manager.load_latest(*trainee())
    assert noted_resuming(tmp_path) is None
    (tmp_path / "resuming.json").write_text(json.dumps({"format": 1, "checkpoint": "../x"}))
    assert noted_resuming(tmp_path) is None
