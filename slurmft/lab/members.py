"""The members of the lab: sets of namespaces, each kept alive by its holder, joined by one bridge.

First argv, mounts and wiring, then the daemons inside. ``ip netns`` is not used on purpose: its
``exec`` remounts /sys, which makes slurmd 22.05 refuse to start, and its names and mounts would outlive a crash.
"""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import pwd
import secrets
import select
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import slurmft
from slurmft.errors import LabError
from slurmft.lab import holder
from slurmft.lab.settings import (
    CLEAN_ENVIRONMENT,
    CONTROLLER,
    CONTROLLER_ADDRESS,
    LOGIN,
    NETWORK_BITS,
    SEARCH_PATH,
    UMASK,
    LabPaths,
    LabSettings,
    lab_processes,
    make_folder,
    mark_source,
    member_of_process,
    run,
    wait_until,
)

# --- The mounts that let an ordinary user reach paths in private folders of other users ---
# An interpreter below /root or a checkout in a 0700 folder cannot be used by the lab's user. Nothing on the host is
# changed for it: inside the lab's mount namespaces the private folder is covered by an empty one, and only what is
# needed is bound back at its own path.

PRIVATE_MEMORY = Path("/dev/shm")  # noqa: S108 - a mount point of every member, not a place for temporary files
MAX_LINKS = 40


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount inside a member; carried out by ``holder.py`` in the order given."""

    kind: Literal["bind", "tmpfs", "copy", "link", "folder"]
    """The last three make what a fresh root lacks: a copy of a tree, a symbolic link, an empty folder."""
    source: str
    target: str
    read_only: bool = False
    mode: str = "0755"


def root_mounts(root: Path, mark: str) -> tuple[Mount, ...]:
    """The mounts that make a file tree of a Debian release the root of a member, in memory but for its programs.

    Users and groups are the host's: a process has the same owner on both sides.
    """
    tops = [path for path in sorted(root.iterdir()) if path.is_symlink()]  # bin, lib, lib64 and sbin
    return (
        Mount("tmpfs", mark, "/"),
        *(Mount("link", str(path.readlink()), f"/{path.name}") for path in tops),
        *(Mount("folder", "", f"/{name}") for name in ("proc", "root", "run", "var/lib", "var/log")),
        Mount("link", "/run", "/var/run"),
        Mount("copy", str(root / "etc"), "/etc"),
        Mount("bind", str(root / "usr"), "/usr"),
        *(Mount("bind", f"/{name}", f"/{name}") for name in ("dev", "sys", "tmp")),
        *(Mount("bind", f"/etc/{name}", f"/etc/{name}", read_only=True) for name in ("passwd", "group")),
    )


def needed_paths() -> tuple[Path, ...]:
    """What running this very Python with this very slurmft takes: interpreter, environment, source."""
    package = Path(slurmft.__file__).parent
    return (Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable), package.parent)


def compile_sources() -> None:
    """Compile this slurmft, as its installation did, where its sources have changed since.

    The lab's user cannot write beside them: each of its processes would compile half of the package by itself. A
    package that cannot be written is left as it is.
    """
    compileall.compile_dir(Path(slurmft.__file__).parent, quiet=2)


def paths_to_expose(
    paths: Iterable[Path], *, writable: Collection[Path] = (), covered: Collection[Path] = (PRIVATE_MEMORY,)
) -> tuple[Mount, ...]:
    """The mounts after which every user can read ``paths``; none when all users already can.

    Guarantees: nothing else of a covered folder stays visible; binds are read-only except for ``writable``; symbolic
    links on the way work. Does not help against unreadable files *inside* a given path: a bind keeps their modes.

    Args:
        covered: folders that other mounts of the plan, made earlier, hide already.
    """
    plan = _Plan(writable=frozenset(writable), covered=set(covered))
    wanted = {step for path in (*paths, *writable) for step in _through_links(path) if step.exists()}
    for path in sorted(wanted, key=lambda path: (len(path.parts), path)):
        plan.reveal(path)
    return tuple(plan.mounts)


def _through_links(path: Path) -> Iterator[Path]:
    """The path itself, then what it becomes each time one of its symbolic links is followed."""
    path = Path("/", path)
    for _ in range(MAX_LINKS):
        yield path
        link = next((part for part in (*reversed(path.parents), path) if part.is_symlink()), None)
        if link is None:
            return
        # lexical ".." would be wrong across links, so the folder of the link is resolved first
        target = Path(link.parent.resolve(), link.readlink())
        target = target.parent.resolve() / target.name if ".." in target.parts else target
        path = target / path.relative_to(link)


class _Plan:
    """Remembers which folders are covered and which are bound back while paths are revealed, parents first."""

    def __init__(self, *, writable: frozenset[Path], covered: set[Path]) -> None:
        self.writable = writable
        self.covered = covered
        self.bound: set[Path] = set()
        self.mounts: list[Mount] = []

    def reveal(self, path: Path) -> None:
        hidden = False
        for folder in (*reversed(path.parents), path):
            if folder in self.bound:
                hidden = False
            elif folder in self.covered:
                hidden = True
            elif not hidden and folder.is_symlink():
                return  # reachable here; where it leads is a path of its own
            elif not hidden and _is_private(folder, needs_reading=folder == path):
                self._cover(folder)
                hidden = True
        if hidden:
            self._bind(path)

    def _cover(self, folder: Path) -> None:
        self.covered.add(folder)
        self.mounts.append(Mount("tmpfs", "slurmft-lab-cover", str(folder)))

    def _bind(self, path: Path) -> None:
        if not _is_private(path, needs_reading=True):
            self._bind_one(path)
            return
        # a bind would keep the private mode: leave a fresh folder in its place and bind what it holds
        self.covered.add(path)
        for child in sorted(path.iterdir()):
            if child.exists() and child not in self.bound:
                self._bind_one(child)

    def _bind_one(self, path: Path) -> None:
        self.bound.add(path)
        self.mounts.append(Mount("bind", str(path), str(path), read_only=path not in self.writable))


def _is_private(path: Path, *, needs_reading: bool) -> bool:
    """Whether a stranger cannot pass (or read) this folder. Owner and group never count: a stranger is neither."""
    mode = path.stat().st_mode
    if not stat.S_ISDIR(mode):
        return False
    needed = stat.S_IXOTH | (stat.S_IROTH if needs_reading else 0)
    return mode & needed != needed


# --- The members of the lab: sets of namespaces, each kept alive by its holder, joined by one bridge ---

BRIDGE = "br0"
START_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Member:
    """A member that was started: its name and its holder's process id on the host."""

    name: str
    pid: int

    def is_alive(self, folder: Path) -> bool:
        """Whether the holder still lives; a recycled process id is not mistaken for it."""
        return member_of_process(self.pid, folder) == self.name


