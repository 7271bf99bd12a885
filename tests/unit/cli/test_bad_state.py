"""Damaged, newer, unreadable or odd files of a run: one clear message, an exit code, and no other run hidden."""

import errno
import importlib
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from of_each import of_each
from verbs import slurmft

from slurmft.checkpoint.catalog import Catalog, Entry, FileRecord, Identity, write_marker
from slurmft.cli.main import main
from slurmft.operations import control as overview_module
from slurmft.operations.control import overviews
from slurmft.policy.job_identity import JobIdentity
from slurmft.scheduler import own_jobs
from slurmft.scheduler.parsing import parse_jobs
from slurmft.storage.run_folder import RunFolder, progress_of

OWNER = {
    "format": 1,
    "job": "7",
    "restart": 0,
    "generation": 3,
    "cluster": "slurm",
    "host": "h",
    "pid": 1,
    "birth": "b",
}
EVENT = b'{"format": 1, "at": "2026-11-20T10:00:00+00:00", "attempt": "7.0.0", "event": "attempt started"}\n'


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The root of runs, with a good one in it; no Slurm."""
    monkeypatch.setenv("SLURMFT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "good", "journal.jsonl", EVENT)
    return tmp_path / "runs"


def make(path: Path, name: str, content: bytes) -> RunFolder:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").touch()
    (path / name).write_bytes(content)
    return RunFolder(path)


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line as people start it."""
    argv = [sys.executable, "-m", "slurmft", *arguments]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


def as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


