"""Whose a run is: nothing of another user's is executed, submitted, followed or changed."""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from waiting import slowness

from slurmft.cli import checkpoint, control, nodes, report, submit
from slurmft.errors import StorageError, UsageError
from slurmft.operations import rescue
from slurmft.operations.run_configuration import refuse_foreign_configuration
from slurmft.storage import run_folder
from slurmft.storage.run_folder import RunFolder, refuse_replaceable, walk_runs

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's files")

ME, OTHER = 4711, 4712


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of ME, who is calling; every key file is there."""
    run = RunFolder(tmp_path / "runs" / "a")
    run.create()
    for name in ("config.yaml", "job.sh", "owner.json", "jobs.json", "journal.jsonl", "done.json", "progress.json"):
        (run.path / name).write_text("{}")
        (run.path / name).chmod(0o600)
    for path in (tmp_path, run.path.parent, run.path, *run.path.iterdir()):
        os.chown(path, ME, ME)
    monkeypatch.setattr(run_folder.os, "getuid", lambda: ME)
    return run


def swap(path: Path, make: Callable[[Path], object], owner: int = OTHER) -> None:
    """What a user who may write to the folder does: the old one away, their own in its place."""
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_name(f"{path.name}.away"))
    make(path)
    os.chown(path, owner, owner, follow_symlinks=False)


def test_a_run_of_the_callers_own_is_accepted(run):
    run.refuse_foreign()
    run.refuse_replaceable()


@pytest.mark.parametrize(
    "name", ["config.yaml", "job.sh", "owner.json", "jobs.json", "journal.jsonl", "done.json", "progress.json"]
)
@pytest.mark.parametrize(
    "make",
    [Path.touch, lambda path: path.symlink_to("/etc/passwd"), lambda path: path.symlink_to(f"{path.name}.away"),
     lambda path: path.symlink_to("/nowhere"), os.mkfifo, Path.mkdir],
    ids=["file", "link out", "link in", "dangling link", "fifo", "folder"],
)  # fmt: skip
def test_a_key_file_of_another_user_is_refused(run, name, make):
    swap(run.path / name, make)
    with pytest.raises(StorageError, match=rf"{name} belongs to user id {OTHER}, not to you"):
        run.refuse_foreign()


@pytest.mark.parametrize("name", ["attempts", "verdicts", "submissions", "logs"])
def test_a_folder_in_the_run_that_is_another_users_is_refused(run, name, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.chown(elsewhere, ME, ME)
    swap(run.path / name, lambda path: path.symlink_to(elsewhere))
    with pytest.raises(StorageError, match=f"{name} belongs to user id {OTHER}"):
        run.refuse_foreign()
    (run.path / name).unlink()
    swap(run.path / name, lambda path: path.symlink_to(elsewhere), owner=ME)
    run.refuse_foreign()
    os.chown(elsewhere, OTHER, OTHER)
    with pytest.raises(StorageError, match=f"{name} belongs to user id {OTHER}"):
        run.refuse_foreign()


def test_a_hard_link_to_another_users_file_is_that_users(run, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.touch()
    os.chown(theirs, OTHER, OTHER)
    run.script.unlink()
    run.script.hardlink_to(theirs)
    with pytest.raises(StorageError, match=r"job\.sh belongs to"):
        run.refuse_foreign()


def test_what_is_neither_file_nor_folder_is_refused(run):
    run.script.unlink()
    os.mkfifo(run.script)
    os.chown(run.script, ME, ME)
    with pytest.raises(StorageError, match=r"job\.sh is not a regular file"):
        run.refuse_foreign()


def test_a_link_that_another_user_made_is_not_followed(run, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(run.path)
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(StorageError, match="is a symbolic link that"):
        RunFolder(link).refuse_foreign()
    os.chown(link, ME, ME, follow_symlinks=False)
    RunFolder(link).refuse_foreign()


@pytest.mark.parametrize(
    ("mode", "owner", "is_refused"),
    [(0o755, 0, False), (0o775, OTHER, False), (0o777, 0, True), (0o777, ME, True), (0o1777, 0, False),
     (0o1777, OTHER, False)],
)  # fmt: skip
@pytest.mark.parametrize("is_linked", [False, True])
def test_a_folder_above_that_everyone_may_write_to_needs_the_sticky_bit(
    run, tmp_path, mode, owner, is_refused, is_linked
):
    path = run.path
    if is_linked:  # by way of another place: what counts is where it leads
        (tmp_path / "far").mkdir()
        os.chown(tmp_path / "far", ME, ME)
        path = tmp_path / "far" / "link"
        path.symlink_to("../runs/a")
        os.chown(path, ME, ME, follow_symlinks=False)
    os.chown(run.path.parent, owner, owner)
    run.path.parent.chmod(mode)
    if not is_refused:
        RunFolder(path).refuse_replaceable()
        return
    with pytest.raises(StorageError, match="every user may replace"):
        RunFolder(path).refuse_replaceable()


@pytest.mark.parametrize(("mode", "is_refused"), [(0o755, False), (0o775, True), (0o1777, True), (0o777, True)])
def test_above_roots_runs_root_alone_may_write(run, tmp_path, monkeypatch, mode, is_refused):
    for path in (tmp_path, run.path.parent, run.path):
        os.chown(path, 0, 0)
    run.path.parent.chmod(mode)
    monkeypatch.setattr(run_folder.os, "getuid", lambda: 0)
    steps = run_folder._steps

    def below(path: Path) -> Iterator[tuple[Path, os.stat_result, os.stat_result]]:
        """/tmp itself is everyone's."""
        return (step for step in steps(path) if step[0].is_relative_to(run.path))

    monkeypatch.setattr(run_folder, "_steps", below)
    if not is_refused:
        run.refuse_replaceable()
        os.chown(run.path.parent, OTHER, 0)
    with pytest.raises(StorageError, match="others than root may write"):
        run.refuse_replaceable()


