"""Lending nodes: what is submitted, what is refused, and where agents of another job find the run's supervisor."""

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slurmft.cli.main import cli
from slurmft.config.run import RunConfig, validate
from slurmft.errors import StorageError, UsageError
from slurmft.operations import control
from slurmft.operations.control import lend
from slurmft.policy.job_identity import OwnJob
from slurmft.scheduler.own_jobs import lending_command
from slurmft.scheduler.parsing import JobRecord
from slurmft.storage import run_folder
from slurmft.storage.run_folder import Attempt, Owner, RunFolder
from slurmft.supervisor.agents import crew_of

ELASTIC = {"nodes": 2, "elastic": {"max_nodes": 4}, "slurm": {"partition": "low", "hold": True, "requeue": False}}


def run_of(path: Path, **keys: Any) -> tuple[RunFolder, RunConfig]:
    config = validate({"command": "true", "run_folder": str(path / "a run's"), **ELASTIC, **keys}, source="here")
    run = RunFolder(config.run_folder)
    run.create()
    run.config.write_text(config.as_yaml())
    return run, config


def join(run: RunFolder, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["join", str(run.path), *arguments])


def own(run: RunFolder, cycle: int) -> None:
    with run.lock():
        run.take_over(
            Owner(job="7", restart=1, cycle=cycle, generation=cycle + 1, cluster="slurm", host="n1", pid=1, birth="",
                  folder=str(run.path), inode=0)
        )  # fmt: skip


def test_the_job_has_the_options_of_the_run_and_the_given_ones_beat_them(tmp_path):
    run, config = run_of(tmp_path)
    argv = lending_command(config, run, nodes=3, options={"partition": "high", "exclusive": True},
                           avoid=frozenset({"n2", "n1"}))  # fmt: skip
    assert {"--nodes=3", "--partition=high", "--exclusive", "--exclude=n[1-2]", "--requeue"} <= set(argv)
    assert not {"--hold", "--partition=low"} & set(argv), "a lender is not held because the run is"
    (inside,) = [word.removeprefix("--wrap=exec ") for word in argv if word.startswith("--wrap=")]
    assert shlex.split(inside) == [sys.executable, "-P", "-u", "-m", "slurmft", "join", str(run.path), "--here"]


def test_a_dry_run_shows_it_and_changes_nothing(tmp_path):
    run, _ = run_of(tmp_path)
    shown = join(run, "--nodes", "2", "--dry-run", "--", "--time=5")
    assert shown.exit_code == 0, shown.output
    assert "--nodes=2" in shown.stdout
    assert "--time=5" in shown.stdout
    assert list(run.journal().read()) == []


@pytest.mark.parametrize(
    ("keys", "arguments", "words"),
    [
        ({"elastic": {}}, (), "trains on 2 nodes, always"),
        ({}, ("--", "--nodes=3"), "--nodes is set by slurmft"),
        ({}, ("--nodes", "0"), "0 is not in the range"),
        ({}, ("--here",), "this is not inside a Slurm job"),
    ],
    ids=["not elastic", "the number twice", "none", "not in a job"],
)
def test_what_cannot_be_joined_says_why(tmp_path, monkeypatch, keys, arguments, words):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    refused = join(run_of(tmp_path, **keys)[0], *arguments)
    assert refused.exit_code != 0
    error = refused.exception
    assert words in (f"{error}" if isinstance(error, UsageError) else refused.output)


