"""Whatever lies in the place of a file that is read: no reader hangs, none fails but with an error of ours."""

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import odd_files
import pytest
from of_each import of_each
from reported_evidence import read_evidence
from verbs import slurmft
from waiting import slowness

from slurmft.agent import hangs
from slurmft.cli import status
from slurmft.config.run import load
from slurmft.errors import SlurmftError
from slurmft.health.checker import read_results, write_result
from slurmft.ipc import pages
from slurmft.operations.control import overviews
from slurmft.policy.node_health import Checkup
from slurmft.policy.verdict import Evidence, Kind, Suspect
from slurmft.scheduler import slurm
from slurmft.storage import checkpoint_names, history, run_folder, verdicts
from slurmft.storage.journal import Journal
from slurmft.storage.run_folder import REQUESTS, Attempt, RunFolder
from slurmft.supervisor import observations
from slurmft.system import files
from slurmft.system.files import url_in
from slurmft.worker import data

pytestmark = pytest.mark.timeout(10)

EVENT = {"format": 1, "at": "2026-11-20T10:00:00+00:00", "attempt": "7.0.0", "event": "attempt started"}
ATTEMPT = Attempt(job="7", restart=0)
EVIDENCE = Evidence(kind=Kind.HANG, suspect=Suspect(node="n1"), message="m", at=1.0)


def _appended(path: Path) -> None:
    with files.appending(path) as descriptor:
        os.write(descriptor, b"x")


def _locked(run: RunFolder) -> None:
    with run.lock():
        pass


Reader = Callable[[Path], Any]

READERS: dict[str, tuple[str, Reader]] = {
    "read_json": ("a", files.read_json),
    "journal": ("journal.jsonl", lambda path: Journal(path.parent).read()),
    "journal, appended": ("journal.jsonl", lambda path: Journal(path.parent).append("x")),
    "owner": ("owner.json", lambda path: RunFolder(path.parent).owner()),
    "done": ("done.json", lambda path: RunFolder(path.parent).done()),
    "progress": ("progress.json", lambda path: RunFolder(path.parent).progress()),
    "jobs": ("jobs.json", lambda path: RunFolder(path.parent).jobs()),
    "claim": ("attempts/7.0.ending.json", lambda path: RunFolder(path.parents[1]).ending(ATTEMPT).outcome()),
    "claim, taken": ("attempts/7.0.ending.json", lambda path: RunFolder(path.parents[1]).ending(ATTEMPT).take("me")),
    "fence": (
        "owner.json",
        lambda path: checkpoint_names.check_fence(
            {checkpoint_names.RUN_FOLDER_VARIABLE: str(path.parent), checkpoint_names.GENERATION_VARIABLE: "3"}
        ),
    ),
    "verdict": ("v.json", verdicts.read_verdict),
    "evidence": ("e.jsonl", read_evidence),
    "evidence, added": ("e.jsonl", lambda path: verdicts.add_evidence(path, EVIDENCE)),
    "order": ("INJECT", lambda path: run_folder.take_order(path.parent)),
    "generation": ("generation", lambda path: checkpoint_names.read_generation(path.parent)),
    "timings": ("timings.json", lambda path: history.read(path.parent, "w")),
    "timings, written": ("timings.json", lambda path: history.write(path.parent, "w", "1.0.0", history.Timings())),
    "learned timeouts": ("ft_state.json", lambda path: history.read_ft_state(path.parent, "w")),
    "learned timeouts, written": ("ft_state.json", lambda path: history.write_ft_state(path.parent, "w", {})),
    "stragglers": ("stragglers.json", lambda path: history.read_stragglers(path.parent, "w")),
    "batches": ("micro-batch.json", lambda path: verdicts.noted_batches(path.parent)),
    "resuming": ("resuming.json", lambda path: verdicts.noted_resuming(path.parent)),
    "configuration": ("config.yaml", load),
    "results of probes": ("n1.json", lambda path: read_results(path.parent)),
    "result of a probe, written": (
        "n1.json", lambda path: write_result(path.parent, "n1", Checkup(node="n1", at=1.0, results=())),
    ),
    "heartbeat's URL": ("url", url_in),
    "slurm.conf": ("slurm.conf", lambda path: slurm.configured_cluster({"SLURM_CONF": str(path)})),
    "slurm.conf in a folder": ("slurm.conf", lambda path: slurm.configured_cluster({"SLURM_CONF": str(path.parent)})),
    "script": ("train.py", lambda path: hangs.mentions(b"x", ["python", "train.py"], path.parent)),
    "stacks": ("s.stacks", pages.read),
    "stacks, written": ("stacks-rank-3.txt", lambda path: hangs._append(path.parent, 3, "dump", "why")),
    "log's end": ("rank-0.log", observations.tail),
    "evidence of the run": ("7.0.0.rank-0.evidence.jsonl", lambda path: observations.EvidenceReader(path.parent).new()),
    "testimony": (
        "verdicts/7.0.0.rank-0.json",
        lambda path: observations.collect(RunFolder(path.parents[1]), ATTEMPT, []),
    ),
    "error file": (
        "attempts/7.0.0/x.rank_3", lambda path: observations.collect(RunFolder(path.parents[2]), ATTEMPT, []),
    ),
    "srun's words": ("attempts/7.0.0/srun.err", lambda path: observations.step_words(path.parent)),
    "final digest": ("attempts/7.0.0/rank-0.log", lambda path: status._final_digest(RunFolder(path.parents[2]))),
    "texts to train on": ("a.txt", lambda path: data._head(path, 1 << 20)),
    "output": ("controller.log", _appended),
    "run lock": (".lock", lambda path: _locked(RunFolder(path.parent))),
    **{f"request {kind}": (kind, lambda path: RunFolder(path.parent).take_request(path.name)) for kind in REQUESTS},
    **{
        f"request {kind}, made": (kind, lambda path: RunFolder(path.parent).request(path.name, "me"))
        for kind in REQUESTS
    },
}  # fmt: skip