def test_a_run_folder_that_a_group_may_write_to_is_not_rescued_but_may_be_stopped(run):
    run.path.chmod(0o770)
    run.refuse_foreign()
    with pytest.raises(StorageError, match="other users may write to the run folder"):
        run.refuse_replaceable()


def test_modes_inside_count_only_where_others_get_that_far(run):
    run.script.chmod(0o664)
    run.refuse_replaceable()
    run.path.chmod(0o750)
    with pytest.raises(StorageError, match=r"other users may write to .*job\.sh"):
        run.refuse_replaceable()


def test_links_in_a_circle_end(run, tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        refuse_replaceable(tmp_path / "a", parts=[])


def test_folders_are_told_apart_by_owner_without_looking_inside(run, tmp_path):
    root = run.path.parent
    for name, owner in (("forged", OTHER), ("roots", 0), ("b", ME)):
        (root / name).mkdir(mode=0)
        os.chown(root / name, owner, owner)
    for name, target, owner in (("mine", "a", ME), ("bait", "a", OTHER), ("by-admin", "forged", 0), ("gone", "x", ME)):
        (root / name).symlink_to(target)
        os.chown(root / name, owner, owner, follow_symlinks=False)
    (root / "a.yaml").touch()
    found = [(path.name, owner) for path, owner in walk_runs(root, owners={0, ME})]
    assert found == [("a", ME), ("forged", OTHER), ("bait", OTHER), ("by-admin", OTHER), ("mine", ME)]


@pytest.mark.parametrize("owner_of_folder", [0, OTHER])
def test_root_has_every_owner_look_after_runs_in_a_folder_of_each_user(tmp_path, monkeypatch, owner_of_folder):
    """Root looks only into its own folders: the process of another owner looks into that owner's."""
    root = tmp_path / "runs"
    (root / "other" / "lost").mkdir(parents=True)
    os.chown(root / "other", owner_of_folder, owner_of_folder)
    os.chown(root / "other" / "lost", OTHER, OTHER)
    asked: list[dict[int, list[str]]] = []
    monkeypatch.setattr(rescue, "rescue_on_behalf",
                        lambda owners, *_, **__: asked.append(owners) or rescue.Rescued())  # fmt: skip
    rescue.rescue_below(root, "root")
    assert asked == [{OTHER: ["other/lost" if owner_of_folder == 0 else "other"]}]


def test_ten_thousand_folders_of_others_cost_little_and_one_line(run, monkeypatch):
    for number in range(10_000):
        path = run.path.parent / f"x{number}"
        path.mkdir()
        os.chown(path, OTHER, OTHER)
    shutil.rmtree(run.path)
    monkeypatch.setattr(rescue.own_jobs, "find", lambda jobs: pytest.fail(f"asked Slurm about {jobs}") if jobs else {})
    began_s = time.process_time()
    found = rescue.rescue_below(run.path.parent, "me")
    assert time.process_time() - began_s < 2
    assert found.done == []
    assert found.left_alone == ("left alone: 10000 folders of other users (only their owners may rescue them): "
                                f"user id {OTHER}: x0, x1, x10, ...")  # fmt: skip


ACTING = {
    "stop": (control.stop, []),
    "save": (control.save, []),
    "requeue": (control.requeue, []),
    "requeue --rescue": (control.requeue, ["--rescue"]),
    "inject": (control.inject, ["kill"]),
    "join": (control.join, []),
    "join --here": (control.join, ["--here"]),
    "checkpoint rm": (checkpoint.rm, ["1"]),
}


@pytest.mark.parametrize("verb", ACTING)
def test_a_verb_that_acts_refuses_another_users_run_and_writes_nothing(run, verb):
    for path in (run.path, *run.path.iterdir()):
        os.chown(path, OTHER, OTHER)
    run.config.write_text(f"command: x\nrun_folder: {run.path}\n")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.path.rglob("*")}
    command, options = ACTING[verb]
    with pytest.raises((UsageError, StorageError), match=f"belongs to user id {OTHER}, not to you"):
        CliRunner().invoke(command, [str(run.path), *options], catch_exceptions=False, standalone_mode=False)
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.path.rglob("*")}