def test_a_finished_run_wants_no_nodes(tmp_path):
    run, _ = run_of(tmp_path)
    run.mark_done(step=5, reason="all ranks finished")
    assert isinstance(refused := join(run).exception, UsageError)
    assert "is finished (all ranks finished)" in str(refused)
    assert lend(run, {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n9"}) == 0, "nor does it when the job begins later"


@pytest.mark.parametrize(
    ("events", "is_over"),
    [
        (["stop"], True),
        (["continue", "attempt started", "stop"], True),
        (["continue"], False),
        (["stop", "submitting"], False),
        (["stop", "submitting", "attempt started"], False),
        ([], False),
    ],
)
def test_a_run_that_was_stopped_wants_no_nodes_until_it_is_queued_again(tmp_path, monkeypatch, events, is_over):
    run, _ = run_of(tmp_path)
    for event in events:
        decision = {"action": event} if event in ("stop", "continue") else {}
        run.journal().append("decision" if decision else event, **decision)
    looks: list[float] = []
    monkeypatch.setattr("slurmft.operations.control.time.sleep", looks.append)
    monkeypatch.setattr("slurmft.operations.control.LEND_PATIENCE_S", 0.2)
    assert lend(run, {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n9"}) == 0
    assert bool(looks) != is_over


def shown(job: str, state: str, reason: str = "None") -> JobRecord:
    return JobRecord(job_id=job, state=state, reason=reason, nodes="", batch_host="", start=None, end=None,
                     limit_s=None, partition="low")  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "job", "left_ago_s", "gives_way"),
    [
        ("Resources", "12", None, True),
        ("Priority", "12", 3600, True),
        ("Resources", "12", 5, False),
        ("Resources", "9", None, False),
        ("Resources", "20", None, False),
        ("BeginTime", "12", None, False),
        ("JobHeldUser", "12", None, False),
    ],
    ids=["the newest", "another one long ago", "another one just now", "an older one", "a person's", "later", "held"],
)
def test_a_lender_gives_way_to_the_run_s_own_job(tmp_path, monkeypatch, reason, job, left_ago_s, gives_way):
    run, _ = run_of(tmp_path)
    lenders = [shown("9", "RUNNING"), shown("12", "RUNNING"), shown("13", "PENDING")]
    monkeypatch.setattr(control, "records_of", lambda _: {OwnJob("7"): shown("7", "PENDING", reason)})
    monkeypatch.setattr(control.own_jobs, "lenders", lambda _: lenders)
    monkeypatch.setattr(control, "GIVE_WAY_S", 0.05 if left_ago_s is None else 20.0)
    if left_ago_s is not None:
        run.journal().append("lender gave way", job="14")
        monkeypatch.setattr(control.time, "time", lambda now=time.time() + left_ago_s: now)  # noqa: B008
        assert control._gives_way(run, job) is gives_way
        return
    monkeypatch.setattr(control, "LEND_PATIENCE_S", 0.5)
    monkeypatch.setattr(control, "LEND_LOOK_S", 0.01)
    assert lend(run, {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n9"}) == 0
    assert [event.event for event in run.journal().read()] == ["lender gave way"] * gives_way


def test_a_lender_stays_while_the_supervisor_gives_signs_of_life(tmp_path, monkeypatch):
    run, _ = run_of(tmp_path)
    own(run, 0)
    asked: list[str] = []
    monkeypatch.setattr(control, "_gives_way", lambda _run, job: asked.append(job))
    monkeypatch.setattr(control, "GIVE_WAY_S", 0.1)
    monkeypatch.setattr(control, "LEND_PATIENCE_S", 0.4)
    monkeypatch.setattr(control, "LEND_LOOK_S", 0.01)
    attempt = Attempt(job="7", restart=1, cycle=0)
    run.attempt_folder(attempt)
    until = time.monotonic() + 1.0
    done = run.done

    def lives() -> Any:
        if time.monotonic() < until:
            run_folder.touch(run, attempt)
            assert asked == []
        return done()

    monkeypatch.setattr(run, "done", lives)
    assert lend(run, {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n9"}) == 0
    assert time.monotonic() > until
    assert asked


def test_a_job_that_may_begin_already_is_not_told_so_again_and_again(tmp_path, monkeypatch):
    run, _ = run_of(tmp_path)
    told: list[int] = []
    monkeypatch.setattr(control.own_jobs, "begin_in", lambda _job, delay_s: told.append(delay_s))
    for reason, count in (("BeginTime", 1), ("Resources", 1), ("BeginTime", 2), ("Dependency", 3)):
        monkeypatch.setattr(control, "records_of", lambda _, it=reason: {OwnJob("7"): shown("7", "PENDING", it)})
        control.requeue(run, "me")
        assert len(told) == count


def test_agents_find_the_supervisor_of_the_newest_crew(tmp_path):
    run, _ = run_of(tmp_path)
    assert crew_of(run) is None, "nobody has ever trained"
    own(run, 3)
    assert crew_of(run) is None, "it is starting, or it has ended"
    for cycle in (0, 2):
        folder = run.attempt_folder(Attempt(job="7", restart=1, cycle=cycle))
        (folder / "control.json").write_text("{}")
        run.new_secret(Attempt(job="7", restart=1, cycle=cycle))
    assert crew_of(run) == Attempt(job="7", restart=1, cycle=2), "later attempts have no folder of their own for this"
    (run.attempts / "7.1.2" / "secret").unlink()
    assert crew_of(run) == Attempt(job="7", restart=1, cycle=0)


def test_a_damaged_owner_file_is_one_clear_error(tmp_path):
    run, _ = run_of(tmp_path)
    (run.path / "owner.json").write_text("{ no")
    with pytest.raises(StorageError, match=r"owner\.json"):
        crew_of(run)
