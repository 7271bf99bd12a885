"""What the journal knows of a job's earlier starts: whether one was preempted, and whether this one is to train."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from slurmft.config.run import RunConfig
from slurmft.policy.verdict import End
from slurmft.scheduler.parsing import SlurmJob
from slurmft.storage.journal import Event
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import Attempt
from slurmft.supervisor import act
from slurmft.supervisor.act import superfluous, was_preempted
from slurmft.supervisor.cluster import LocalCluster, SlurmCluster

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND = Attempt(job="7", restart=1, cycle=0)
Line = tuple[str, str, dict[str, Any]]


def journal(*lines: Line) -> list[Event]:
    """One line a second."""
    return [
        Event(at=NOON + timedelta(seconds=second), event=name, attempt=attempt, details=details)
        for second, (attempt, name, details) in enumerate(lines)
    ]


def first(name: str, **details: Any) -> Line:
    return "7.0.0", name, details


STARTED = first("attempt started")
STOP = first("decision", action="stop", exit_code=75)
GOES_ON = first("decision", action="continue", exit_code=75)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], False),
        ([STARTED, first("verdict", cause="time limit")], False),
        ([STARTED, first("verdict", cause="preempted")], True),
        ([STARTED, first("stop requested", cause="preempted"), first("verdict", cause="stopped by user")], True),
        ([STARTED], True),  # it was killed, perhaps at the end of a grace
        ([("7.1.0", "attempt started", {}), ("7.1.0", "verdict", {"cause": "preempted"})], False),  # this one
        ([("8.0.0", "attempt started", {}), ("8.0.0", "verdict", {"cause": "preempted"})], False),  # another job
    ],
)
def test_an_earlier_start_was_preempted(lines: list[Line], expected: bool) -> None:
    assert was_preempted(journal(*lines), SECOND) == expected


@pytest.mark.parametrize(
    ("lines", "end"),
    [
        ([STARTED, STOP], End.STOPPED),
        ([STARTED, STOP, first("requeue stays on")], End.STOPPED),
        ([STARTED, GOES_ON, first("resubmitting"), first("resubmitted", job="8")], End.HANDED_ON),
        ([STARTED, GOES_ON, first("not continued", reason="job 8 of this run is in the queue", job="8")],
         End.HANDED_ON),
        ([STARTED, GOES_ON, first("not continued", reason="preemption.continue_by is nothing")], End.NOT_CONTINUED),
        ([STARTED, STOP, ("7.1.0", "superfluous start", {})], End.STOPPED),
        # killed at its very begin, and decided about by its guardian
        ([first("supervisor lost"), GOES_ON, first("resubmitted", job="8")], End.HANDED_ON),
        # to train
        ([STARTED, GOES_ON, first("requeued")], None),
        ([STARTED, GOES_ON], None),
        ([STARTED, GOES_ON, first("not continued", reason="neither requeue nor resubmit worked", command="x")], None),
        ([STARTED, GOES_ON, first("not continued", reason="the end of this attempt was acted on already")], None),
        ([STARTED, first("decision", action="of the future")], None),
        ([STARTED], None),
        ([("8.0.0", "attempt started", {}), ("8.0.0", "decision", {"action": "stop"})], None),
        ([STOP, STARTED, first("decision", action="restart")], None),
        ([], None),
    ],
)  # fmt: skip
def test_a_start_right_after_an_end_that_was_final(lines: list[Line], end: End | None) -> None:
    history = journal(*lines)
    queued_at = (history[-1].at if history else NOON).timestamp() + 1
    found = superfluous(history, Attempt(job="7", restart=2, cycle=0), queued_at)
    assert (found.end if found else None) == end
    if found:
        assert found.earlier == "7.0.0"
        assert found.exit_code == 75


def test_a_person_who_requeues_a_stopped_job_later_is_obeyed() -> None:
    history = journal(STARTED, STOP)
    assert superfluous(history, SECOND, history[-1].at.timestamp() + 3600) is None


NO_ANSWER = [STARTED, GOES_ON, first("resubmitting"), ("7.1.0", "attempt started", {}), ("7.1.0", *STOP[1:])]


@pytest.mark.parametrize(
    ("lines", "queued_s", "is_superfluous"),
    [
        (NO_ANSWER, 2, True),
        (NO_ANSWER, 3, True),
        (NO_ANSWER, None, False),  # of its user, for all that is known
        (NO_ANSWER, 0, False),  # submitted beside the one that began the run
        (NO_ANSWER, 60, False),  # its user wants the stopped run to go on
        ([*NO_ANSWER[:3], first("resubmitted", job="8"), *NO_ANSWER[3:]], 2, False),  # that was answered, and is job 8
        ([*NO_ANSWER[:4], ("7.1.0", *GOES_ON[1:])], 2, False),
        (NO_ANSWER[:3], 2, False),
    ],
)
def test_a_successor_whose_sbatch_got_no_answer_does_not_train_after_a_stop(
    lines: list[Line], queued_s: float | None, is_superfluous: bool
) -> None:
    queued_at = None if queued_s is None else NOON.timestamp() + queued_s
    found = superfluous(journal(*lines), Attempt(job="9", restart=0, cycle=0), queued_at)
    assert (found is not None) == is_superfluous
    if found:
        assert (found.end, found.earlier, found.exit_code) == (End.STOPPED, "7.1.0", 75)


# --- Slurm is told not to requeue a job: the journal first, for a limited time, and only where it would ---


RECORDED = Path(__file__).parents[2] / "data" / "slurm"


def config_of(folder: Path, continue_by: str = "auto") -> RunConfig:
    return RunConfig.model_validate(
        {"command": ["train"], "run_folder": str(folder), "preemption": {"continue_by": continue_by}}
    )


@pytest.fixture
def keep_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Event], list[str]]]:
    """Calls it for a job that Slurm shows like that; returns the journal, and the updates that Slurm was asked for."""
    (tmp_path / "bin").mkdir()
    script, calls = tmp_path / "bin" / "scontrol", tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.setattr(act, "ASK_S", 0.2)
    monkeypatch.setattr(act, "TELL_S", 0.2)

    def call(
        recording: str, *, end: End = End.STOPPED, update: str = "exit 0", continue_by: str = "auto", show: str = ""
    ) -> tuple[list[Event], list[str]]:
        shown = RECORDED / f"{recording}.txt"
        script.write_text(
            f'#!/bin/bash\n[[ $1 == update ]] || {show or f"exec cat {shown}"}\n'
            f'cat {tmp_path}/journal.jsonl >> {calls}.journal; echo "$*" >> {calls}\n{update}\n'
        )  # fmt: skip
        script.chmod(0o755)
        cluster = SlurmCluster(SlurmJob(job_id="8", restart=0, nodes="n1", node_count=1, partition="low"))
        journal = PatientJournal(tmp_path, FolderThread(), attempt=str(cluster.attempt))
        act.keep_ended(config_of(tmp_path, continue_by), end, cluster, journal, [])
        journal.flush(5.0)
        return (journal.read() if (tmp_path / "journal.jsonl").exists() else []), calls.read_text().splitlines()

    return call


@pytest.mark.parametrize("version", ["22.05", "23.11", "24.11", "25.11", "26.05"])
def test_in_the_grace_the_journal_knows_it_before_slurm(keep_ended: Callable, version: str, tmp_path: Path) -> None:
    events, updates = keep_ended(f"{version}/job-grace")
    assert [event.event for event in events] == ["switching requeue off"]
    assert updates == ["update JobId=8 Requeue=0"]
    assert "switching requeue off" in (tmp_path / "calls.journal").read_text(), "before it was done"


@pytest.mark.parametrize(
    ("recording", "end"),
    [("job-calm", End.STOPPED), ("job-grace", End.FINISHED), ("job-grace", End.OPEN), ("job-grace-off", End.STOPPED)],
)
def test_elsewhere_nothing_is_changed(keep_ended: Callable, recording: str, end: End) -> None:
    assert keep_ended(f"26.05/{recording}", end=end) == ([], [])


def test_a_role_leaves_the_job_as_it_is(keep_ended: Callable) -> None:
    assert keep_ended("26.05/job-grace", continue_by="job") == ([], [])


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ("echo 'slurm_update error: Requested operation is presently disabled' >&2; exit 1", "presently disabled"),
        ("exec sleep 60", "did not answer within"),
    ],
    ids=["refused", "no answer"],
)
def test_a_slurm_that_does_not_take_it_delays_the_end_for_a_limited_time_and_is_told(
    keep_ended: Callable, update: str, words: str
) -> None:
    began = time.monotonic()
    events, _ = keep_ended("26.05/job-grace", update=update)
    assert time.monotonic() - began < 20
    assert [event.event for event in events] == ["switching requeue off", "requeue stays on"]
    assert words in events[1].details["reason"]


def test_a_slurm_that_says_nothing_may_requeue_what_its_user_has_stopped(keep_ended: Callable) -> None:
    events, updates = keep_ended("26.05/job-grace", show="{ echo 'Unable to contact slurm controller' >&2; exit 1; }")
    assert ([event.event for event in events], updates) == (["requeue stays on"], [])
    assert superfluous(journal(STARTED, STOP, first("requeue stays on")), SECOND, None) is not None


def test_a_machine_without_slurm_is_left_alone(tmp_path: Path) -> None:
    journal = PatientJournal(tmp_path, FolderThread())
    act.keep_ended(config_of(tmp_path), End.STOPPED, LocalCluster({}), journal, [])
    assert journal.unwritten() == []
    assert not (tmp_path / "journal.jsonl").exists()
