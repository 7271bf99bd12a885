"""Who it was: tables of situations, and what must hold for all of them."""

import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.judge import MAX_NAMED_RANKS, Blame, Summary, Where, blame, whereabouts
from slurmft.policy.stop import tick_of
from slurmft.worker.signals import AgreementByAgent

TORCH = "/env/lib/python3.11/site-packages/torch"


def waits(rank: int, step: int, in_what: str = "all_reduce") -> Summary:
    return Summary(rank=rank, node=f"n{rank // 2}", where=Where.COLLECTIVE, doing=f"waits for {in_what}",
                   attached=True, step=step, tick=tick_of(step))  # fmt: skip


def works(rank: int, step: int, doing: str = "is in load (data.py:7)") -> Summary:
    return Summary(rank=rank, node=f"n{rank // 2}", where=Where.ELSEWHERE, doing=doing, attached=True, step=step,
                   tick=tick_of(step))  # fmt: skip


def stopped(rank: int, step: int = 10) -> Summary:
    return Summary(rank=rank, node=f"n{rank // 2}", where=Where.STOPPED, doing="is stopped", attached=True, step=step,
                   tick=tick_of(step))  # fmt: skip


def dead(rank: int, code: int, error: str = "", *, killed: bool = False) -> Summary:
    return Summary(rank=rank, node=f"n{rank // 2}", where=Where.DEAD, exit_code=code, error=error, killed=killed)


def mute(rank: int) -> Summary:
    return Summary(rank=rank, node=f"n{rank // 2}", where=Where.NO_ANSWER, doing="reports no stack")


ECHO = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234"


@pytest.mark.parametrize(
    ("ranks", "culprits", "victims", "words"),
    [
        pytest.param([waits(0, 7), works(1, 7), waits(2, 7)], [1], [0, 2], "load (data.py:7) at step 7, while 2 ranks",
                     id="user code"),
        pytest.param([waits(0, 7), works(1, 6), works(2, 7)], [1], [0, 2], "step 6", id="the one furthest behind"),
        pytest.param([waits(0, 7), works(1, 8)], [0], [1], "left behind", id="waits for what the others have passed"),
        pytest.param([waits(0, 7), waits(1, 6)], [1], [0], "others have reached step 7", id="all wait, one behind"),
        pytest.param([waits(0, 7, "barrier"), waits(1, 7), waits(2, 7)], [0], [1, 2], "barrier",
                     id="another collective"),
        pytest.param([works(0, 7), works(1, 5), works(2, 7)], [1], [0, 2], "step 5", id="nobody waits, one behind"),
        pytest.param([works(0, 7, "a"), works(1, 7, "a"), works(2, 7, "b")], [2], [0, 1], "b at", id="outlier"),
        pytest.param([waits(0, 7), stopped(1), waits(2, 7)], [1], [0, 2], "is stopped", id="stopped"),
        pytest.param([dead(1, -9), waits(0, 7), works(2, 7)], [1], [0, 2], "signal 9", id="killed by somebody"),
        pytest.param([dead(0, 1, ECHO), dead(1, -11), dead(2, 1, ECHO)], [1], [0, 2], "signal 11",
                     id="a crash and echoes"),
        pytest.param([dead(2, 1, "ValueError: x"), dead(0, 1, "KeyError: y"), waits(1, 7)], [2], [0, 1], "ValueError",
                     id="first"),
        pytest.param([dead(0, 1, ECHO), stopped(1), dead(2, 1, ECHO)], [1], [0, 2], "is stopped",
                     id="echoes of a stop"),
        pytest.param([dead(0, -9, killed=True), waits(1, 7), works(2, 7)], [2], [0, 1], "load",
                     id="our own kill is no crash"),
        pytest.param([dead(0, 0), waits(1, 7), waits(2, 7)], [0], [1, 2], "ended with code 0", id="left early"),
        pytest.param([waits(0, 7), mute(1), waits(2, 7)], [1], [0, 2], "reports no stack", id="no answer"),
        pytest.param([mute(0), mute(1)], [], [0, 1], "do not differ", id="no Python at all"),
        pytest.param([waits(0, 7), waits(1, 7)], [], [0, 1], "the network", id="all in the same collective"),
        pytest.param([], [], [], "no rank was alive", id="nobody"),
    ],
)  # fmt: skip
def test_situations(ranks: list[Summary], culprits: list[int], victims: list[int], words: str) -> None:
    found = blame(ranks)
    assert [each.rank for each in found.culprits] == culprits
    assert list(found.victims) == victims
    assert words in " ".join([found.undecided, *(each.reason for each in found.culprits)])


def test_a_lost_node_is_named_unless_a_rank_has_failed_by_itself() -> None:
    lost = {2: "n1", 3: "n1"}
    found = blame([waits(0, 7), waits(1, 7)], lost=lost)
    assert [(each.rank, each.node) for each in found.culprits] == [(2, "n1"), (3, "n1")]
    assert found.victims == (0, 1)
    assert [each.rank for each in blame([dead(0, -11), waits(1, 7)], lost=lost).culprits] == [0]