def enter_argv(member: Member) -> list[str]:
    """The arguments that run the command after them inside a member, as root."""
    inside = ["nsenter", f"--target={member.pid}", "--net", "--mount", "--uts", "--ipc"]
    # The login member has no PID namespace: without a fork in between, signals and exit codes pass untouched.
    return [*inside, "--"] if member.name == LOGIN else [*inside, "--pid", "--"]


def unshare_argv(name: str, controller: Member | None) -> list[str]:
    """The arguments that run the command after them in fresh namespaces for the member ``name``."""
    fresh = ["unshare", "--mount", "--uts", "--ipc", "--propagation=private"]
    if name == LOGIN:
        if controller is None:
            raise LabError("the login member needs the controller's network")
        return ["nsenter", f"--net=/proc/{controller.pid}/ns/net", "--", *fresh, "--"]
    return [*fresh, "--net", "--pid", "--fork", "--kill-child=KILL", "--"]


def mounts_of(name: str, paths: LabPaths, exposed: Sequence[Mount], root: Path | None = None) -> list[Mount]:
    """Every mount of a member; the mark comes first so that a crash right after it still finds the member.

    Args:
        root: file tree of another release of Slurm, for the member to live in.
    """
    mark = mark_source(paths.folder, name)
    first = [Mount("tmpfs", mark, str(paths.mark))] if root is None else root_mounts(root, mark)
    memory = Mount("tmpfs", "slurmft-lab-shm", str(PRIVATE_MEMORY), mode="1777")
    files = [Mount("bind", str(paths.hosts), "/etc/hosts", read_only=True)]
    # Without a name server nothing waits for DNS; with the host's address it might, inside our own network.
    if root is not None or Path("/etc/resolv.conf").exists():
        files.append(Mount("bind", str(paths.resolv_conf), "/etc/resolv.conf", read_only=True))
    # Commands find the lab also where SLURM_CONF was scrubbed from the environment.
    if root is not None or Path("/etc/slurm").is_dir():
        files.append(Mount("bind", str(paths.etc), "/etc/slurm", read_only=True))
    return [*first, memory, *files, *exposed]