CONFIGURED = {
    "submit": (submit.submit, ["--dry-run"]),
    "drill": (nodes.drill, ["--dry-run"]),
    "advise": (report.advise, []),
    "doctor": (nodes.doctor, []),
    "exclude add": (nodes.add, ["n1", "--reason", "x", "--config"]),
}


@pytest.mark.parametrize("verb", CONFIGURED)
def test_the_configuration_of_another_users_run_is_not_acted_on(run, verb, monkeypatch):
    monkeypatch.setattr(nodes.slurm, "available", lambda: True)
    run.config.write_text(f"command: x\nrun_folder: {run.path}\nexclusions: {{path: {run.path.parent}/nodes.json}}\n")
    for path in (run.path, *run.path.iterdir()):
        os.chown(path, OTHER, OTHER)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.path.parent.rglob("*")}
    command, options = CONFIGURED[verb]
    with pytest.raises((UsageError, StorageError), match=f"belongs to user id {OTHER}, not to you"):
        CliRunner().invoke(command, [*options, str(run.config)], catch_exceptions=False, standalone_mode=False)
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.path.parent.rglob("*")}


def test_a_run_folders_configuration_is_executed_only_as_the_callers(run, tmp_path):
    refuse_foreign_configuration(run.config)
    os.chown(run.config, OTHER, OTHER)
    with pytest.raises(UsageError, match="belongs to user id 4712, not to you, and names the commands"):
        refuse_foreign_configuration(run.config)
    refuse_foreign_configuration(run.config.rename(tmp_path / "of-my-team.yaml"))


# root on behalf of others


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user can enter; its script ``python`` stands in for the interpreter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_program(folder, "true")
        monkeypatch.setattr(rescue.sys, "executable", str(folder / "python"))
        monkeypatch.setattr(rescue, "_account", account_of)
        yield folder


def account_of(owner: int) -> rescue.pwd.struct_passwd:
    return rescue.pwd.struct_passwd((f"u{owner}", "x", owner, owner, "", "/nowhere", "/bin/sh"))


def write_program(folder: Path, body: str) -> None:
    (folder / "python").write_text(f"#!/bin/bash\n{body}\n")
    (folder / "python").chmod(0o755)


def as_owners(stage: Path, *owners: int, limit_s: float = 30.0, only: Path | None = None) -> rescue.Rescued:
    return rescue.rescue_on_behalf({owner: ["x"] for owner in owners}, stage, limit_s=limit_s, only=only)


IN_THE_KEYRING = """
import ctypes, os, sys
keyctl, add = {"x86_64": (250, 248), "aarch64": (219, 217)}[os.uname().machine]
library, kind, name = ctypes.CDLL(None, use_errno=True), b"user", b"slurmft:ticket"
if sys.argv[1] == "give":
    if library.syscall(keyctl, 1, None) < 0 or library.syscall(add, kind, name, b"roots", 5, ctypes.c_int(-3)) < 0:
        sys.exit(77)
    os.execv(sys.argv[2], sys.argv[2:])
print("ticket", library.syscall(keyctl, 10, ctypes.c_int(-3), kind, name, 0) >= 0)
print("audit id", open("/proc/self/loginuid").read())
"""


def test_the_owners_process_has_neither_roots_keyring_nor_its_audit_id(stage):
    (stage / "ring.py").write_text(IN_THE_KEYRING)
    write_program(stage, f"exec /usr/bin/python3 {stage}/ring.py look")
    rescue_it = (
        f"import time, pwd, sys; from pathlib import Path; from slurmft.operations import rescue as on_behalf\n"
        f"sys.executable = {str(stage / 'python')!r}\n"
        f"account = pwd.struct_passwd(('u', 'x', {ME}, {ME}, '', '/', '/bin/sh'))\n"
        f"print(on_behalf._as_owner(account, Path('/tmp'), None, time.monotonic() + 50).done)"
    )
    command = ["/usr/bin/python3", str(stage / "ring.py"), "give", f"{sys.prefix}/bin/python", "-c", rescue_it]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode == 77:
        pytest.skip("this container has no keyrings")
    assert done.returncode == 0, done.stderr
    assert "ticket False" in done.stdout
    assert f"audit id {ME}" in done.stdout or not may_set_audit_id()


def may_set_audit_id() -> bool:
    try:
        with open("/proc/thread-self/loginuid", "r+") as file:
            file.write(file.read())
    except OSError:
        return False
    return True


