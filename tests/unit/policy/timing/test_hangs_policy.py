"""Which limit a worker has exceeded, and who of those that stand still is to blame."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.policy.hangs import (
    HEARTBEAT,
    OUT_OF_SECTION,
    START_UP,
    Exceeded,
    Limits,
    WorkerLook,
    exceeded,
    find_culprit,
    narrowed,
    next_due_s,
)
from slurmft.policy.judge import Circumstances, WorkerEnd, judge
from slurmft.policy.verdict import Cause

LIMITS = Limits(
    sections={"setup": 600, "step": 10, "checkpointing": 60, "load": 1000}, out_of_section_s=30, start_up_s=120,
    heartbeat_s=5,
)  # fmt: skip
FIRST = Exceeded(rank=0, section="step", held_s=10.1, limit_s=10, why="")


def look(rank: int = 0, *sections: tuple[str, float], **facts: object) -> WorkerLook:
    return replace(WorkerLook(rank=rank, node=f"n{rank}", sections=sections, age_s=1000.0), **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "section", "over_s"),
    [
        pytest.param(look(2, ("step", 12.34)), "step", 2.34, id="a step"),
        pytest.param(look(0, ("step", 12.0), ("load", 11.0)), "step", 2, id="a generous inner limit hides no outer"),
        pytest.param(look(0, ("step", 9.0), ("load", 1001.0)), "load", 1, id="an inner one"),
        pytest.param(look(0, ("step", 12.0), ("load", 1005.0)), "load", 5, id="the one that was exceeded first"),
        pytest.param(look(0, ("step", 1.0), elsewhere=(("checkpointing", 61.0),)), "checkpointing", 1,
                     id="another thread"),
        pytest.param(look(0, quiet_s=31.0), OUT_OF_SECTION, 1, id="out of any section"),
        pytest.param(look(0, age_s=121.0, attached=False), START_UP, 1, id="never called"),
        pytest.param(look(0, heartbeat_s=6.0, quiet_s=6.0), HEARTBEAT, 1, id="no heartbeat"),
        pytest.param(look(0, ("step", 601.0), warming_up=True), "step", 1, id="not even the setup takes so long"),
    ],
)  # fmt: skip
def test_a_limit_is_exceeded(seen: WorkerLook, section: str, over_s: float):
    found = exceeded(seen, LIMITS)
    assert found is not None
    assert (found.rank, found.section) == (seen.rank, section)
    assert found.held_s - found.limit_s == pytest.approx(over_s)
    assert next_due_s(seen, LIMITS) == 0


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(look(0, ("step", 10.0)), id="just reached"),
        pytest.param(look(0, ("step", 599.0), warming_up=True), id="the first steps may compile"),
        pytest.param(look(0, ("my own", 1e9)), id="a name without a limit"),
        pytest.param(look(0, ("my own", 1.0), quiet_s=1e6), id="inside of a section nothing is out of it"),
        pytest.param(look(0, ("step", 1e9), holding=True), id="it waits for the others to stop with it"),
        pytest.param(look(0, age_s=119.0, attached=False, quiet_s=1e9), id="still starting"),
        pytest.param(look(0, ("my own", 9.0), heartbeat_s=100.0, quiet_s=4.0), id="a section is a sign of life too"),
        pytest.param(look(0), id="all at once"),
    ],
)
def test_no_limit_is_exceeded(seen: WorkerLook):
    assert exceeded(seen, LIMITS) is None
    assert next_due_s(seen, LIMITS) >= 0


@pytest.mark.parametrize(
    "seen",
    [look(0, ("step", 1e9), elsewhere=(("load", 1e9),)), look(0, quiet_s=1e9), look(0, attached=False, age_s=1e9),
     look(0, heartbeat_s=1e9, quiet_s=1e9)],
)  # fmt: skip
def test_without_limits_nothing_ever_hangs(seen: WorkerLook):
    assert exceeded(seen, Limits()) is None
    assert next_due_s(seen, Limits()) == math.inf
    assert Limits().smallest_s() == math.inf


def test_warm_up_steps_have_no_limit_where_the_setup_has_none():
    limits = Limits(sections={"setup": 0.0, "step": 10})
    assert exceeded(look(0, ("step", 1e6), warming_up=True), limits) is None
    assert exceeded(look(0, ("step", 11.0)), limits) is not None


def test_the_words_name_rank_section_time_and_limit():
    found = exceeded(look(2, ("step", 12.34), stopped=True), LIMITS)
    assert found is not None
    assert found.why == "rank 2 has been in section 'step' for 12.3 s and its process is stopped, limit 10 s"


seconds = st.floats(min_value=0, max_value=1e7)
looks = st.builds(
    WorkerLook,
    rank=st.integers(0, 7), attached=st.booleans(), age_s=seconds, quiet_s=seconds,
    sections=st.lists(st.tuples(st.sampled_from(["setup", "step", "load", "mine"]), seconds), max_size=4).map(tuple),
    heartbeat_s=st.none() | seconds, step=st.integers(0, 3), own_work=st.integers(0, 3), stopped=st.booleans(),
    holding=st.booleans(), warming_up=st.booleans(),
)  # fmt: skip


@given(seen=looks, wait_s=st.floats(min_value=1e-3, max_value=1e4))
def test_nobody_exceeds_a_limit_before_he_is_due(seen: WorkerLook, wait_s: float):
    if exceeded(seen, LIMITS) is not None:
        assert next_due_s(seen, LIMITS) == 0
        return
    step_s = min(wait_s, next_due_s(seen, LIMITS) * 0.999)
    later = replace(
        seen, age_s=seen.age_s + step_s, quiet_s=seen.quiet_s + step_s,
        sections=tuple((name, held_s + step_s) for name, held_s in seen.sections),
        heartbeat_s=None if seen.heartbeat_s is None else seen.heartbeat_s + step_s,
    )  # fmt: skip
    assert exceeded(later, LIMITS) is None


# Culprits


@pytest.mark.parametrize(
    ("others", "culprit", "why"),
    [
        pytest.param(
            [look(1, ("step", 11.0)), look(2, ("step", 11.0), stopped=True), look(3, ("step", 11.0))], 2, "stopped",
            id="whose process is stopped",
        ),
        pytest.param(
            [look(1, ("setup", 20.0)), look(2, attached=False, age_s=130.0), look(3, ("setup", 20.0))], 2,
            "never called", id="who never called",
        ),
        pytest.param(
            [look(1, ("step", 11.0), step=8), look(2, ("step", 3.0), step=7), look(3, ("step", 11.0), step=8)], 2,
            "7 steps", id="who is behind",
        ),
        pytest.param(
            [look(1, ("step", 11.0), own_work=9), look(2, ("step", 11.0), own_work=8),
             look(3, ("step", 11.0), own_work=9)], 2, "collective", id="whose own work is not done",
        ),
        pytest.param(
            [look(1, ("step", 11.0)), look(2, ("step", 11.0), ("load", 10.9)), look(3, ("step", 11.0))], 2,
            "other sections", id="who is where the others are not",
        ),
        pytest.param(
            [look(1, ("step", 11.0), ("backward", 9.0)), look(2, ("step", 11.0)),
             look(3, ("step", 11.0), ("backward", 9.0))], 2, "other sections", id="who has not come to where they are",
        ),
        pytest.param(
            [look(1, ("step", 11.0), quiet_s=9.0), look(2, ("step", 11.0), quiet_s=10.0),
             look(3, ("step", 11.0), quiet_s=9.1)], 2, "sign of life", id="whose last sign is the oldest",
        ),
    ],
)  # fmt: skip
def test_the_culprit_is(others: list[WorkerLook], culprit: int, why: str):
    first = replace(others[0], rank=0, node="n0")
    hang = find_culprit([first, *others], FIRST, LIMITS)
    assert (hang.ranks, hang.nodes) == ((culprit,), (f"n{culprit}",))
    assert why in hang.reason
    assert f"rank {culprit} on n{culprit} has" in hang.reason
    assert set(hang.victims) <= {0, 1, 3}
    assert [suspect.node for suspect in hang.suspects] == [f"n{culprit}"]


def test_where_nothing_tells_them_apart_all_are_named_and_nobody_is_suspected():
    seen = [look(rank, ("step", 11.0 + rank / 1000), step=5, quiet_s=11.0 + rank / 1000) for rank in range(4)]
    hang = find_culprit(seen, FIRST, LIMITS)
    assert (hang.ranks, hang.suspects) == ((0, 1, 2, 3), ())
    assert hang.reason == (
        "ranks 0, 1, 2, 3 have been in section 'step' for 11.0 s, limit 10 s; no rank is behind the others"
    )


def test_the_rank_that_was_the_first_to_begin_its_step_is_not_behind():
    seen = [look(rank, ("step", began_s), step=5, quiet_s=began_s) for rank, began_s in enumerate((11.0, 11.7, 10.9))]
    hang = find_culprit(seen, FIRST, LIMITS)
    assert (hang.ranks, hang.suspects) == ((0, 1, 2), ())


def test_whose_limit_runs_out_first_is_no_more_to_blame_than_the_others():
    seen = [look(rank, ("step", began_s), quiet_s=began_s) for rank, began_s in enumerate((10.01, 9.98, 9.97))]
    hang = find_culprit(seen, FIRST, LIMITS)
    assert (hang.ranks, hang.suspects) == ((0, 1, 2), ())
    starting = [look(rank, attached=False, age_s=age_s) for rank, age_s in enumerate((120.1, 119.9))]
    assert find_culprit(starting, FIRST, LIMITS).ranks == (0, 1)


@pytest.mark.parametrize(("ranks", "suspects"), [(3, 1), (4, 0), (6, 0)])
def test_a_rank_is_no_suspect_where_most_could_not_be_looked_at(ranks: int, suspects: int):
    seen = [look(0, ("step", 11.0), step=5), look(1, ("step", 11.0), step=3)]
    hang = find_culprit(seen, FIRST, LIMITS, ranks=ranks)
    assert (hang.ranks, len(hang.suspects)) == ((1,), suspects)


def test_ranks_whose_collectives_nobody_can_see_are_not_behind():
    seen = [look(0, ("step", 11.0), own_work=0), look(1, ("step", 11.0), own_work=9)]
    assert find_culprit(seen, FIRST, LIMITS).ranks == (0, 1)


def test_the_stacks_may_tell_what_the_pages_could_not():
    seen = [look(rank, ("step", 11.0)) for rank in range(3)]
    hang = narrowed(find_culprit(seen, FIRST, LIMITS), 1, "n1", "sleeps")
    assert (hang.ranks, hang.nodes, hang.victims) == ((1,), ("n1",), (0, 2))
    assert hang.reason.endswith("; rank 1 on n1: sleeps")
    assert narrowed(hang, 2, "n2", "other") is hang


def test_half_in_one_section_and_half_in_another_blames_neither_for_that():
    seen = [look(0, ("step", 11.0), ("a", 1.0)), look(1, ("step", 11.0), ("b", 1.0))]
    assert find_culprit(seen, FIRST, LIMITS).ranks == (0, 1)


def test_a_culprit_that_is_about_to_exceed_its_limit_is_told_with_it():
    seen = [look(0, ("step", 10.01), own_work=6), look(1, ("step", 9.99), ("load", 9.9), own_work=5)]
    hang = find_culprit(seen, FIRST, LIMITS)
    assert (hang.ranks, hang.section, hang.limit_s) == ((1,), "step", 10)
    assert hang.victims == (0,)


@pytest.mark.parametrize("seen", [[], [look(0, ("step", 11.0))], [look(5, ("step", 1.0))]])
def test_the_one_that_was_reported_is_named_where_nobody_else_is(seen: list[WorkerLook]):
    assert find_culprit(seen, FIRST, LIMITS).ranks == (0,)


def test_many_ranks_are_not_all_listed():
    seen = [look(rank, ("step", 11.0)) for rank in range(10_000)]
    hang = find_culprit(seen, FIRST, LIMITS)
    assert len(hang.ranks) == 10_000
    assert "and 9992 more" in hang.reason
    assert len(hang.reason) < 300


@given(seen=st.lists(looks, max_size=8))
def test_whoever_is_blamed_was_seen_or_reported(seen: list[WorkerLook]):
    hang = find_culprit(seen, FIRST, LIMITS)
    assert set(hang.ranks) <= {each.rank for each in seen} | {0}
    assert hang.ranks
    assert len(hang.nodes) == len(hang.ranks)


# The verdict


KILLED = [WorkerEnd(rank=rank, node=f"n{rank}", code=-9, attached=True, killed=True, step=5) for rank in range(4)]
HANG = find_culprit([look(rank, ("step", 11.0), stopped=rank == 2) for rank in range(4)], FIRST, LIMITS)


@pytest.mark.parametrize(
    ("ends", "circumstances", "cause", "rank"),
    [
        pytest.param(KILLED, {}, Cause.HANG, 2, id="all were killed for it"),
        pytest.param(KILLED[:2], {}, Cause.HANG, 2, id="some have not been seen to end"),
        pytest.param([replace(KILLED[0], code=-11, killed=False), *KILLED[1:]], {}, Cause.HANG, 2,
                     id="a peer fails of it"),
        pytest.param(KILLED, {"lost_nodes": ("n2",)}, Cause.NODE_LOST, None, id="its node is gone"),
        pytest.param(KILLED, {"planned": Cause.PREEMPTED, "planned_reason": "x"}, Cause.PREEMPTED, None,
                     id="it was to stop anyway"),
        pytest.param([replace(end, code=0, killed=False, finished=True) for end in KILLED], {}, Cause.FINISHED, None,
                     id="all have finished meanwhile"),
    ],
)  # fmt: skip
def test_the_verdict_on_a_hang(ends: list[WorkerEnd], circumstances: dict[str, object], cause: Cause, rank: int | None):
    verdict = judge(ends, world_size=4, seen=Circumstances(hang=HANG, **circumstances))  # type: ignore[arg-type]
    assert (verdict.cause, verdict.rank) == (cause, rank)
    if cause is Cause.HANG:
        assert (verdict.node, verdict.suspect_nodes) == ("n2", ("n2",))
        assert verdict.reason.startswith("rank 2 on n2 has been in section 'step' for 11.0 s, limit 10 s; its process")


def test_a_hang_between_equals_accuses_no_node():
    hang = find_culprit([look(rank, ("step", 11.0)) for rank in range(4)], FIRST, LIMITS)
    verdict = judge(KILLED, world_size=4, seen=Circumstances(hang=hang))
    assert (verdict.cause, verdict.rank, verdict.node, verdict.suspects) == (Cause.HANG, None, "", ())