DAMAGED = [
    ("owner.json", b'{"format": 1', "owner.json is not JSON"),
    ("owner.json", b"", "owner.json is not JSON"),
    ("owner.json", b"[" * 100_000, "owner.json is not JSON"),
    ("owner.json", b"\xff\xfe\x00", "cannot read"),
    ("owner.json", {"format": 1}, "owner.json is damaged: Object missing required field `job`"),
    ("owner.json", {**OWNER, "format": 99}, "has format 99; this slurmft reads up to 1; upgrade slurmft"),
    ("owner.json", {**OWNER, "generation": "new"}, "owner.json is damaged"),
    ("owner.json", {**OWNER, "pid": None, "cluster": "local"}, "owner.json is damaged"),
    ("owner.json", {**OWNER, "pid": float("inf")}, "owner.json is damaged"),
    ("owner.json", {**OWNER, "job": "a\0b"}, "owner.json is damaged"),
    ("owner.json", {**OWNER, "job": "../../7"}, "owner.json is damaged"),
    ("jobs.json", {"format": 1, "jobs": 5}, "jobs.json does not hold a list of jobs"),
    ("jobs.json", {"format": 1, "jobs": [5, None]}, "jobs.json does not hold a list of jobs"),
    ("jobs.json", {"format": 1, "jobs": ["7", "seven"]}, "jobs.json names a job 'seven'"),
    ("jobs.json", {"format": 1, "jobs": ["7,8"]}, "jobs.json names a job '7,8'"),
    # squeue refuses the whole question then
    ("jobs.json", {"format": 1, "jobs": ["0"]}, "jobs.json names a job '0'"),
    ("jobs.json", {"format": 1, "jobs": ["3000000000"]}, "jobs.json names a job '3000000000'"),
    ("jobs.json", [], "jobs.json does not hold a JSON object"),
    ("done.json", b"done", "done.json is not JSON"),
    ("done.json", {"format": 2}, "has format 2; this slurmft reads up to 1"),
    ("done.json", {}, "does not say which format it has"),
    ("journal.jsonl", EVENT.replace(b'"format": 1', b'"format": 9'), "lines of format 9; this slurmft reads up to 1"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED, ids=lambda value: str(value)[:30])
def test_a_damaged_run_says_so_and_hides_no_other(runs, name, content, message):
    bad = make(runs / "bad", name, as_bytes(content))
    entries = {entry.run: entry for entry in overviews([bad, RunFolder(runs / "good")])}
    assert entries["bad"].state == "damaged"
    assert message in entries["bad"].detail
    assert str(bad.path) in entries["bad"].detail
    assert entries["good"].state == "stopped" and entries["good"].detail.startswith("it left no verdict")
    code, output = slurmft("status")
    assert code == 0 and "damaged" in output and "it left no verdict" in output
    code, output = slurmft("status", "bad")
    assert code == 1 and "damaged" in output
    assert [json.loads(line)["state"] for line in slurmft("status", "--json")[1].splitlines()] == ["damaged", "stopped"]


def test_a_job_that_is_no_number_is_not_asked_for(runs, monkeypatch):
    """squeue refuses the whole list for it, and every other run would look as if Slurm had forgotten it."""
    asked = []
    monkeypatch.setattr(overview_module.slurm, "available", lambda: True)
    monkeypatch.setattr(own_jobs.slurm, "jobs", lambda ids, **_: asked.extend(ids) or {})
    make(runs / "bad", "jobs.json", as_bytes({"format": 1, "jobs": ["seven"]}))
    make(runs / "good", "jobs.json", as_bytes({"format": 1, "jobs": ["local-5", "8", "9_1"]}))
    overviews([RunFolder(runs / "bad"), RunFolder(runs / "good")])
    assert asked == ["8", "9_1"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"format": 1, "step": "x", "at": None, "until": 9}, "progress.json has step='x'"),
        ({"format": 1, "step": True, "until": [], "saved": {}}, "progress.json has "),
        ({"format": 1, "metric": "nan"}, "progress.json has metric='nan'"),
        (b'{"format": 1, "metric": NaN}', "progress.json has metric='nan'"),
        (b'{"format": 1, "step": ' + b"9" * 309 + b"}", "progress.json has step='nan'"),
        (b'{"format": 1, "metric": ' + b"9" * 5000 + b"}", "progress.json has metric='nan'"),
        ({"format": 1, "step": 10**16}, "progress.json has step='10000000000000000'"),
        (b'{"format": 1, "at": 1e999}', "progress.json has at='inf'"),
        (b"\xff\xfe", "cannot read"),
        (b'{"format": 1, "st', "progress.json is not JSON"),
        ({"format": 2}, "has format 2"),
    ],
    ids=str,
)
def test_a_damaged_progress_report_costs_the_run_nothing(runs, content, problem):
    run = make(runs / "good", "progress.json", as_bytes(content))
    assert problem in progress_of(run).problem
    (entry,) = overviews([run])
    assert entry.state == "stopped" and problem in entry.detail
    assert entry.step is None and entry.metric is None
    assert json.loads(json.dumps(entry.as_json(), allow_nan=False))
    assert slurmft("status", "good")[0] == 0


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"", 1, "journal.jsonl is empty"),
        (b"\n\n", 1, "journal.jsonl is empty"),
        (b"garbage\n\xff\x00\n", 1, "is damaged: none of its 2 lines can be read"),
        (b'{"format": 1, "at": "2026', 1, "is damaged: none of its 1 lines can be read"),
        (b"[[[[[\n{}\nnull\n", 1, "none of its 3 lines"),
        (b"\x00" * 4096, 1, "none of its 1 lines"),
        (b"[" * 100_000 + b"\n", 1, "journal.jsonl is damaged"),
        (EVENT + b"\xff\xfe garbage\n" + EVENT[:-30], 0, "2 lines of"),
        (EVENT + EVENT.replace(b"2026-11-20", b"0001-01-01").replace(b"+00:00", b"+14:00"), 0, "1 lines of"),
        (EVENT.replace(b"7.0.0", b"odd"), 0, "attempt started"),
        (EVENT.replace(b"7.0.0", b"a.b"), 0, "attempt started"),
        (EVENT, 0, "attempt started"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_explain_says_of_a_damaged_journal(runs, content, code, message):
    run = make(runs / "bad", "journal.jsonl", content)
    told, output = slurmft("explain", "bad")
    assert (told, message in output) == (code, True), output
    assert ("cannot be read and are left out" in output) == ("lines of" in message)
    if code:
        assert str(run.path) in output
    else:
        assert "attempt started" in output
        first, *_ = slurmft("explain", "bad", "--json")[1].splitlines()
        assert json.loads(first)["event"] == "attempt started"


VERDICT = {
    "event": "verdict", "cause": "rerun elsewhere", "reason": "rank 3 said so", "rank": 3, "node": "n1",
    "suspects": [{"node": "n1", "gpu": "GPU-1", "rank": 3}, {"node": "n2"}], "rerun": "undecided",
    "evidence": ["srun: n1: 3: Killed", "verdict file of rank 3"], "traceback": "Traceback\n  File x\nValueError: y",
}  # fmt: skip


def test_explain_tells_whom_the_newest_verdict_blames(runs):
    older = as_bytes(json.loads(EVENT) | VERDICT | {"node": "n9"})
    make(runs / "bad", "journal.jsonl", older + b"\n" + as_bytes(json.loads(EVENT) | VERDICT) + b"\n")
    code, output = slurmft("explain", "bad")
    told = output.split("the newest verdict, on attempt 7.0.0\n")[1].splitlines()
    assert code == 0
    assert [line.split(maxsplit=1) for line in told[:5]] == [
        ["cause", "rerun elsewhere"], ["culprit", "rank 3 on n1"], ["re-run", "undecided"],
        ["suspect", "n1 (rank 3, GPU-1)"], ["n2"],
    ]  # fmt: skip
    assert "  evidence   srun: n1: 3: Killed" in told
    assert told[-3:] == ["  traceback  Traceback", "               File x", "             ValueError: y"]
    assert "n9" not in output and output.count("ValueError") == 1, "the story itself stays short"


@pytest.mark.parametrize(
    "facts",
    [
        {"rank": "x", "node": None, "suspects": 7, "evidence": "text", "traceback": 3.5},
        {"suspects": [None, 1, {}, {"node": 5, "rank": "y", "gpu": []}], "evidence": [None, {}, [1]]},
        {"traceback": "\x1b[2J\x07", "cause": None},
    ],
    ids=["numbers", "lists", "control"],
)
def test_explain_of_a_damaged_verdict(runs, facts):
    make(runs / "bad", "journal.jsonl", as_bytes(json.loads(EVENT) | {"event": "verdict"} | facts) + b"\n")
    code, output = slurmft("explain", "bad")
    assert code == 0
    assert "\x1b[2J" not in output and "Error" not in output


def test_a_verdict_that_blames_nobody_needs_no_more_words(runs):
    line = json.loads(EVENT) | {"event": "verdict", "cause": "preempted"}
    make(runs / "bad", "journal.jsonl", as_bytes(line) + b"\n")
    assert "newest verdict" not in slurmft("explain", "bad")[1]


def test_a_run_without_a_journal(runs):
    make(runs / "new", "config.yaml", b"")
    told = "run new has no journal yet: nothing was submitted\n  hint: slurmft submit CONFIG submits it"
    assert slurmft("explain", "new") == (1, told)


def test_words_of_others_cannot_move_the_cursor(runs):
    line = json.loads(EVENT) | {"reason": "one\ntwo\x1b[2Jthree", "error": "\udcff\x07"}
    make(runs / "bad", "journal.jsonl", as_bytes(line) + b"\n")
    code, output = slurmft("explain", "bad")
    assert code == 0
    assert "one\\ntwo\\x1b[2Jthree" in output
    assert "\x1b[2J" not in output and "\x07" not in output


@pytest.mark.parametrize("name", ["it's", 'say "x"', "two words", "ü 日本", "$(id)", "[red]x", "-dash", "100%"])
def test_a_run_with_an_odd_name_is_found_and_shown(runs, name):
    run = make(runs / name, "journal.jsonl", EVENT)
    folder = run.attempts / "7.0.0"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text("hello of rank 0\n")
    for verb, output in (("status", name), ("explain", "attempt started"), ("logs", "hello of rank 0")):
        code, text = slurmft(verb, "--", name)
        assert code == 0 and output in text, text
        assert slurmft(verb, str(run.path))[0] == 0


@pytest.mark.parametrize("name", [b"a\nb", b"\xff\xfe", b"\x1b[31m"], ids=str)
def test_a_folder_with_a_hostile_name_breaks_no_list(runs, name):
    make(runs / os.fsdecode(name), "journal.jsonl", EVENT)
    done = started("status", COLUMNS="500")
    assert done.returncode == 0 and done.stderr == ""
    assert len([line for line in done.stdout.splitlines() if "it left no verdict" in line]) == 2
    assert "\x1b" not in done.stdout
    missing = started("explain", "nosuch")
    assert missing.returncode == 2 and "there is no run 'nosuch'" in missing.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["explain", "nosuch"], 2, "there is no run 'nosuch' here or in"),
        (["stop", "nosuch"], 2, "runs in "),
        (["stop", ""], 2, "the name of the run is empty"),
        (["logs", " "], 2, "the name of the run is empty"),
        (["status", "x" * 300], 2, "File name too long"),
        (["status", "a\nb"], 2, "there is no run 'a\\nb'"),
        (["explain", "good/config.yaml"], 2, "there is no run"),
        (["logs", "good"], 1, "has no output of rank 0 yet"),
        (["logs", "good", "--attempt", "9.9.9"], 2, "run good has no attempt '9.9.9'"),
        (["save", "good"], 2, "run good is not running"),
    ],
    ids=str,
)
def test_a_run_that_cannot_be_meant(runs, arguments, code, message):
    told, output = slurmft(*arguments)
    assert (told, message in output) == (code, True), output
    assert "hint: " in output