class Starting:
    """A holder that is being started; several can start at once, then each is waited for."""

    def __init__(
        self, name: str, paths: LabPaths, exposed: Sequence[Mount], controller: Member | None = None,
        *, root: Path | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.log = paths.log / f"holder.{name}.log"
        read, write = os.pipe()
        plan = {
            "hostname": name,
            "mounts": [asdict(mount) for mount in mounts_of(name, paths, exposed, root)],
            "new_proc": name != LOGIN or root is not None,
            "root": "" if root is None else str(paths.mark),
            "report_to": write,
        }
        interpreter = [str(Path(sys.executable).resolve()), "-I", "-S", str(Path(holder.__file__).resolve())]
        # setsid --fork: the holder is not a child of the caller, which therefore need not wait for it.
        argv = ["setsid", "--fork", *unshare_argv(name, controller), *interpreter, name]
        try:
            self._answer = os.fdopen(read)
            with self.log.open("ab") as log:
                subprocess.run(
                    argv,
                    input=json.dumps(plan).encode(),
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=CLEAN_ENVIRONMENT,
                    pass_fds=[write],
                    check=False,
                    umask=UMASK,
                )
        except BaseException:
            self.forget()
            raise
        finally:
            os.close(write)

    def forget(self) -> None:
        """Stop listening: a holder that has not reported yet ends itself instead of staying behind unknown."""
        self._answer.close()

    def wait(self) -> Member:
        """The member, once its mounts and name are in place.

        Raises:
            LabError: the holder ended before it was ready; quotes its log.
        """
        # One line, not until the end of file: the process that waits for the holder keeps the pipe open too.
        with self._answer:
            ready, _, _ = select.select([self._answer], [], [], START_WITHIN_S)
            answer = self._answer.readline().strip() if ready else ""
        if not answer.isdigit():
            said = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise LabError(f"member {self.name} did not start: {' '.join(said) or 'no reason given'}")
        return Member(self.name, int(answer))


def _in_network(member: Member, lines: Sequence[str], doing: str) -> None:
    argv = ["nsenter", f"--net=/proc/{member.pid}/ns/net", "--", "ip", "-batch", "-"]
    run(argv, stdin="\n".join(lines) + "\n", doing=doing)


def build_bridge(controller: Member) -> None:
    """Give the controller its address on a bridge that leads nowhere else."""
    lines = [
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {CONTROLLER_ADDRESS}/{NETWORK_BITS} dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ]
    _in_network(controller, lines, f"building the network of {CONTROLLER}")


def connect(controller: Member, nodes: Sequence[Member], settings: LabSettings) -> None:
    """Join nodes to the bridge: ``eth0`` inside, a link with the node's name at the controller."""
    lines = []
    for node in nodes:
        lines += [
            f"link add {node.name} type veth peer name eth0 netns {node.pid}",
            f"link set {node.name} master {BRIDGE}",
            f"link set {node.name} up",
        ]
    _in_network(controller, lines, "connecting the nodes")
    for node in nodes:
        inside = [
            "link set lo up",
            f"addr add {settings.address(node.name)}/{NETWORK_BITS} dev eth0",
            "link set eth0 up",
        ]
        _in_network(node, inside, f"building the network of {node.name}")


def set_link(controller: Member, node: str, state: str) -> None:
    """Plug a node's cable in (``up``) or out (``down``); its processes go on."""
    _in_network(controller, [f"link set {node} {state}"], f"setting the link of {node} {state}")


def connected(controller: Member) -> set[str]:
    """Nodes whose cable is plugged in."""
    argv = ["nsenter", f"--net=/proc/{controller.pid}/ns/net", "--", "ip", "-brief", "link", "show", "master", BRIDGE]
    rows = [line.split() for line in run(argv, doing="looking at the links").splitlines()]
    return {row[0].partition("@")[0] for row in rows if len(row) > 1 and row[1] == "UP"}


def remove_link(controller: Member, node: str) -> None:
    """Take away what is left of a dead node's cable; the kernel may have done it already."""
    argv = ["nsenter", f"--net=/proc/{controller.pid}/ns/net", "--", "ip", "link", "del", node]
    subprocess.run(argv, capture_output=True, timeout=10, check=False)


# --- The accounts that run commands in the lab, and their environment ---
# The caller's environment is not passed on: like a login, it starts clean, so that no secret of root's shell ends up in
# a job (sbatch exports the submitter's environment) and no root-only folder is searched.

USER = "slurmft-lab"
SECOND_USER = "slurmft-lab-2"
KEPT = ("LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "COLUMNS", "LINES", "NO_COLOR", "CI")
"""Variables taken over from the caller's environment: those of the terminal only."""


@dataclass(frozen=True, slots=True)
class Account:
    """The ordinary user that jobs run as, on the host as in the lab."""

    name: str
    uid: int
    gid: int


def ensure_account(home: Path, name: str = USER) -> Account:
    """A user of the lab, created when missing and shared by all labs; its home exists afterwards and belongs to it.

    Raises:
        LabError: the user cannot be created, or that name belongs to root.
    """
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        words = ["--system", "--user-group", "--no-create-home", "--home-dir", str(home), "--shell", "/bin/bash"]
        run(["useradd", *words, name], doing=f"creating the user {name}")
        entry = pwd.getpwnam(name)
    if entry.pw_uid == 0:
        raise LabError(f"the user {name} has uid 0; jobs of the lab never run as root")
    make_folder(home)
    os.chown(home, entry.pw_uid, entry.pw_gid)
    return Account(name, entry.pw_uid, entry.pw_gid)


def environment_of(account: Account | None, paths: LabPaths, caller: Mapping[str, str]) -> dict[str, str]:
    """A login's environment for the account (None: root), with this interpreter first in PATH."""
    kept = {name: caller[name] for name in KEPT if name in caller}
    name, home = (account.name, str(paths.home)) if account else ("root", "/root")
    return kept | {
        "HOME": home,
        "USER": name,
        "LOGNAME": name,
        "SHELL": "/bin/bash",
        "PATH": f"{Path(sys.prefix) / 'bin'}:{SEARCH_PATH}",
        "SLURM_CONF": str(paths.slurm_conf),
    }


def command_argv(member: Member, account: Account | None, folder: Path, argv: Sequence[str]) -> list[str]:
    """The whole command line that runs ``argv`` inside a member as an account (None: root) in ``folder``."""
    words = enter_argv(member)
    become = [f"--reuid={account.uid}", f"--regid={account.gid}", "--init-groups"] if account else []
    if member.name != LOGIN:
        # nsenter had to fork and passes no signal on: at least the command must not outlive it
        become.append("--pdeathsig=TERM")
    if become:
        words += ["setpriv", *become, "--"]
    return [*words, "env", f"--chdir={folder}", "--", *argv]


def can_enter(member: Member, account: Account | None, folder: Path) -> bool:
    """Whether the account may work in ``folder`` as the member sees it; the kernel judges, not us."""
    argv = command_argv(member, account, Path("/"), ["test", "-x", str(folder), "-a", "-d", str(folder)])
    try:
        run(argv, doing=f"entering {folder}")
    except LabError:
        return False
    return True


def verify_exposure(member: Member, account: Account, paths: Sequence[Path]) -> None:
    """Prove that the account can run this Python and read what was exposed.

    Raises:
        LabError: it cannot; names what is unreadable.
    """
    check = "import os, sys; sys.stdout.writelines(p + '\\n' for p in sys.argv[1:] if not os.access(p, os.R_OK))"
    argv = command_argv(member, account, Path("/"), [sys.executable, "-I", "-S", "-c", check, *map(str, paths)])
    try:
        unreadable = run(argv, doing=f"running {sys.executable} as {account.name}", timeout_s=20).splitlines()
    except LabError as error:
        raise LabError(error.what, hint=f"chmod -R go+rX {sys.prefix} {sys.base_prefix}") from error
    if unreadable:
        raise LabError(
            f"the lab's user {account.name} cannot read {' '.join(unreadable)}",
            hint=f"chmod -R go+rX {' '.join(str(Path(path).parent) for path in unreadable)}",
        )


# --- Starting and ending the daemons inside the lab's members ---


def daemon_environment(paths: LabPaths) -> dict[str, str]:
    """The environment of every daemon; nothing of the caller's."""
    return {
        **CLEAN_ENVIRONMENT,
        "SLURM_CONF": str(paths.slurm_conf),
        # MariaDB's client library: where slurmdbd's `localhost` is
        "MYSQL_UNIX_PORT": str(paths.database_socket),
    }


def run_inside(member: Member, paths: LabPaths, argv: Sequence[str], *, doing: str, timeout_s: float = 30) -> str:
    """Run one command of the machinery inside a member, as root; see ``processes.run``."""
    return run([*enter_argv(member), *argv], doing=doing, timeout_s=timeout_s, environment=daemon_environment(paths))


def start_munged(controller: Member, paths: LabPaths) -> None:
    """Start the lab's own munged with a fresh key; its socket serves every member through the filesystem."""
    make_folder(paths.munge)
    key = paths.munge / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(128))
    for path in (paths.munge, key):
        shutil.chown(path, "munge", "munge")
    argv = [
        "setpriv",
        "--reuid=munge",
        "--regid=munge",
        "--clear-groups",
        "--",
        "munged",
        f"--socket={paths.munge_socket}",
        f"--key-file={key}",
        f"--pid-file={paths.munge}/munged.pid",
        f"--seed-file={paths.munge}/munged.seed",
        f"--log-file={paths.munge}/munged.log",
    ]
    run_inside(controller, paths, argv, doing="starting munged")


def start_slurmctld(controller: Member, paths: LabPaths) -> None:
    """Start slurmctld and return when it answers.

    Raises:
        LabError: it ended or stayed silent; quotes its log.
    """
    with log_on_failure(paths.log / "slurmctld.log"):
        argv = ["slurmctld", "-f", str(paths.slurm_conf)]
        if (paths.state / "clustername").exists() and not (paths.state / "assoc_usage").exists():
            argv.append("-i")  # first written after five minutes; without it, 26.05 does not start again after a crash
        run_inside(controller, paths, argv, doing="starting slurmctld")
        wait_until(lambda: answers(controller, paths), doing="waiting for slurmctld", within_s=20)


def answers(controller: Member, paths: LabPaths) -> bool:
    """Whether slurmctld answers a ping right now."""
    try:
        said = run_inside(controller, paths, ["scontrol", "ping"], doing="scontrol ping", timeout_s=10)
    except LabError:
        return False
    return said.rstrip().endswith("is UP")


def start_slurmds(nodes: Sequence[Member], paths: LabPaths) -> None:
    """Start slurmd on every node given, all at once."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(lambda node: _start_slurmd(node, paths), nodes))


def _start_slurmd(node: Member, paths: LabPaths) -> None:
    with log_on_failure(paths.log / f"slurmd.{node.name}.log"):
        argv = ["slurmd", "-N", node.name, "-f", str(paths.slurm_conf)]
        run_inside(node, paths, argv, doing=f"starting slurmd on {node.name}")


def processes_named(folder: Path, member: str, program: str) -> list[int]:
    """Host process ids of a program inside a member."""
    return [pid for pid, owner in lab_processes(folder).items() if owner == member and _name_of(pid) == program]


def programs(folder: Path) -> set[tuple[str, str]]:
    """Every (member, program) that runs in the lab, started in any way."""
    return {(member, _name_of(pid)) for pid, member in lab_processes(folder).items()}


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def end_program(folder: Path, member: str, program: str, number: signal.Signals, *, within_s: float = 20) -> None:
    """Signal every process of a program inside a member and return when it is gone.

    Raises:
        LabError: it did not end in time.
    """
    for pid in processes_named(folder, member, program):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    wait_until(
        lambda: not processes_named(folder, member, program),
        doing=f"waiting for {program} on {member} to end",
        within_s=within_s,
    )


@contextlib.contextmanager
def log_on_failure(log: Path, lines: int = 5) -> Iterator[None]:
    """Add the end of a daemon's own log to the error that its start raised."""
    try:
        yield
    except LabError as error:
        try:
            tail = log.read_text(errors="replace").splitlines()[-lines:]
        except OSError:
            tail = ["(no log)"]
        raise LabError(error.what, hint=f"{log} ends with:\n    " + "\n    ".join(tail)) from error


def node_states(controller: Member, paths: LabPaths) -> dict[str, str]:
    """Each node's state as ``sinfo`` prints it (``IDLE``, ``DOWN*``); empty when slurmctld does not answer."""
    argv = ["sinfo", "-h", "-N", "-p", "low", "-o", "%N|%T"]
    try:
        said = run_inside(controller, paths, argv, doing="sinfo", timeout_s=10)
    except LabError:
        return {}
    rows = [line.split("|") for line in said.splitlines() if "|" in line]
    return {name: state.upper() for name, state in rows}
