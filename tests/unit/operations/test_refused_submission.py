"""What a submission leaves behind that sbatch has refused: nothing of its own, and everything of others."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmft.config.run import RunConfig, validate
from slurmft.errors import RunBusy, SlurmError, SlurmUnavailable, StorageError
from slurmft.operations import control, submit
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.avoided_nodes import Avoidance

REFUSES = "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1"
SILENT = "echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
GARBLED = "echo 'welcome to this site'"


@pytest.fixture
def sbatch(tmp_path, monkeypatch) -> Callable[[str], None]:
    """The sbatch of this machine does what the shell lines say; nothing else of Slurm is asked."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    for name in ("sbatch", "srun"):
        program.with_name(name).write_text("#!/bin/sh\nexit 1\n")
        program.with_name(name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(
        submit, "_considered",
        lambda settings, *_, **__: (RunFolder(settings.run_folder), "slurm", "", {}, Avoidance()),
    )  # fmt: skip
    monkeypatch.setattr(control, "records_of", lambda _run: {})
    monkeypatch.setattr(control, "is_unseen", lambda *_: False)
    return lambda lines: program.write_text(f"#!/bin/sh\n{lines}\n") and None


def settings(folder: Path, **changes: object) -> RunConfig:
    return validate({"command": ["true"], "run_folder": str(folder), "nodes": 1, **changes}, source="run.yaml")


def submitted(given: RunConfig, call: bytes | None = None) -> None:
    submit.submit_run(given, cluster="slurm", who="me", command="test", tell=lambda _: None, call=call)


def below(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*") if "bin" not in path.parts
    }  # fmt: skip


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("call", [None, b"pickled"])
def test_a_refused_submission_leaves_nothing(tmp_path, sbatch, elsewhere, call):
    sbatch(REFUSES)
    before = below(tmp_path)
    changes = {"checkpoint": {"directory": str(tmp_path / "kept" / "here")}} if elsewhere else {}
    with pytest.raises(SlurmError, match="Invalid account"):
        submitted(settings(tmp_path / "runs" / "me" / "run", **changes), call)
    assert below(tmp_path) == before


def test_one_that_is_refused_before_sbatch_leaves_nothing_either(tmp_path, sbatch):
    sbatch("touch called")
    (tmp_path / "file").touch()
    given = settings(tmp_path / "runs" / "a", checkpoint={"directory": str(tmp_path / "file" / "checkpoints")})
    before = below(tmp_path)
    with pytest.raises(StorageError, match="cannot create the folder of the checkpoints"):
        submitted(given)
    assert below(tmp_path) == before


@pytest.mark.parametrize("cancels", [True, False])
def test_a_job_that_could_not_be_noted_keeps_its_folder(tmp_path, sbatch, monkeypatch, cancels):
    sbatch("echo Submitted batch job 77")

    def fails(*_):
        raise StorageError("cannot write jobs.json")

    monkeypatch.setattr(submit.submission, "look_at_submitted", lambda *_: None)
    monkeypatch.setattr(RunFolder, "add_job", fails)
    monkeypatch.setattr(submit.own_jobs, "cancel", fails if not cancels else lambda _job: None)
    with pytest.raises(StorageError, match=r"jobs\.json"):
        submitted(settings(tmp_path / "run"))
    assert [event.event for event in RunFolder(tmp_path / "run").journal().read()] == ["submitting"]


@pytest.mark.parametrize("lines", [SILENT, GARBLED], ids=["no answer", "an answer without a job"])
def test_a_job_that_may_have_arrived_keeps_its_folder(tmp_path, sbatch, lines):
    sbatch(lines)
    with pytest.raises(SlurmUnavailable):
        submitted(settings(tmp_path / "run"))
    run = RunFolder(tmp_path / "run")
    assert run.config.exists() and settings(run.path).checkpoint_dir.is_dir()
    assert [event.event for event in run.journal().read()] == ["submitting", "submission failed"]


@pytest.mark.parametrize("there", ["nothing", "attempts/7.0.0/srun.err", "checkpoints/step-5/part", "notes"])
def test_a_folder_that_was_there_stays(tmp_path, sbatch, there):
    sbatch(REFUSES)
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    if there != "nothing":
        (folder / there).parent.mkdir(parents=True, exist_ok=True)
        (folder / there).write_text("precious")
    before = below(tmp_path)
    with pytest.raises(SlurmError):
        submitted(settings(folder))
    assert folder.is_dir() and before.items() <= below(tmp_path).items()


def test_a_refused_continuation_keeps_the_run(tmp_path, sbatch):
    folder = tmp_path / "run"
    sbatch(SILENT)
    with pytest.raises(SlurmUnavailable):
        submitted(settings(folder))
    sbatch(REFUSES)
    with pytest.raises(SlurmError):
        submitted(settings(folder))
    names = [event.event for event in RunFolder(folder).journal().read()]
    assert names == ["submitting", "submission failed"] * 2


@pytest.mark.parametrize("late", ["KILL", "attempts/7.0.0", "checkpoints/step-5", "logs/7", "jobs"])
def test_what_others_put_there_meanwhile_keeps_the_folder_whole(tmp_path, sbatch, late):
    folder = tmp_path / "run"
    sbatch(f"{'mkdir -p' if '/' in late else 'touch'} {folder / late}; {REFUSES}")
    with pytest.raises(SlurmError):
        submitted(settings(folder))
    run = RunFolder(folder)
    assert run.config.exists() and run.submissions.is_dir()
    assert [event.event for event in run.journal().read()] == ["submitting", "submission failed"]


def test_a_folder_whose_journal_says_more_stays(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    line = {"format": 1, "at": "2026-01-01T00:00:00.000+00:00", "attempt": "7.0.0", "event": "attempt started"}
    run.journal().path.write_text(json.dumps(line) + "\n")
    before = below(tmp_path)
    run.empty([run.path])
    assert below(tmp_path) == before


def test_who_waited_for_the_lock_of_a_removed_folder_does_not_believe_it(tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "run")
    run.create()
    from slurmft.storage import run_folder

    real = run_folder._locked

    def locked_too_late(*given):
        (run.path / ".lock").unlink()
        return real(*given)

    monkeypatch.setattr(run_folder, "_locked", locked_too_late)
    with pytest.raises(RunBusy, match="was removed"), run.lock():
        pass


@pytest.mark.parametrize("by_another", [False, True])
def test_trials_that_are_added_while_their_sweep_ends_begin_once_its_processes_are_gone(
    tmp_path, monkeypatch, by_another
):
    given = settings(tmp_path / "sweep", trials={"list": [{"x": 1}, {"x": 2}]})
    run, tries = RunFolder(given.run_folder), []

    def ends(*_args: object, **_more: object) -> object:
        tries.append(run.done())
        if len(tries) == 1:  # it has seen one of them, and comes to its end
            run.write_progress(until=1)
            run.mark_done(reason="")
        if len(tries) == 3 and by_another:
            run.write_progress(until=2)
        if len(tries) < 4:
            raise RunBusy("its processes end")
        return "begun"

    monkeypatch.setattr(submit, "submit_run", ends)
    sweep = submit.submit_trials(given, cluster="local", who="me", command="test", tell=lambda _: None)
    assert tries == [None] * (3 if by_another else 4), "what has ended is complete no more"
    assert (sweep.added.new, sweep.made) == (2, None if by_another else "begun")
