"""Files on a shared filesystem: atomic, versioned, believed only when whole; one actor per ending; fences."""

import ast
import contextlib
import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from drawn import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from of_each import of_each

import slurmft
from slurmft.errors import Fenced, NewerFormat, RunBusy, StorageError
from slurmft.storage import run_folder
from slurmft.storage.checkpoint_names import GENERATION_VARIABLE, OWNER_FILE, RUN_FOLDER_VARIABLE, check_fence
from slurmft.storage.journal import EventName, Journal
from slurmft.storage.run_folder import JOBS_FILE, REQUESTS, Attempt, Owner, RunFolder, find_run, list_runs
from slurmft.system import files
from slurmft.system.files import append_line, read_json, replace_atomically, write_json

SPAWN = multiprocessing.get_context("spawn")
NO_DATABASE = settings(
    database=None,
    deadline=None,
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def owner_of(**changes: object) -> Owner:
    facts = {"job": "7", "restart": 0, "generation": 1, "cluster": "slurm", "host": "n1", "pid": 99, "birth": "b:1",
             "folder": "", "inode": 0}  # fmt: skip
    return Owner(**facts | changes)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# files


def test_what_is_written_is_read_back(tmp_path):
    write_json(tmp_path / "a.json", {"step": 3, "name": "ü"})
    assert read_json(tmp_path / "a.json") == {"format": 1, "step": 3, "name": "ü"}
    assert mode_of(tmp_path / "a.json") == 0o600


def test_no_file_is_none(tmp_path):
    assert read_json(tmp_path / "a.json") is None


def test_a_mode_is_set_whatever_the_umask_is(tmp_path):
    before = os.umask(0o077)
    try:
        replace_atomically(tmp_path / "a", "x", mode=0o664)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "a") == 0o664


@pytest.mark.parametrize("fails", ["fsync", "fchmod", "replace"])
def test_a_failure_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, fails):
    path = tmp_path / "a"
    replace_atomically(path, "old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, fails, refuse)
    with pytest.raises(OSError, match="No space left"):
        replace_atomically(path, "new")
    monkeypatch.undo()
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("write", "call"), [(replace_atomically, "fsync"), (append_line, "fsync"), (append_line, "write")]
)
def test_a_full_disk_is_named_with_the_file_that_did_not_fit(tmp_path, monkeypatch, write, call):
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    path = tmp_path / "jobs.json"
    with pytest.raises(OSError, match="No space left") as caught:
        write(path, "x")
    assert caught.value.filename == str(path)


