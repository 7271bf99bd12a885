"""Which runs cron brings back: those that nobody decided to end, once, and not for ever."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from of_each import of_each

from slurmft.config.run import RunConfig
from slurmft.operations import control, rescue
from slurmft.operations.rescue import is_orphan, is_unfinished, rescues_without_progress
from slurmft.scheduler.parsing import JobRecord
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import Attempt, Owner, RunFolder
from slurmft.system import processes

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def history(*lines: tuple[str, str] | tuple[str, str, dict[str, object]]) -> list[Event]:
    """One event a minute: (attempt, name, details)."""
    return [
        Event(at=BEGIN + timedelta(minutes=minute), attempt=line[0], event=line[1],
              details=line[2] if len(line) > 2 else {})
        for minute, line in enumerate(lines)
    ]  # fmt: skip


STARTED = ("7.0.0", "attempt started")
STEP = ("7.0.0", "first step")
CONTINUES = ("7.0.0", "decision", {"action": "continue"})
STOPPED = ("7.0.0", "stop requested", {"cause": "stopped by user"})


@of_each(
    events__unfinished=[
        ([], False),
        ([("", "submitting"), ("", "submitted")], True),
        ([STARTED, STEP], True),
        ([STARTED, STEP, CONTINUES], True),
        ([STARTED, STEP, CONTINUES, ("7.0.0", "requeueing")], True),
        ([STARTED, STEP, CONTINUES, ("7.0.0", "resubmitted")], True),
        ([STARTED, STEP, ("7.0.0", "decision", {"action": "stop"})], False),
        ([STARTED, STEP, ("7.0.0", "decision", {"action": "finish"})], False),
        ([STARTED, STEP, ("", "cancelled")], False),
        ([STARTED, STEP, STOPPED], False),
        ([STARTED, STEP, ("7.0.0", "stop requested", {"cause": "preempted"})], True),
        ([STARTED, STEP, ("7.0.0", "stop requested", {"cause": "preempted"}), ("7.0.0", "will not continue")], False),
        ([STARTED, STEP, STOPPED, ("", "submitting"), ("", "submitted")], True),
        ([STARTED, STOPPED, ("7.1.0", "attempt started")], True),
        ([STARTED, STEP, CONTINUES, ("", "submitting"), ("", "submitted")], True),
        ([STARTED, CONTINUES, ("7.1.0", "attempt started")], True),
        ([STARTED, CONTINUES, ("8.0.0", "attempt started")], False),
        ([("6.0.0", "attempt started"), ("6.0.0", "decision", {"action": "continue"})], True),
        ([("6.0.0", "attempt started"), ("6.0.0", "decision", {"action": "stop"})], False),
        ([STARTED, ("7.0.0", "decision", {"action": ["continue"]})], False),
        ([STARTED, ("7.0.0", "decision", {"action": {}})], False),
    ]
)
def test_what_is_unfinished(events, unfinished):
    assert is_unfinished(history(*events), "7") is unfinished


RESCUE = ("", "rescuing")
PROGRESS = ("7.0.0", "verdict", {"saved_step": 20, "first_step": 10})
NO_PROGRESS = ("7.0.0", "verdict", {"saved_step": 10, "first_step": 10})
NOTHING_SAVED = ("7.0.0", "verdict", {"first_step": 10})


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([], 0),
        ([RESCUE, RESCUE], 2),
        ([RESCUE, PROGRESS, RESCUE], 1),
        ([RESCUE, NO_PROGRESS, NOTHING_SAVED, RESCUE], 2),
    ],
)
def test_rescues_are_counted_since_the_newest_progress(events, count):
    assert rescues_without_progress(history(*events)) == count


@of_each(
    state__nodes__batch_host__orphan=[
        ("RUNNING", "n[1-2]", "n1", False),
        ("RUNNING", "n[2-4]", "n1", True),
        ("RUNNING", "n10", "n1", True),
        ("RUNNING", "n[1-2]", "", False),
        ("PENDING", "", "n1", False),
        ("COMPLETING", "n2", "n1", False),
        ("RUNNING", "]garbled[", "n1", False),
        ("RUNNING", "n[1-999999999]", "n1", False),
    ]
)
def test_a_job_without_its_batch_host_is_an_orphan(state, nodes, batch_host, orphan):
    record = JobRecord(job_id="7", state=state, reason="None", nodes=nodes, batch_host=batch_host, start=1.0, end=2.0,
                       limit_s=60.0, partition="low")  # fmt: skip
    assert is_orphan(record) is orphan


@pytest.mark.parametrize(("action", "is_sweep", "done"), [("finish", False, 20), ("continue", False, None),
                                                          ("finish", True, None)])  # fmt: skip
def test_a_run_that_was_lost_before_its_mark_is_complete(
    tmp_path: Path, action: str, is_sweep: bool, done: int | None
) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    sweep = {"trials": {"list": [{"x": 1}]}} if is_sweep else {}
    settings = {"run_folder": str(run.path), "command": ["true"], **sweep}
    run.config.write_text(RunConfig.model_validate(settings).as_yaml())
    run.take_over(Owner(job="7", restart=0, generation=1, cluster="slurm", host="n0", pid=1))
    journal = run.journal(Attempt(job="7", restart=0))
    journal.append(EventName.ATTEMPT_STARTED, generation=1)
    journal.append(EventName.VERDICT, cause="finished", last_step=20)
    journal.append(EventName.DECISION, action=action)
    run.request("KILL", "me")  # no job of it is to follow
    assert (rescue._submit_again(run, {}, [], "cron") is None) is (done is None)
    assert (run.done() or {}).get("step") == done


# --- A stop that comes while no supervisor owns the run: its guardian is about to start another one, and must find it


@pytest.fixture
def guardian() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def started(run: RunFolder, process: subprocess.Popen[bytes]) -> None:
    birth = processes.birth_of(process.pid)
    run.journal().append(EventName.STARTED_HERE, process=process.pid, birth=birth, host=processes.me().host)


@pytest.mark.parametrize("owned", [True, False], ids=["its supervisor was killed", "it has not begun yet"])
def test_a_stop_waits_for_the_next_supervisor(tmp_path: Path, guardian: subprocess.Popen[bytes], owned: bool) -> None:
    run = RunFolder(tmp_path / "runs" / "a")
    run.create()
    if owned:
        with subprocess.Popen([sys.executable, "-c", ""]) as killed:
            pass
        host = processes.me().host
        run.take_over(
            Owner(job="local-1", restart=0, generation=1, cluster="local", host=host, pid=killed.pid, birth="1")
        )
    started(run, guardian)
    assert control.is_alive(run)
    assert "will save and end" in control.stop(run, "me")
    assert run.see_request("KILL") == "me"
    guardian.kill()
    guardian.wait()
    assert not control.is_alive(run)
    assert "is not running" in control.stop(run, "me")
    assert run.see_request("KILL") is None
