"""Lending nodes: what is submitted, what is refused, and where agents of another job find the run's supervisor."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slurmft.cli.main import cli
from slurmft.config.run import RunConfig, validate
from slurmft.errors import StorageError, UsageError
from slurmft.operations.control import lend
from slurmft.scheduler.own_jobs import lending_command
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