@pytest.mark.parametrize("arguments", [["logs", "good", "--rank", "-1"], ["logs", "good", "-n", "-5"]], ids=str)
def test_numbers_below_nothing_are_refused(runs, arguments):
    done = started(*arguments)
    assert done.returncode == 2 and "0<=x" in done.stderr


def test_a_rank_that_is_not_there(runs):
    folder = make(runs / "good", "journal.jsonl", EVENT).attempts / "7.0.0"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text("hello\n")
    code, output = slurmft("logs", "good", "--rank", "5")
    assert code == 2 and "run good has no rank 5" in output


def test_a_root_that_is_no_folder(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMFT_RUNS", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    code, output = slurmft("status")
    assert code == 2 and "cannot list" in output and "SLURMFT_RUNS" in output


NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
@pytest.mark.parametrize(
    ("forbid", "message"),
    [
        ("runs/bad", "runs/bad/"),
        ("runs/bad/owner.json", "owner.json"),
        ("runs/bad/journal.jsonl", "journal.jsonl"),
    ],
)
def test_what_another_user_may_not_read_hides_nothing(runs, tmp_path, forbid, message):
    make(runs / "bad", "owner.json", as_bytes(OWNER))
    make(runs / "bad", "journal.jsonl", EVENT)
    for path in (runs, *runs.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (tmp_path / forbid).chmod(0)

    def look() -> list[str]:
        from slurmft.cli.arguments import every_run

        return [f"{entry.state} {entry.detail}" for entry in overviews(every_run())]

    bad, good = as_nobody(look)
    assert bad.startswith("damaged ") and message in bad
    assert "Permission denied" in bad and bad.endswith("; it belongs to root")
    assert good.startswith("stopped it left no verdict")
    code, output = as_nobody(lambda: slurmft("explain", "bad"))
    expected = {"runs/bad": 2, "runs/bad/journal.jsonl": 1, "runs/bad/owner.json": 0}[forbid]
    assert code == expected, output
    assert code == 0 or "Permission denied" in output


def as_nobody(work):
    """In this process, for a moment: its files are then somebody else's. What it imports must be there before."""
    for module in (
        "cli.control",
        "cli.status",
        "cli.submit",
        "operations.control",
        "operations.rescue",
        "scheduler.submission",
        "supervisor.run",
    ):
        importlib.import_module(f"slurmft.{module}")
    parents = [path for path in Path.cwd().parents if path != Path("/") and path.stat().st_mode & 0o005 != 0o005]
    modes = [path.stat().st_mode for path in parents]
    for path in (*parents, Path.cwd()):
        path.chmod(path.stat().st_mode | 0o055)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        return work()
    finally:
        os.seteuid(0)
        os.setegid(0)
        for path, mode in zip(parents, modes, strict=True):
            path.chmod(mode)


@pytest.mark.parametrize(
    ("reason", "never"),
    [("PartitionNodeLimit", "as things are it cannot start, the partition"), ("Resources", ""), ("BeginTime", "")],
)
def test_a_job_that_can_never_start_is_told_from_one_that_waits(runs, monkeypatch, reason, never):
    (record,) = parse_jobs(f"8|PENDING|{reason}|||N/A|N/A|10:00|low|0\n")
    monkeypatch.setattr(overview_module.slurm, "available", lambda: True)
    monkeypatch.setattr(own_jobs.slurm, "jobs", lambda ids, **_: {"8": record})
    run = make(runs / "good", "jobs.json", as_bytes({"format": 1, "jobs": ["8"]}))
    (entry,) = overviews([run])
    assert entry.state == "waiting" and f"({reason})" in entry.detail
    assert ("cannot start" in entry.detail) == bool(never) and never in entry.detail


@pytest.mark.parametrize("then", [("8",), ("8", "9")], ids=["its record grows", "a successor is submitted"])
def test_a_run_whose_jobs_change_while_slurm_is_asked_has_not_stopped(runs, monkeypatch, then):
    run = make(runs / "good", "jobs.json", as_bytes({"format": 1, "jobs": ["8"]}))

    (running,) = parse_jobs(f"{then[-1]}|RUNNING|None|n1|n1|N/A|N/A|10:00|low|0\n")

    def asked(ids, **_):
        for job in then:
            run.add_job(job, JobIdentity(user=os.getuid(), submitted=(1.0,)))
        return {job: record for job, record in [(then[-1], running)] if job in ids}

    monkeypatch.setattr(overview_module.slurm, "available", lambda: True)
    monkeypatch.setattr(own_jobs.slurm, "jobs", asked)
    (entry,) = overviews([run])
    assert (entry.state, entry.detail) == ("running", f"job {then[-1]} running on n1")


# the command line as a whole: exit codes, one message, nothing created


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["submit", "nosuch.yaml"], 2, "there is no configuration file nosuch.yaml"),
        (["submit", "."], 2, "cannot read .: it is a folder"),
        (["submit", "c.yaml", "--cluster", "local", "--set", "nonsense=1"], 2, "c.yaml --set nonsense=1: 1 problem"),
        (["submit", "c.yaml", "--cluster", "local", "--set", 'run_folder="new/a\\nb"'], 2, "line break"),
        (["submit", "c.yaml", "--cluster", "local", "--set", 'run_folder="new/a\\0b"'], 2, "is not text"),
        (["submit", "c.yaml", "--cluster", "local", "--set", "run_folder=~nobody-here/x"], 2, "home folder"),
        (["submit", "c.yaml", "--cluster", "local", "--set", "nodes=0"], 2, "nodes: "),
        (["submit", "c.yaml", "--cluster", "local", "--set", "nodes=1000000000"], 2, "nodes: 1e+09 is too much"),
        (["submit", "c.yaml", "--cluster", "local", "--set", "run_folder=c.yaml/x"], 1, "cannot create the run folder"),
        (["submit", "c.yaml", "--cluster", "local", "--set", f"run_folder={'x' * 300}"], 2, "more than 255 bytes"),
        (["submit", "c.yaml", "--cluster", "local", "--data", "nosuch"], 2, "--data: there is no nosuch"),
        (["submit", "c.yaml", "--cluster", "local", "--", "--hold"], 2, "options behind -- go to sbatch"),
        (["submit", "c.yaml", "--cluster", "slurm", "--", "--partition"], 75, "there is no sbatch"),
        (["submit", "c.yaml", "--dry-run", "--cluster", "local", "--", "-p"], 2, "'-p' needs a value"),
        (["submit", "c.yaml", "--dry-run", "--", "--comment=a\nb"], 2, "holds a line break"),
        (["frobnicate"], 2, "no such verb: frobnicate\n"),
        (["statsu"], 2, "no such verb: statsu; did you mean status?"),
        (["ls"], 2, "no such verb: ls; did you mean status?"),
        (["exclude", "lst"], 2, "no such verb: lst; did you mean list?"),
        (["status", "--bogus"], 2, "No such option"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_bad_command_creates_nothing(runs, tmp_path, arguments, code, message):
    (tmp_path / "c.yaml").write_text("command: [python, -m, json.tool]\nrun_folder: new/run\n")
    before = sorted(tmp_path.rglob("*"))
    done = started(*arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr
    assert done.stderr.count("slurmft: ") <= 1
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "c.yaml", "--cluster", "local"], "cannot create the run folder"),
        (["stop", "good"], "Permission denied"),
    ],
    ids=str,
)
def test_what_belongs_to_somebody_else_is_not_touched(runs, tmp_path, monkeypatch, capfd, arguments, message):
    (tmp_path / "c.yaml").write_text("command: [python, -m, json.tool]\nrun_folder: closed/run\n")
    (tmp_path / "closed").mkdir(mode=0o755)
    for path in (runs, *runs.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["slurmft", *arguments])
    with pytest.raises(SystemExit) as ended:
        as_nobody(main)
    told = capfd.readouterr().err
    assert ended.value.code == 1
    assert message in told and told.count("hint: ") == 1
    assert "Traceback" not in told and "internal error" not in told
    assert sorted(tmp_path.rglob("*")) == before