def test_the_owners_process_has_nothing_of_roots(stage, monkeypatch):
    monkeypatch.setenv("SECRET", "of root")
    monkeypatch.setenv("PYTHONPATH", "/root")
    monkeypatch.setenv(
        "PATH", "/usr/sbin:/usr/bin:/sbin:/bin"
    )  # the whole environment is one line, and a line has limits
    write_program(stage, 'echo "$(id -u) $(id -g) $(id -G) $(pwd) $(umask)"\n'
                         'grep -E "^(Uid|Gid|CapEff|CapPrm)" /proc/$$/status | xargs\n'
                         'ls -l /proc/$$/fd | xargs; env | sort | xargs; echo "$@"')  # fmt: skip
    (stage / "of-root").touch()
    with (stage / "of-root").open() as stream:
        os.set_inheritable(stream.fileno(), True)
        found = as_owners(stage, ME)
    assert found.problems == []
    who, status, descriptors, environment, arguments = (line.removeprefix(f"u{ME}: ") for line in found.done)
    assert who == f"{ME} {ME} {ME} / 0077"
    ids = " ".join([str(ME)] * 4)
    assert status == f"Uid: {ids} Gid: {ids} CapPrm: {'0' * 16} CapEff: {'0' * 16}"
    assert "of-root" not in descriptors and "/dev/null" in descriptors
    assert "of root" not in environment and "PYTHONPATH" not in environment
    assert f"SLURMFT_RUNS={stage}" in environment and f"USER=u{ME}" in environment and "HOME=/nowhere" in environment
    assert arguments == "-I -m slurmft requeue --rescue --as-owner"


def test_an_owner_that_never_ends_or_never_stops_talking_costs_only_its_own_turn(stage, monkeypatch):
    monkeypatch.setattr(rescue, "OWNER_LIMIT_S", 2)
    write_program(stage, f"case $(id -u) in {ME}) yes;; {OTHER}) sleep 600;; *) echo fine;; esac")
    began_s = time.monotonic()
    found = as_owners(stage, ME, OTHER, 4713)
    assert time.monotonic() - began_s < 10 * slowness()
    assert [line for line in found.done if not line.startswith(f"u{ME}:")] == ["u4713: fine"]
    assert len(found.done) <= rescue.MAX_LINES + 2
    assert {line for line in found.problems if "not done" in line} == {
        f"u{ME}: not done in 2 s", f"u{OTHER}: not done in 2 s"
    }  # fmt: skip


def test_what_an_owner_left_behind_does_not_hold_root_up(stage):
    write_program(stage, "sleep 20 & echo fine")
    began_s = time.monotonic()
    assert as_owners(stage, ME).done == [f"u{ME}: fine"]
    assert time.monotonic() - began_s < 10 * slowness()


def test_owners_without_a_turn_and_failures_are_told(stage):
    write_program(stage, "echo 'cannot do it' >&2; exit 3")
    assert as_owners(stage, ME).problems == [f"u{ME}: ended with exit code 3", f"u{ME}: cannot do it"]
    write_program(stage, "echo 'a run of mine is damaged' >&2; echo fine")
    assert as_owners(stage, ME) == rescue.Rescued(done=[f"u{ME}: fine"]), "no reason for a mail to root"
    assert as_owners(stage, ME, limit_s=-1.0).problems == [f"runs of u{ME} were not looked at: there was no time left"]


@pytest.mark.parametrize(
    ("owner", "shell", "is_served"),
    [(1000, "/bin/bash", True), (1000, "", True), (999, "/bin/zsh", True), (0, "/bin/bash", False),
     (33, "/usr/sbin/nologin", False), (33, "/bin/false", False), (1000, None, False)],
)  # fmt: skip
def test_root_acts_only_for_users_who_can_log_in(monkeypatch, owner, shell, is_served):
    def look(user_id: int) -> rescue.pwd.struct_passwd:
        if shell is None:
            raise KeyError(user_id)
        return rescue.pwd.struct_passwd(("x", "x", user_id, 100, "", "/", shell))

    monkeypatch.setattr(rescue.pwd, "getpwuid", look)
    assert (rescue._account(owner) is not None) is is_served


def test_root_itself_is_no_owner(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMFT_RUNS", str(tmp_path))
    with pytest.raises(UsageError, match="which are not root's"):
        CliRunner().invoke(control.requeue, ["--rescue", "--as-owner"], catch_exceptions=False, standalone_mode=False)


def test_the_batch_script_is_private(tmp_path):
    """A user who could write to it could have the next rescue run it."""
    from slurmft.system.files import replace_atomically

    before = os.umask(0o002)
    try:
        replace_atomically(tmp_path / "job.sh", "#!/bin/sh\n")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "job.sh").stat().st_mode) == 0o600
