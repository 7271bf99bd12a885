"""Where a run must not go on: what its journal demands, and which nodes of an allocation that leaves."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from slurmft.config.run import validate
from slurmft.scheduler.parsing import SlurmJob
from slurmft.storage.journal import Event
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor import placement
from slurmft.supervisor.cluster import SlurmCluster, Start
from slurmft.supervisor.placement import Duty, all_busy, duty_of, left, next_cycle, nodes_to_use, ours, settle

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def history(*lines: tuple[str, dict[str, Any]], attempt: str = "7.0.0") -> list[Event]:
    return [
        Event(at=BEGIN + timedelta(minutes=minute), attempt=attempt, event=name, details=details)
        for minute, (name, details) in enumerate(lines)
    ]


VERDICT: tuple[str, dict[str, Any]] = ("verdict", {})
PROGRESS = ("verdict", {"first_step": 5, "saved_step": 6})
INCONCLUSIVE = ("inconclusive", {"suspects": ["n1"]})
GPU_A, GPU_B = ("avoiding_gpus", {"gpus": ["a"]}), ("avoiding_gpus", {"gpus": ["b"]})
BOTH = frozenset({"n1", "n2"})
MOVE = ("decision", {"action": "continue", "avoid": ["n1", "n2"], "elsewhere": True})
KEEP_OFF = ("decision", {"action": "continue", "avoid": ["n3"]})
STOP = ("decision", {"action": "stop", "avoid": ["n1"], "elsewhere": True})
ESCAPED: tuple[str, dict[str, Any]] = ("exclusion_escaped", {})


@pytest.mark.parametrize(
    ("events", "duty"),
    [
        pytest.param([], Duty(), id="nothing yet"),
        pytest.param([VERDICT, MOVE], Duty(nodes=BOTH, undecided=BOTH), id="different nodes are demanded"),
        pytest.param([VERDICT, KEEP_OFF], Duty(), id="other nodes are only better"),
        pytest.param([VERDICT, STOP], Duty(), id="it ends"),
        pytest.param([VERDICT, STOP, VERDICT, KEEP_OFF], Duty(), id="it had ended"),
        pytest.param([PROGRESS, MOVE, PROGRESS, KEEP_OFF], Duty(), id="it has been fulfilled"),
        pytest.param([PROGRESS, MOVE, VERDICT, KEEP_OFF], Duty(undecided=BOTH), id="preempted before it was"),
        pytest.param([PROGRESS, MOVE, VERDICT, INCONCLUSIVE, STOP], Duty(undecided=frozenset({"n1"})), id="no answer"),
        pytest.param([VERDICT, MOVE, VERDICT, STOP], Duty(), id="it ended with an answer"),
        pytest.param([PROGRESS, GPU_A, KEEP_OFF, VERDICT, GPU_B, KEEP_OFF], Duty(gpus=frozenset("ab")), id="two GPUs"),
        pytest.param([PROGRESS, GPU_A, KEEP_OFF, PROGRESS, KEEP_OFF], Duty(), id="other GPUs have answered"),
        pytest.param(
            [VERDICT, MOVE, ESCAPED, MOVE, ESCAPED, MOVE], Duty(nodes=BOTH, undecided=BOTH, escapes=2), id="escaped"
        ),
        pytest.param([VERDICT, MOVE, ESCAPED, MOVE, VERDICT, MOVE], Duty(nodes=BOTH, undecided=BOTH), id="anew"),
        pytest.param([("decision", {})], Duty(), id="a decision of nothing"),
        pytest.param([("decision", {"action": ["continue"], "avoid": 5, "elsewhere": True})], Duty(), id="damage"),
        pytest.param([("inconclusive", {"suspects": 5}), STOP, ("avoiding_gpus", {"gpus": 5})], Duty(), id="no lists"),
        pytest.param([("decision", {**MOVE[1], "avoid": 5})], Duty(), id="nodes that are no list"),
    ],
)
def test_what_the_journal_demands(events, duty):
    assert duty_of(history(*events)) == duty


def test_only_what_the_run_excluded_itself_is_taken_back():
    events = history(("avoiding", {"nodes": "n[1,5]"}), ("decision", {"nodes": "n2"}), ("avoiding", {"nodes": "n3"}))
    assert ours(events) == {"n1", "n3", "n5"}
    assert ours(history(("avoiding", {}), ("avoiding", {"nodes": "n["}))) == frozenset()


def test_a_run_does_not_go_back_to_what_it_has_left_unless_that_is_acquitted():
    acquitted = ("evidence", {"kind": "rerun acquitted", "node": "n1"})
    assert left(history(VERDICT, MOVE, VERDICT, KEEP_OFF)) == {"n1", "n2"}
    assert left(history(VERDICT, MOVE, acquitted)) == {"n2"}
    assert left(history(VERDICT, STOP, VERDICT, KEEP_OFF)) == frozenset()


def avoiding(nodes: str) -> tuple[str, dict[str, Any]]:
    return ("avoiding", {"nodes": nodes})


STARTED: tuple[str, dict[str, Any]] = ("attempt started", {})
SUBMITTING: tuple[str, dict[str, Any]] = ("submitting", {})
RESUBMITTING: tuple[str, dict[str, Any]] = ("resubmitting", {})


@pytest.mark.parametrize(
    ("job_7", "job_8", "asked", "excluded"),
    [
        pytest.param([SUBMITTING, avoiding("n1"), STARTED], [], "7", {"n1"}, id="at the submission"),
        pytest.param([("submitting", {"excluded": "n[1,4]"}), avoiding("n[1-2]"), STARTED], [], "7", {"n2"},
                     id="its user did so before"),
        pytest.param([STARTED, avoiding("n1"), RESUBMITTING], [STARTED, avoiding("n2")], "8", {"n1", "n2"},
                     id="of a job and its successor"),
        pytest.param([STARTED, avoiding("n1"), RESUBMITTING], [], "8", {"n1"}, id="a successor's first start"),
        pytest.param([STARTED, avoiding("n1"), SUBMITTING], [STARTED], "8", set(), id="submitted again"),
        pytest.param([STARTED, avoiding("n1")], [STARTED, avoiding("n2")], "8", {"n2"}, id="by plain sbatch"),
        pytest.param([STARTED, avoiding("n1")], [], "8", set(), id="the first start of a plain sbatch"),
        pytest.param([STARTED, avoiding("n1")], [], None, {"n1"}, id="no job in particular"),
    ],
)  # fmt: skip
def test_what_a_user_excludes_is_never_ours(job_7, job_8, asked, excluded):
    events = [*history(*job_7, attempt="7.0.0"), *history(*job_8, attempt="8.0.0")]
    assert ours(events, asked) == excluded


SINFO = "n1|low*|MIXED\nn2|low*|MIXED\nn3|low*|IDLE\nn4|low*|ALLOCATED\nn5|high|IDLE\nn6|low*|IDLE*\nn7|low*|IDLE~\n"


@pytest.mark.parametrize(
    ("avoid", "needed", "free"),
    [
        pytest.param({"n1"}, 3, None, id="its own other node, an idle one, one that sleeps"),
        pytest.param({"n1"}, 4, 3, id="not the busy one, not one that does not answer, not another partition's"),
        pytest.param({"n1", "n3"}, 3, 2, id="not an excluded one"),
    ],
)
def test_whether_a_run_could_begin_elsewhere_at_once(tmp_path, monkeypatch, avoid, needed, free):
    (tmp_path / "sinfo").write_text(f"#!/bin/bash\nprintf '{SINFO}'\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    config = validate({"command": "true", "run_folder": "/r", "nodes": needed}, source="here")
    why = all_busy(config, "low", ["n1", "n2"], avoid)
    assert why == (
        "" if free is None else f"only {free} of {needed} nodes are free now (rerun.wait_for_others is false)"
    )


@pytest.mark.parametrize(
    ("allocated", "avoid", "needed", "chosen"),
    [
        (["n1", "n2", "n3"], {"n1"}, 2, ("n2", "n3")),
        (["n3", "n1", "n2"], set(), 2, ("n3", "n1", "n2")),
        (["n1", "n2"], {"n1"}, 2, None),
        (["n1", "n2"], {"n9"}, 2, ("n1", "n2")),
        ([], set(), 1, None),
    ],
)
def test_the_nodes_of_an_allocation(allocated, avoid, needed, chosen):
    assert nodes_to_use(allocated, frozenset(avoid), needed) == chosen


def test_every_start_in_a_job_is_a_cycle_of_its_own():
    attempt = Attempt(job="7", restart=1)
    assert next_cycle(attempt, []) == attempt
    started: tuple[str, dict[str, Any]] = ("attempt started", {})
    earlier = [*history(started, attempt="7.0.0"), *history(started, attempt="77.1.5"), *history(attempt="7.1.9")]
    assert next_cycle(attempt, earlier) == attempt
    assert str(next_cycle(attempt, [*earlier, *history(started, attempt="7.1.0")])) == "7.1.1"
    assert str(next_cycle(attempt, history(started, started, attempt="7.1.10"))) == "7.1.11"
    lost: tuple[str, dict[str, Any]] = ("supervisor lost", {})  # before it had written that it started
    assert str(next_cycle(attempt, [*history(started, attempt="7.1.0"), *history(lost, attempt="7.1.1")])) == "7.1.2"


def test_a_node_that_was_acquitted_is_used_again_by_the_next_attempt(monkeypatch, tmp_path):
    monkeypatch.setattr(placement, "to_keep_off", lambda *_args, **_more: frozenset())
    config = validate(
        {"command": ["true"], "run_folder": str(tmp_path / "run"), "nodes": 1, "spare_nodes": 1}, source="test"
    )
    cluster = SlurmCluster(SlurmJob(job_id="7", restart=1, nodes="n[1-2]", node_count=2, partition="low"))
    run = RunFolder(tmp_path / "run")
    run.create()
    move = ("decision", {"action": "continue", "avoid": ["n1"], "elsewhere": True})
    acquitted = ("evidence", {"kind": "rerun acquitted", "node": "n1"})

    def nodes_after(*lines: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
        start = Start(cluster=cluster, run=run, journal=PatientJournal(run.path, FolderThread()), thread=FolderThread(),
                      generation=1, history=history(*lines), secret=b"")  # fmt: skip
        assert settle(config, start) is None
        return cluster.nodes

    assert nodes_after(VERDICT, move) == ("n2",)
    assert nodes_after(VERDICT, move, PROGRESS, acquitted) == ()