def test_an_error_of_the_operating_system_that_nobody_foresaw(runs, monkeypatch, capfd):
    def refuse(_run: RunFolder) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/x/y")

    monkeypatch.setattr("slurmft.operations.control.story", refuse)
    monkeypatch.setattr(sys, "argv", ["slurmft", "explain", "good"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert (
        capfd.readouterr().err == "slurmft: No space left on device: '/x/y'\n  hint: make room there, then try again\n"
    )


# the catalog of checkpoints


def commit(folder: Path, number: int) -> Path:
    path = folder / Identity(number, 0, number).folder_name
    path.mkdir(parents=True)
    files = {"shared.pt": FileRecord(10, "ab")}
    write_marker(Entry(number, path, {"loss": 0.5}, datetime.now(UTC), 0, number, "7.0.1", 1, files))
    return path


def changed(**keys: object) -> object:
    return lambda value: value | keys


@of_each(
    change__reason=[
        (lambda value: b"", "is not JSON"),
        (lambda value: json.dumps(value).encode()[:50], "is not JSON"),
        (lambda value: b"\xff\x00", "cannot read"),
        (lambda value: b"[" * 100_000, "is not JSON"),
        (lambda value: b"[]", "does not hold a JSON object"),
        (lambda value: {"format": 1}, "it lacks 'step'"),
        (changed(format=2), "has format 2; this slurmft reads up to 1"),
        (changed(format="1"), "does not say which format"),
        (changed(step="2"), "step is '2'"),
        (changed(step=True), "step is 'True'"),
        (changed(step=2.0), "step is '2.0'"),
        (changed(step=3), "it belongs to step-00000003"),
        (changed(commit=10**400), "commit is 'nan'"),
        (changed(world_size=None), "world_size is 'None'"),
        (changed(world_size=-1), "world_size is '-1'"),
        (changed(committed_at=5), "is not a checkpoint's marker"),
        (changed(committed_at="yesterday"), "is not a checkpoint's marker"),
        (changed(committed_at="2026-11-20T10:00:00"), "no time zone"),
        (changed(committed_at="0001-01-01T00:00:00+14:00"), "is not a checkpoint's marker"),
        (changed(files=[]), "is not a checkpoint's marker"),
        (changed(files={"a": 5}), "is not a checkpoint's marker"),
        (changed(files={"shared.pt": {"bytes": 1, "sha256": ""}}), "is not a checkpoint's marker"),
        (changed(files={"a": {"bytes": "5", "xxh3": "x"}}), "bytes is '5'"),
        (changed(files={"../a": {"bytes": 5, "xxh3": "x"}}), "leaves the folder"),
        (changed(files={"..": {"bytes": 5, "xxh3": "x"}}), "leaves the folder"),
        (changed(files={"": {"bytes": 5, "xxh3": "x"}}), "leaves the folder"),
        (changed(metrics={"loss": "low"}), "is not a checkpoint's marker"),
        (changed(metrics=None), "is not a checkpoint's marker"),
    ]
)
def test_a_damaged_marker_is_listed_with_its_reason(tmp_path, change, reason):
    good, bad = commit(tmp_path, 1), commit(tmp_path, 2)
    (bad / "manifest.json").write_bytes(as_bytes(change(json.loads((bad / "manifest.json").read_text()))))
    contents = Catalog(tmp_path).scan()
    assert [entry.path for entry in contents.committed] == [good]
    ((path, why),) = contents.unreadable
    assert path == bad and reason in why and str(bad) in why


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (os.mkfifo, "not a regular file"),
        (lambda marker: marker.mkdir(), "not a regular file"),
        (lambda marker: marker.symlink_to(marker), "Too many levels"),
        (lambda marker: marker.symlink_to("/dev/zero"), "not a regular file"),
        (lambda marker: (marker.touch(), os.truncate(marker, 10**12)), "it is longer than 67108864 bytes"),
    ],
    ids=["a pipe", "a folder", "a loop", "no end", "huge"],
)
def test_a_marker_that_is_no_file_is_listed_with_its_reason(tmp_path, put, reason):
    bad = commit(tmp_path, 2)
    (bad / "manifest.json").unlink()
    put(bad / "manifest.json")
    ((_, why),) = Catalog(tmp_path).scan().unreadable
    assert reason in why