def test_an_overdue_section_decides_between_ranks_that_nothing_else_tells_apart() -> None:
    ranks = [works(0, 7, "a"), works(1, 7, "b")]
    found = blame(ranks, overdue={1: "section load is open for 9 s"})
    assert [each.rank for each in found.culprits] == [1]
    assert "9 s" in found.culprits[0].reason
    assert blame(ranks, overdue={0: "x", 1: "y"}).culprits == ()


def test_a_whole_cluster_that_is_alike_is_no_culprit() -> None:
    lost = dict.fromkeys(range(MAX_NAMED_RANKS + 1), "n1")
    found = blame([], lost=lost)
    assert found.culprits == ()
    assert "alike" in found.undecided


summaries = st.builds(
    Summary,
    rank=st.integers(0, 30),
    node=st.sampled_from(["n1", "n2"]),
    where=st.sampled_from(list(Where)),
    doing=st.sampled_from(["a", "b", ""]),
    attached=st.booleans(),
    step=st.integers(0, 3),
    tick=st.integers(-1, 3).map(lambda step: tick_of(step) if step >= 0 else -1),
    exit_code=st.none() | st.integers(-20, 20),
    killed=st.booleans(),
    error=st.sampled_from(["", ECHO, "ValueError"]),
)


@given(
    st.lists(summaries, max_size=12, unique_by=lambda rank: rank.rank),
    st.dictionaries(st.integers(0, 30), st.just("x")),
)
def test_what_always_holds(ranks: list[Summary], overdue: dict[int, str]) -> None:
    found = blame(ranks, overdue=overdue)
    guilty = {each.rank for each in found.culprits}
    assert guilty.isdisjoint(found.victims)
    assert guilty | set(found.victims) <= {rank.rank for rank in ranks}
    assert bool(guilty) != bool(found.undecided)
    assert not {rank.rank for rank in ranks if rank.killed and rank.where is Where.DEAD} & guilty
    by_rank = {rank.rank: rank for rank in ranks}
    newest = max((rank.tick for rank in ranks if rank.attached), default=0)
    behind = [
        rank for rank in ranks if rank.where not in (Where.DEAD, Where.STOPPED) and rank.attached and rank.tick < newest
    ]
    in_front = {
        r for r in guilty if by_rank[r].where is Where.COLLECTIVE and by_rank[r].tick == newest and by_rank[r].attached
    }
    assert not (in_front and behind)


@given(st.lists(summaries, min_size=1, max_size=8, unique_by=lambda rank: rank.rank), st.randoms(use_true_random=False))
def test_the_order_of_living_ranks_does_not_matter(ranks: list[Summary], random: Any) -> None:
    living = [rank for rank in ranks if rank.where is not Where.DEAD]
    shuffled = random.sample(living, len(living))
    assert _set(blame(shuffled)) == _set(blame(living))


def _set(found: Blame) -> tuple[Any, ...]:
    return {(each.rank, each.reason) for each in found.culprits}, found.victims, found.undecided


@of_each(calls__state__where__doing=[
        ([(f"{TORCH}/distributed/distributed_c10d.py", "1", "all_reduce"), ("/me/t.py", "1", "f")], "S",
         Where.COLLECTIVE, "all_reduce"),
        ([(f"{TORCH}/distributed/c10d_logger.py", "83", "wrapper")], "R", Where.COLLECTIVE, "a collective"),
        ([(f"{TORCH}/distributed/distributed_c10d.py", "1", "gather"), ("/slurmft/checkpoint/a.py", "1", "save")], "S",
         Where.COLLECTIVE, "gather"),
        ([(f"{TORCH}/autograd/graph.py", "1", "_engine_run_backward")], "S", Where.COLLECTIVE, "backward"),
        ([(f"{TORCH}/autograd/graph.py", "1", "_engine_run_backward")], "R", Where.ELSEWHERE, "graph.py"),
        ([(f"{TORCH}/cuda/__init__.py", "1", "synchronize")], "R", Where.COLLECTIVE, "GPU"),
        ([("/usr/lib/python3.12/threading.py", "5", "wait"), (f"{TORCH}/utils/data/x.py", "9", "get")], "S",
         Where.ELSEWHERE, "data loader"),
        ([("<frozen posixpath>", "5", "join"), ("/me/train.py", "9", "load")], "S",
         Where.ELSEWHERE, "is in load (train.py:9)"),
        ([("/x/slurmft/checkpoint/payload.py", "9", "write_payload")], "D", Where.ELSEWHERE, "checkpoint"),
        ([(inspect.getfile(AgreementByAgent), "9", AgreementByAgent.at.__name__)], "S", Where.COLLECTIVE, "agree"),
        ([(f"{TORCH}/distributed/elastic/agent.py", "9", "run")], "S", Where.ELSEWHERE, "run"),
        ([("/me/train.py", "9", "f")], "T", Where.STOPPED, "SIGSTOP"),
        ([], "S", Where.NO_ANSWER, "stack"),
        ([], "D", Where.NO_ANSWER, "kernel"),
    ])  # fmt: skip
def test_whereabouts(calls: list[tuple[str, str, str]], state: str, where: Where, doing: str) -> None:
    found = whereabouts(calls, state)
    assert found[0] is where
    assert doing in found[1]