def test_a_crash_between_write_and_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"step": 1})
    code = (
        "import os, sys; from pathlib import Path; from slurmft.system import files\n"
        "files.os.replace = lambda *_: os._exit(9)\n"
        "files.write_json(Path(sys.argv[1]), {'step': 2})\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=30, check=False).returncode == 9
    assert read_json(path) == {"format": 1, "step": 1}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", StorageError, "is not JSON"),
        (b'{"format": 1, "st', StorageError, "is not JSON"),
        (b"\x00" * 512, StorageError, "is not JSON"),
        (b"\xff\xfe\x00", StorageError, "cannot read"),
        (b"[1]", StorageError, "does not hold a JSON object"),
        (b"null", StorageError, "does not hold a JSON object"),
        (b'{"format": 2, "step": 1}', NewerFormat, "has format 2; this slurmft reads up to 1"),
        (b'{"format": "new"}', StorageError, "does not say which format it has"),
        (b"{}", StorageError, "does not say which format it has"),
    ],
    ids=["empty", "torn", "zeros", "no text", "list", "null", "newer", "odd version", "no version"],
)
def test_what_cannot_be_believed_is_refused(tmp_path, content, error, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(error, match=message):
        read_json(tmp_path / "a.json")


def test_unknown_keys_are_tolerated(tmp_path):
    (tmp_path / "a.json").write_text('{"format": 1, "invented_later": [1]}')
    assert read_json(tmp_path / "a.json") == {"format": 1, "invented_later": [1]}


def test_a_folder_in_its_place_is_an_error(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(StorageError, match="cannot read"):
        read_json(tmp_path / "a.json")


@NO_DATABASE
@given(st.binary(max_size=80))
def test_garbage_is_an_error_of_ours_or_an_object(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with contextlib.suppress(StorageError):
        assert isinstance(read_json(path), dict)


def test_deep_garbage_is_an_error_of_ours(tmp_path):
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(StorageError, match="is not JSON"):
        read_json(tmp_path / "a.json")


# journal

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def test_events_come_back_in_order_with_their_details(tmp_path):
    journal = Journal(tmp_path, attempt="7.1.0", clock=lambda: NOON)
    journal.append("verdict", cause="preempted", step=3, nested={"a": [1, None]})
    journal.append("decision")
    first, second = journal.read()
    assert (first.event, first.attempt, first.at) == ("verdict", "7.1.0", NOON)
    assert first.details == {"cause": "preempted", "step": 3, "nested": {"a": [1, None]}}
    assert first.seconds() == NOON.timestamp()
    assert (second.event, second.details) == ("decision", {})
    assert mode_of(journal.path) == 0o600


def test_a_journal_that_is_not_there_is_empty(tmp_path):
    assert Journal(tmp_path).read() == []


def test_a_line_break_in_a_detail_stays_in_its_line(tmp_path):
    journal = Journal(tmp_path)
    journal.append("verdict", reason='two\nlines "quoted" \u2028 ü')
    assert journal.path.read_bytes().count(b"\n") == 1
    assert journal.read()[0].details["reason"] == 'two\nlines "quoted" \u2028 ü'


@of_each(torn=[b'{"format": 1, "ev', b"\xff\xfe", b"{", b"[1]", b'"text"', b"17", b'{"format": 1}'])
def test_a_torn_last_line_is_skipped_and_closed_off(tmp_path, torn):
    journal = Journal(tmp_path)
    journal.append("one")
    with journal.path.open("ab") as stream:
        stream.write(torn)
    assert [event.event for event in journal.read()] == ["one"]
    journal.append("two")
    assert [event.event for event in journal.read()] == ["one", "two"]
    journal.append("three")
    assert journal.path.read_bytes().count(b"\n") == 4


def test_a_line_cut_anywhere_costs_only_itself(tmp_path):
    journal = Journal(tmp_path)
    journal.append("one", note="ü")
    whole = journal.path.read_bytes()
    for cut in range(len(whole)):
        journal.path.write_bytes(whole + whole[:cut])
        journal.append("two")
        events = [event.event for event in journal.read()]
        assert events[0] == "one"
        assert events[-1] == "two"


def test_a_newer_line_is_refused_not_misread(tmp_path):
    journal = Journal(tmp_path)
    journal.append("one")
    with journal.path.open("a") as stream:
        stream.write(json.dumps({"format": 2, "at": NOON.isoformat(), "event": "x"}) + "\n")
    with pytest.raises(NewerFormat, match="lines of format 2"):
        journal.read()


def test_what_cannot_be_written_leaves_no_trace(tmp_path):
    journal = Journal(tmp_path)
    journal.append("one")
    before = journal.path.read_bytes()
    with pytest.raises(TypeError):
        journal.append("two", path=Path("/x"))
    assert journal.path.read_bytes() == before


def test_a_folder_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        Journal(tmp_path / "gone").append("one")
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(StorageError, match="cannot read"):
        Journal(tmp_path).read()


def test_a_local_clock_is_kept_as_an_instant(tmp_path):
    journal = Journal(tmp_path, clock=lambda: NOON.astimezone(timezone(timedelta(hours=-8))))
    journal.append("one")
    assert journal.read()[0].at == NOON


@pytest.mark.parametrize("name", ["at", "attempt", "format"])
def test_a_detail_cannot_replace_what_every_line_has(tmp_path, name):
    journal = Journal(tmp_path, attempt="7.0.0", clock=lambda: NOON)
    try:
        journal.append("one", **{name: 99})
    except (TypeError, ValueError):
        return
    assert [(event.event, event.attempt, event.at) for event in journal.read()] == [("one", "7.0.0", NOON)]


def append_many(folder: str, writer: int, count: int) -> None:
    journal = Journal(Path(folder), attempt=f"{writer}.0.0")
    for number in range(count):
        journal.append("tick", number=number, padding="x" * 700)


# several processes, started once for all tests that need them


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(8, mp_context=SPAWN) as pool:
        yield pool


def test_lines_of_concurrent_writers_never_mix(tmp_path, processes):
    tasks = [processes.submit(append_many, str(tmp_path), writer, 20) for writer in range(8)]
    for task in tasks:
        task.result(timeout=60)
    events = Journal(tmp_path).read()
    assert len(events) == 160
    for writer in range(8):
        mine = [event.details["number"] for event in events if event.attempt == f"{writer}.0.0"]
        assert mine == list(range(20))


# run folder

ATTEMPT = Attempt(job="12_4", restart=1)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "odd name 100%")
    folder.create()
    return folder


def test_a_new_run_folder_is_private(run):
    assert mode_of(run.path) == 0o700
    for folder in (run.attempts, run.verdicts, run.submissions, run.logs):
        assert mode_of(folder) == 0o700
    run.create()  # again is fine


def test_looking_at_a_folder_creates_nothing(tmp_path):
    run = RunFolder(tmp_path / "a")
    assert not run.exists()
    assert (run.owner(), run.done(), run.progress(), run.jobs()) == (None, None, None, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of somebody else's")
def test_somebody_elses_folder_is_refused(tmp_path):
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(StorageError, match="belongs to user id 65534, not to you"):
        RunFolder(tmp_path).create()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of somebody else's")
def test_nothing_is_created_in_somebody_elses_folder(tmp_path):
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(StorageError):
        RunFolder(tmp_path).create()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(StorageError, match=r"writable by everybody\n  hint: chmod o-w"):
        RunFolder(tmp_path).create()


def test_a_group_may_be_let_in(tmp_path):
    tmp_path.chmod(0o770)
    RunFolder(tmp_path).create()


@pytest.mark.parametrize("where", ["file", "file/below", "\0"], ids=["a file", "below a file", "no name"])
def test_a_folder_that_cannot_be_created_is_an_error(tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises((StorageError, ValueError)):
        RunFolder(tmp_path / where).create()


def test_an_attempt_has_its_own_folder(run):
    folder = run.attempt_folder(ATTEMPT)
    assert (folder.name, mode_of(folder)) == ("12_4.1.0", 0o700)
    assert str(Attempt(job="7", restart=0, cycle=3)) == "7.0.3"


def test_a_secret_is_fresh_and_for_the_user_alone(run):
    before = os.umask(0)
    try:
        path = run.new_secret(ATTEMPT)
        first = path.read_text()
        second = run.new_secret(ATTEMPT).read_text()
    finally:
        os.umask(before)
    assert mode_of(path) == 0o600
    assert mode_of(path.parent) == 0o700
    assert len(first) == 64
    assert first != second


def test_a_secret_is_not_written_through_a_link(run, tmp_path):
    folder = run.attempt_folder(ATTEMPT)
    (folder / "secret").symlink_to(tmp_path / "elsewhere")
    run.new_secret(ATTEMPT)
    assert not (tmp_path / "elsewhere").exists()


def claim(folder: str, actor: str) -> bool:
    claim = RunFolder(Path(folder)).ending(ATTEMPT)
    if not claim.take(actor):
        return False
    claim.settle("requeued")
    return True


def test_one_of_eight_processes_acts_on_an_ending(run, processes):
    claims = [processes.submit(claim, str(run.path), f"actor {number}") for number in range(8)]
    assert sorted(claim.result(timeout=60) for claim in claims) == [False] * 7 + [True]
    assert not run.ending(Attempt(job="12_4", restart=1, cycle=5)).take("another cycle of it")
    assert run.ending(Attempt(job="12_4", restart=2)).take("the next restart")
    assert run.ending(Attempt(job="12", restart=1)).take("another job")


def test_a_claim_that_was_given_back_can_be_taken_again(run):
    claim = run.ending(ATTEMPT)
    assert claim.take("supervisor")
    claim.give_back()
    assert claim.take("cron")
    assert claim.outcome() is None
    claim.settle("requeued")
    assert claim.outcome() == "requeued"


def claim_and_die(folder: str) -> None:
    assert RunFolder(Path(folder)).ending(ATTEMPT).take("somebody who is killed")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_claim_of_a_process_that_died_is_free(run):
    process = SPAWN.Process(target=claim_and_die, args=(str(run.path),))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert run.ending(ATTEMPT).take("cron")


@pytest.mark.parametrize(("age_s", "is_free"), [(0.0, False), (100.0, False), (1000.0, True), (-1000.0, True)])
def test_a_claim_from_another_host_lapses(run, age_s, is_free):
    path = run.attempts / f"{ATTEMPT.job}.{ATTEMPT.restart}.ending.json"
    write_json(path, {"actor": "a", "at": time.time() - age_s, "host": "elsewhere", "pid": 1, "birth": "x"})
    assert run.ending(ATTEMPT).take("cron") is is_free


def test_a_claim_of_somebody_who_is_known_to_be_gone_counts_for_nothing(run):
    claim, path = run.ending(ATTEMPT), run.attempts / f"{ATTEMPT.job}.{ATTEMPT.restart}.ending.json"
    write_json(path, {"actor": "supervisor on n1", "at": time.time(), "host": "elsewhere", "pid": 1, "birth": "x"})
    assert not claim.take("cron")
    assert not claim.take("cron", instead_of="somebody else")
    assert claim.take("cron", instead_of="supervisor on ")
    claim.settle("requeued")
    assert not claim.take("cron", instead_of="supervisor on ")


def test_a_lock_that_is_held_says_so(run, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT_S", 0.05)
    with run.lock(), pytest.raises(RunBusy, match="another process holds"), RunFolder(run.path).lock():
        pass
    with run.lock():  # it was given back
        pass


def test_a_lock_is_given_back_after_an_error(run):
    with pytest.raises(KeyError), run.lock():
        raise KeyError
    with run.lock():
        pass


def test_the_runs_state_is_read_back(run):
    owner = owner_of(job="7", restart=1, generation=3, cluster="slurm")
    run.take_over(owner)
    assert run.owner() == owner
    run.write_progress(step=3)
    run.mark_done(step=9)
    assert (run.progress() or {})["step"] == 3
    assert (run.done() or {})["step"] == 9


def test_an_owner_of_a_later_version_with_more_facts_is_understood(run):
    owner = owner_of(job="7", restart=1, generation=3, cluster="slurm")
    run.take_over(owner)
    text = json.loads((run.path / OWNER_FILE).read_text())
    write_json(run.path / OWNER_FILE, text | {"invented_later": 1})
    assert run.owner() == owner


def test_an_owner_that_lacks_a_fact_is_an_error_of_ours(run):
    write_json(run.path / OWNER_FILE, {"job": "7"})
    with pytest.raises(StorageError):
        run.owner()


def test_jobs_are_remembered_once_in_order(run):
    for job in ("7", "8", "7", "9"):
        run.add_job(job)
    assert run.jobs() == ["7", "8", "9"]


@pytest.mark.parametrize("jobs", [5, ["7", 8], ["seven"], ["7,8"], ["7", ""], ["7;8"]])
def test_jobs_that_squeue_would_choke_on_are_refused(run, jobs):
    write_json(run.path / JOBS_FILE, {"jobs": jobs})
    with pytest.raises(StorageError, match=re.escape(JOBS_FILE)):
        run.jobs()


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_is_taken_once(run, kind):
    assert run.take_request(kind) is None
    run.request(kind, "ann@login1")
    assert run.take_request(kind) == "ann@login1"
    assert run.take_request(kind) is None


@pytest.mark.parametrize(
    ("content", "who"),
    [(b"", "a user who touched the file"), (b"  \n", "a user who touched the file"), (b"\xffann\n", "\ufffdann"),
     (b"x" * 999, "x" * 200)],
    ids=["touched", "blank", "no text", "long"],
)  # fmt: skip
def test_any_file_of_that_name_is_a_request(run, content, who):
    (run.path / "KILL").write_bytes(content)
    assert run.see_request("KILL") == who
    assert run.take_request("KILL") == who
    assert run.see_request("KILL") is None


def test_runs_are_found_by_name_and_by_path(run, monkeypatch):
    root = run.path.parent
    (root / "no run").mkdir()
    assert list_runs(root) == []
    run.journal().append("submitting")
    assert [found.path for found in list_runs(root)] == [run.path]
    assert find_run(run.path.name, root).path == run.path
    monkeypatch.chdir(root)
    assert find_run(f"./{run.path.name}", Path("/nowhere")).path == run.path
    with pytest.raises(StorageError, match=r"there is no run 'b'[\s\S]*odd name 100%"):
        find_run("b", root)
    assert list_runs(root / "gone") == []


def test_runs_in_folders_of_users_and_projects_are_found(tmp_path):
    root = tmp_path / "runs"
    for name in ("a", "alice/b", "alice/vision/c", "alice/vision/old/too deep", "bob/d"):
        RunFolder(root / name).create()
        RunFolder(root / name).journal().append("submitting")
    (root / "alice" / "config.yaml").write_text("{}")  # of no run, and lies in the way
    (root / "a" / "attempts" / "1.0.0").mkdir()
    (root / "a" / "attempts" / "1.0.0" / "journal.jsonl").write_text("inside of a run there is none")
    (root / "alice" / "myself").symlink_to(".")
    (root / "elsewhere").symlink_to(root)
    found = [run.name for run in list_runs(root)]
    assert found == ["a", "alice", "alice/b", "alice/vision/c", "bob/d"]
    assert find_run("alice/vision/c", root).path == root / "alice" / "vision" / "c"
    assert find_run("b", root).path == root / "alice" / "b"
    with pytest.raises(StorageError, match="alice/b, alice/vision/c"):
        find_run("e", root)
    RunFolder(root / "bob/b").create()
    RunFolder(root / "bob/b").journal().append("submitting")
    with pytest.raises(StorageError, match="2 runs called 'b'") as caught:
        find_run("b", root)
    assert f"{root}/alice/b, {root}/bob/b" in caught.value.hint


# fence


def fence_of(run: RunFolder, generation: object) -> dict[str, str]:
    return {RUN_FOLDER_VARIABLE: str(run.path), GENERATION_VARIABLE: str(generation)}


@pytest.mark.parametrize(("mine", "stale"), [(1, True), (2, True), (3, False)])
def test_an_older_generation_is_fenced(run, mine, stale):
    run.take_over(owner_of(job="9", restart=0, generation=3, cluster="slurm"))
    if not stale:
        check_fence(fence_of(run, mine))
        return
    with pytest.raises(Fenced, match=rf"generation {mine} of .* was replaced by generation 3 \(job 9\)"):
        check_fence(fence_of(run, mine))


def test_an_attempt_is_fenced_when_its_folder_was_replaced_by_an_older_copy(run):
    run.take_over(owner_of(generation=3))
    with pytest.raises(Fenced, match="is an older copy of itself: it knows generation 3, this attempt is generation 4"):
        check_fence(fence_of(run, 4))


def test_a_copy_is_known_and_refused_but_a_moved_or_restored_folder_is_not(run, tmp_path):
    run.take_over(owner_of(folder=str(run.path), inode=run.path.stat().st_ino))
    run.create()
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    with pytest.raises(StorageError, match=rf"is a copy of {re.escape(str(run.path))}"):
        copy.create()
    moved = RunFolder(run.path.rename(tmp_path / "moved"))
    moved.create()
    copy.create()  # as after a move to another filesystem: the original is gone
    RunFolder(copy.path.rename(run.path)).create()


def test_a_process_of_no_run_is_never_fenced(run, monkeypatch):
    check_fence({})
    monkeypatch.delenv(RUN_FOLDER_VARIABLE, raising=False)
    check_fence()


def test_a_run_without_an_owner_fences_nobody(run):
    check_fence(fence_of(run, 0))


def test_a_process_that_knows_no_generation_is_older_than_all(run):
    run.take_over(owner_of(job="9", restart=0, generation=1, cluster="local"))
    with pytest.raises(Fenced):
        check_fence({RUN_FOLDER_VARIABLE: str(run.path)})


def test_an_owner_file_that_cannot_be_believed_is_not_a_permission(run):
    (run.path / OWNER_FILE).write_text("{")
    with pytest.raises(StorageError):
        check_fence(fence_of(run, 1))


# --- The words of the journal: part of its format, so that older journals and other programs go on being understood ---


ROOT = Path(slurmft.__file__).parent
READ_BY_OTHERS = {
    "submitted", "attempt started", "workers started", "first step", "stop requested", "stop saved", "verdict",
    "decision", "requeueing", "requeued", "resubmitted", "not continued", "evidence", "avoiding", "agent lost",
    "worker failed", "worker hung", "exclusion_escaped", "avoiding_gpus", "checkpoint quarantined", "rescuing",
}  # fmt: skip
"""A run that goes on with another version finds these in its journal."""


def test_words_that_older_journals_have_stay():
    assert {name.value for name in EventName} >= READ_BY_OTHERS


def test_each_word_is_used_somewhere_and_none_is_written_out():
    sources = {path: path.read_text() for path in ROOT.rglob("*.py") if path.name != "events.py"}
    unused = [name for name in EventName if not any(f"EventName.{name.name}" in text for text in sources.values())]
    assert unused == []
    compared = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, text in sources.items() for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "event"
        and any(isinstance(each, ast.Constant) for side in node.comparators for each in ast.walk(side))
    ]  # fmt: skip
    assert compared == []


def test_an_event_is_written_as_its_word_and_read_back_as_one(tmp_path):
    journal = Journal(tmp_path)
    journal.append(EventName.FIRST_STEP, resumed_from=3)
    assert json.loads(journal.path.read_text())["event"] == "first step"
    (event,) = journal.read()
    assert event.event == EventName.FIRST_STEP and f"{event.event:<12}|" == "first step  |"