@pytest.mark.parametrize("verb", [["status"], ["metrics"], ["watch", "--once"], ["watch", "bad", "--once"]])
@pytest.mark.parametrize("name", ["progress.json", "live.json"])
def test_a_number_without_limits_ends_nobodys_view(runs, verb, name):
    huge = b"9" * 309
    for run in ("good", "bad"):
        make(runs / run, "journal.jsonl", EVENT)
    content = b'{"format": 1, "metric": ' + huge + b', "at": 1' + huge + b', "step_s": [' + huge + b", 0.1]}"
    make(runs / "bad", name, content)
    code, output = slurmft(*verb)
    assert code == 0, output
    assert "good" in output or "bad" in verb


def test_a_journal_of_half_a_million_lines_costs_status_little(runs):
    line = EVENT.replace(b"attempt started", b"odd")
    path = make(runs / "good", "journal.jsonl", EVENT).path / "journal.jsonl"
    path.write_bytes(line * 500_000 + path.read_bytes())
    began_s = time.process_time()
    (entry,) = overviews([RunFolder(runs / "good")])
    assert time.process_time() - began_s < 3
    assert entry.detail.startswith("it left no verdict")
    path.write_bytes(path.read_bytes() + (line[:-2] + b', "x": "' + b"y" * 200 + b'"}\n') * 120_000)
    began_s = time.process_time()
    (entry,) = overviews([RunFolder(runs / "good")])
    assert time.process_time() - began_s < 3
    assert (entry.state, entry.detail) == ("stopped", "the newest 32 MiB of its journal do not say why")


@pytest.mark.parametrize("verb", [["checkpoint", "rm", "bad", "4"], ["submit", "--dry-run"]])
def test_links_in_a_circle_are_no_internal_error(runs, tmp_path, verb):
    config = tmp_path / "bad.yaml"
    config.write_text(json.dumps({"command": ["true"], "nodes": 1, "run_folder": str(runs / "bad")}))
    make(runs / "bad", "journal.jsonl", EVENT)
    (runs / "bad" / "config.yaml").write_text(config.read_text())
    (runs / "bad" / "checkpoints").symlink_to("checkpoints")
    code, output = slurmft(*verb, *([str(config)] if verb[0] == "submit" else []))
    assert code != 70 and "internal error" not in output, output