@pytest.mark.timeout(120)
@of_each(reader=READERS, kind=odd_files.MAKERS)
def test_no_reader_hangs_and_errors_are_ours(tmp_path, kind, reader):
    name, read = READERS[reader]
    path = odd_files.put(kind, tmp_path / name)
    began = time.monotonic()
    try:
        read(path)
    except SlurmftError as error:
        assert str(path.parent) in str(error), "says where"
    except OSError as error:
        assert error.errno is not None
    assert time.monotonic() - began < 10 * slowness()
    assert Path("/dev/zero").is_char_device()
    assert not (tmp_path / "no such file").exists(), "nothing is created through a link"


@pytest.mark.parametrize("kind", odd_files.NO_FILES)
def test_what_is_no_file_is_no_request_and_hides_no_other_one(tmp_path, kind):
    run = RunFolder(tmp_path)
    odd_files.put(kind, tmp_path / "REQUEUE")
    run.request("KILL", "me")
    assert run.take_request("REQUEUE") is None
    assert run.take_request("KILL") == "me"


# the verbs


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The root of runs, with a good one and a bad one in it; no Slurm."""
    return made_runs(tmp_path, monkeypatch)


def made_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURMFT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name in ("bad", "good"):
        run = RunFolder(tmp_path / "runs" / name)
        run.create()
        run.config.write_text(f"command: [python, train.py]\nrun_folder: {run.path}\n")
        (run.path / "journal.jsonl").write_text(json.dumps(EVENT) + "\n")
        attempt = run.attempt_folder(ATTEMPT)
        (attempt / "rank-0.log").write_text("hello of rank 0\n")
    return tmp_path / "runs"


def test_a_hole_in_a_journal_costs_neither_memory_nor_what_lies_around_it(tmp_path):
    journal = Journal(tmp_path)
    journal.append("before")
    with journal.path.open("r+b") as stream:
        stream.truncate(200 << 20)
    journal.append("after")
    tracemalloc.start()
    try:
        events, unreadable = journal.read_all()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ([event.event for event in events], unreadable) == (["before", "after"], 1)
    assert peak_bytes < 32 << 20


STATE = ["config.yaml", "journal.jsonl", "owner.json", "jobs.json", "done.json"]
FILES = [*STATE, "progress.json", ".lock", *REQUESTS, "INJECT", "timings.json", "ft_state.json", "stragglers.json",
         "attempts", "attempts/7.0.0", "attempts/7.0.0/rank-0.log", "attempts/7.0.ending.json", "logs", "submissions",
         "verdicts", "job.sh"]  # fmt: skip
VERBS = [
    ["status"], ["status", "bad"], ["status", "--json"], ["explain", "bad"], ["explain", "bad", "--json"],
    ["logs", "bad"], ["logs", "bad", "-n", "3"], ["logs", "bad", "--all-attempts"], ["save", "bad"], ["stop", "bad"],
    ["requeue", "bad"], ["requeue", "--rescue", "bad"], ["inject", "bad", "kill"], ["checkpoint", "list", "bad"],
    ["submit", "runs/bad/config.yaml", "--dry-run", "--cluster", "local"],
    ["advise", "runs/bad/config.yaml"], ["doctor", "runs/bad/config.yaml"], ["join", "bad"],
]  # fmt: skip


@of_each(name=FILES, kind=odd_files.MAKERS)
@pytest.mark.timeout(900)
def test_no_verb_hangs_or_hides_another_run(tmp_path, monkeypatch, kind, name):
    runs = made_runs(tmp_path, monkeypatch)
    path = runs / "bad" / name
    if path.is_dir():
        path.rename(runs / "aside")
    content = (runs / "good" / name).read_bytes() if (runs / "good" / name).is_file() else b'{"format": 1}\n'
    odd_files.put(kind, path, content)
    for verb in VERBS:
        began = time.monotonic()
        code, output = slurmft(*verb)
        assert time.monotonic() - began < 10 * slowness(), verb
        assert code in (0, 1, 2, 69, 75), (verb, output)
        assert "Traceback" not in output, verb
        if verb == ["status"]:
            assert code == 0 and "bad" in output and "it left no verdict" in output
    assert slurmft("status", "good")[0] == 0


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("kind", odd_files.NO_FILES)
def test_a_run_with_no_file_in_the_place_of_one_is_damaged(runs, kind, name):
    path = odd_files.put(kind, runs / "bad" / name)
    found = {entry.run: entry for entry in overviews([RunFolder(runs / "bad"), RunFolder(runs / "good")])}
    assert found["bad"].state == "damaged"
    assert str(path) in found["bad"].detail and "not a regular file" in found["bad"].detail
    assert "move it away" in found["bad"].detail
    assert found["good"].state == "stopped"
