"""What a lab cluster is made of: packages and releases of Slurm, settings that are refused at once when they make no
sense, and the configuration files that follow from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.errors import LabError, LabUnavailable, UsageError

# --- Running commands, and finding and ending the lab's own processes ---
# A process belongs to the lab when its mount namespace carries the lab's mark: a tmpfs whose source names the lab's
# folder and the member. The kernel keeps it, so it survives any crash of ours, and nothing else can be mistaken for it.

MARK = "slurmft-lab"
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Daemons live in sbin folders, which an ordinary PATH lacks."""

UMASK = 0o022
"""Of every daemon: the caller's must not decide whether jobs can read what Slurm writes for them."""

log = logging.getLogger(__name__)

CLEAN_ENVIRONMENT = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8"}


def mark_source(folder: Path, member: str) -> str:
    """The tmpfs source that marks ``member`` of the lab in ``folder``."""
    return f"{MARK}:{folder}:{member}"


def member_of(mountinfo: str, folder: Path) -> str | None:
    """Which member of the lab in ``folder`` a ``/proc/PID/mountinfo`` text belongs to, or None."""
    prefix = mark_source(folder, "")
    for line in mountinfo.splitlines():
        fields = line.partition(" - ")[2].split()
        if len(fields) >= 2 and fields[0] == "tmpfs" and fields[1].startswith(prefix):
            return fields[1].removeprefix(prefix)
    return None


def member_of_process(pid: int, folder: Path) -> str | None:
    """The member a process lives in; None for strangers, zombies and processes that are gone."""
    try:
        return member_of(Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8", errors="replace"), folder)
    except OSError:
        return None


def lab_processes(folder: Path) -> dict[int, str]:
    """Every living process of the lab in ``folder`` with its member, however it was started."""
    known: dict[str, str | None] = {}
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            namespace = str((entry / "ns/mnt").readlink())
        except OSError:
            continue
        if known.get(namespace) is None and (namespace not in known):
            known[namespace] = member_of_process(int(entry.name), folder)
        if (member := known[namespace]) is not None:
            found[int(entry.name)] = member
    return found


def kill_processes(folder: Path, *, member: str | None = None, within_s: float = 15) -> None:
    """SIGKILL every process of the lab, or of one member, and return when none is left.

    Raises:
        LabError: some process outlived the deadline (it hangs in the kernel).
    """
    deadline = time.monotonic() + within_s
    while pids := [pid for pid, owner in lab_processes(folder).items() if member in (None, owner)]:
        if time.monotonic() > deadline:
            raise LabError(f"processes {pids} of the lab survive SIGKILL", hint="look at /proc/PID/stack and dmesg")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def run(
    argv: Sequence[str],
    *,
    doing: str,
    timeout_s: float = 60,
    stdin: str = "",
    environment: Mapping[str, str] = CLEAN_ENVIRONMENT,
) -> str:
    """Run a command of the lab's own machinery and return its stdout. The caller's environment is not passed on.

    Raises:
        LabError: it failed, took too long or does not exist; says what was being done and what it printed.
    """
    try:
        result = subprocess.run(
            list(argv),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=environment,
            umask=UMASK,
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{doing}: no answer within {timeout_s:g} s") from error
    except OSError as error:
        raise LabError(f"{doing}: {error}") from error
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip()
        raise LabError(f"{doing}: {argv[0]} ended with {result.returncode}: {said}")
    return result.stdout


def make_folder(path: Path, mode: int = 0o755) -> None:
    """A folder with exactly this mode, independent of the caller's umask; one that exists gets the mode too."""
    path.mkdir(exist_ok=True)
    path.chmod(mode)


def wait_until(condition: Callable[[], bool], *, doing: str, within_s: float, every_s: float = 0.05) -> None:
    """Poll until ``condition`` holds.

    Raises:
        LabError: it still did not hold after ``within_s`` seconds.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"{doing}: not within {within_s:g} s")
        time.sleep(every_s)


@contextlib.contextmanager
def locked(path: Path, *, within_s: float) -> Iterator[None]:
    """Hold the lock, which vanishes with the process that holds it, in any case.

    Raises:
        LabError: another command still holds it after so many seconds.
    """
    deadline, told_s = time.monotonic() + within_s, time.monotonic() + 2.0
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(f"another lab command has held {path} for {within_s:g} s") from None
                if time.monotonic() > told_s:
                    log.info("another lab command is at work: waiting for %s", path)
                    told_s = deadline
                time.sleep(0.05)
        yield


# --- The Debian packages a lab needs: which are missing, and installing them as root ---

BASE = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "useradd": "passwd",
}
"""One program of each package: its presence stands for the package's."""

ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}


def missing_packages(*, accounting: bool) -> tuple[str, ...]:
    """Packages whose programs are not installed, without duplicates."""
    programs = BASE | (ACCOUNTING if accounting else {})
    missing = [package for program, package in programs.items() if shutil.which(program, path=SEARCH_PATH) is None]
    return tuple(dict.fromkeys(missing))


def require_root() -> None:
    """Every command that touches a lab needs root.

    Raises:
        LabUnavailable: this is an ordinary user.
    """
    if os.geteuid() != 0:
        raise LabUnavailable("the Slurm lab needs root (network and mount namespaces)", hint="try sudo")


def why_unavailable(*, accounting: bool = False) -> str | None:
    """Why no lab can be built here right now, or None. Installs nothing, changes nothing."""
    if os.geteuid() != 0:
        return "the Slurm lab needs root (network and mount namespaces)"
    if missing := missing_packages(accounting=accounting):
        return f"Slurm's packages are missing: {' '.join(missing)} (`slurmft lab up` installs them on Debian)"
    try:
        run(["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"], doing="making namespaces")
    except LabError as error:
        return f"this machine does not allow namespaces: {error.what}"
    return None


def ensure_packages(*, accounting: bool) -> None:
    """Install what is missing with apt; returns at once when nothing is.

    Raises:
        LabUnavailable: no root, no apt, or the installation failed.
    """
    missing = missing_packages(accounting=accounting)
    if missing and os.geteuid() == 0:
        install(missing)
    if (reason := why_unavailable(accounting=accounting)) is not None:
        raise LabUnavailable(reason, hint="needs root on Debian 12 or newer; a container must be allowed namespaces")


def install(packages: tuple[str, ...]) -> None:
    """Install packages with apt, without what they recommend.

    Raises:
        LabUnavailable: there is no apt, or it failed.
    """
    if shutil.which("apt-get", path=SEARCH_PATH) is None:
        raise LabUnavailable(f"missing: {' '.join(packages)}, and there is no apt-get to install them")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": SEARCH_PATH}
    # Another apt run may hold the lock; dpkg's triggers of services that cannot start here are harmless.
    apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120"]
    try:
        run([*apt, "update"], doing="apt-get update", timeout_s=300, environment=environment)
        run(
            [*apt, "install", "--no-install-recommends", *packages],
            doing=f"installing {' '.join(packages)}",
            timeout_s=900,
            environment=environment,
        )
    except LabError as error:
        raise LabUnavailable(
            str(error), hint=f"as root: apt-get install --no-install-recommends {' '.join(packages)}"
        ) from error


# --- Other releases of Slurm than the one that is installed: file trees of the Debian releases that ship them ---
# A tree is made once with debootstrap, from the mirror that apt uses here, and kept for all labs of this machine.

RELEASES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
"""Slurm's release, and the name of the Debian release that has it."""

FOLDER = Path("/var/lib/slurmft-lab-releases")
PACKAGES = (
    "munge", "slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "mariadb-server", "iproute2",
    "procps", "python3", "e2fsprogs",
)  # fmt: skip
"""``python3`` for the libraries that our own interpreter, which is brought in from the host, finds in every Debian."""

SCRIPTS = Path("/usr/share/debootstrap/scripts")
NEWER_SCRIPT = "sid"
"""Debian's development script, for a release that is newer than the installed debootstrap."""

LIMIT_S = 1800.0
LOCK_S = 1800.0


def release_of(version: str) -> str:
    """``24.11`` of ``24.11.5``; empty for no version, and for the one that this machine has installed.

    Raises:
        UsageError: no Debian release has it.
    """
    if not version:
        return ""
    match = re.fullmatch(r"(\d\d\.\d\d)(?:\.\d+)?", version)
    if match is None or match[1] not in RELEASES:
        raise _unknown(version)
    return "" if match[1] == installed() else match[1]


def _unknown(version: str) -> UsageError:
    known = ", ".join(RELEASES)
    return UsageError(f"there is no release {version!r} of Slurm to build a lab of", hint=f"Debian has {known}")


def installed() -> str:
    """The release of Slurm that this machine has installed; empty where it has none."""
    try:
        return _release_in(run(["slurmctld", "-V"], doing="asking slurmctld for its version"))
    except LabError:
        return ""


def ensure_release(release: str) -> Path | None:
    """The file tree of a release, made when it is missing; None for the machine's own.

    Raises:
        UsageError: there is no such release.
        LabUnavailable: no root, debootstrap cannot be installed, no mirror, or it has another release.
        LabError: another command has been making it for half an hour.
    """
    if not release:
        return None
    if release not in RELEASES:
        raise _unknown(release)
    tree = FOLDER / release
    if tree.is_dir():
        return tree
    require_root()
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    make_folder(FOLDER)
    with locked(FOLDER / f"{release}.lock", within_s=LOCK_S):
        if not tree.is_dir():
            _make(release, tree)
    return tree


def mirror() -> str:
    """The address that apt takes this machine's own Debian from.

    Raises:
        LabUnavailable: apt is missing, or names none.
    """
    mine = codename()
    words = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)", "Identifier: Packages"]
    try:
        rows = [line.split() for line in run(words, doing="asking apt for its mirror").splitlines()]
    except LabError as error:
        raise LabUnavailable(error.what, hint="another release of Slurm comes from a mirror of Debian") from error
    found = [row[2] for row in rows if len(row) == 3 and row[:2] == [mine, "main"]]
    if not found:
        raise LabUnavailable(
            f"apt has no source for Debian {mine}, from which another release of Slurm could come",
            hint="see /etc/apt/sources.list and /etc/apt/sources.list.d",
        )
    return found[0]


def _make(release: str, tree: Path) -> None:
    if shutil.which("debootstrap", path=SEARCH_PATH) is None:
        log.info("installing debootstrap, which fetches Slurm %s", release)
        install(("debootstrap",))
    suite, source = RELEASES[release], mirror()
    began = time.monotonic()
    log.info("fetching Slurm %s with Debian's %s from %s into %s: about a minute, once", release, suite, source, tree)
    making = tree.with_name(f".making-{release}")
    shutil.rmtree(making, ignore_errors=True)
    script = SCRIPTS / (suite if (SCRIPTS / suite).exists() else NEWER_SCRIPT)
    # In namespaces of its own: when it is interrupted, nothing of it goes on, and no mount of it disturbs the next try.
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, str(making), source]
    try:
        run([*alone, *argv, str(script)], doing=f"fetching Slurm {release}", timeout_s=LIMIT_S,
            environment={**CLEAN_ENVIRONMENT, "DEBIAN_FRONTEND": "noninteractive"})  # fmt: skip
        found = _release_in(run(["chroot", str(making), "slurmctld", "-V"], doing=f"trying Slurm {release}"))
        if found != release:
            raise LabError(f"Debian's {suite} has Slurm {found} now, not {release}")
        make_folder(making)
        making.rename(tree)
    except LabError as error:
        hint = f"{making}/debootstrap/debootstrap.log says more; does {source} answer?"
        raise LabUnavailable(error.what[-2000:], hint=hint) from error
    log.info("Slurm %s is there after %.0f s", release, time.monotonic() - began)


def _release_in(text: str) -> str:
    match = re.search(r"\b(\d\d\.\d\d)\.\d+", text)
    return match[1] if match else ""


def codename() -> str:
    """This Debian's name; empty where it has none."""
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r'^VERSION_CODENAME="?(\w+)', text, re.MULTILINE)
    return match[1] if match else ""


# --- The settings of a lab cluster: one frozen value, refused at once when it makes no sense ---

FOLDER_VARIABLE = "SLURMFT_LAB_FOLDER"
MAX_NODES = 64

_NODE = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,14}", re.ASCII)
_TAKEN = frozenset({"ctl", "login", "localhost", "lo", "br0"})


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the lab keeps its files: ``$SLURMFT_LAB_FOLDER`` or ``/var/lib/slurmft-lab``."""
    return Path(environment.get(FOLDER_VARIABLE) or "/var/lib/slurmft-lab")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabSettings:
    """The cluster to build. Two labs with different folders run side by side without meeting.

    Raises:
        UsageError: a value makes no sense; names all of them at once.
    """

    folder: Path = dataclasses.field(default_factory=default_folder)
    """Root-owned folder for configuration, logs, Slurm's state and the lab user's home."""

    nodes: int = 4
    """Compute nodes, named n1, n2, ... unless they have ``names``."""

    names: tuple[str, ...] = ()
    """Names of the nodes, as many as there are ``nodes``; empty: n1, n2, ..."""

    cpus: int = 8
    """CPUs every node claims to have; may exceed the machine's, they share its real cores."""

    accounting: bool = False
    """Run MariaDB and slurmdbd too, so that sacct answers."""

    kill_wait_s: int = 5
    """Slurm's KillWait: seconds between TERM and KILL."""

    slurmd_timeout_s: int = 10
    """Slurm's SlurmdTimeout: seconds until a silent node is DOWN."""

    grace_s: int = 20
    """GraceTime of the partitions ``low`` and ``cancel``, in seconds."""

    gpus: int = 0
    """GPUs that every node claims to have (``gres/gpu``): links to /dev/null."""

    release: str = ""
    """Slurm's release, such as ``24.11``, out of a newer Debian; empty: the one that this machine has installed."""

    lines: tuple[str, ...] = ()
    """More lines of slurm.conf; of a key that is set twice, Slurm takes the last."""

    files: tuple[Path, ...] = ()
    """Copied into the folder of slurm.conf when the lab is built, under their own names: ``job_submit.lua``."""

    expose: tuple[Path, ...] = ()
    """More paths the lab's user must be able to read, besides this interpreter and this package."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value} is outside {low}..{high}"
            for name, value, low, high in (
                ("nodes", self.nodes, 1, MAX_NODES),
                ("cpus", self.cpus, 1, 1024),
                ("kill_wait_s", self.kill_wait_s, 1, 600),
                ("slurmd_timeout_s", self.slurmd_timeout_s, 4, 3600),
                ("grace_s", self.grace_s, 0, 3600),
                ("gpus", self.gpus, 0, 64),
            )
            if not low <= value <= high
        ]
        # The path goes unquoted into slurm.conf and into mount names.
        if not re.fullmatch(r"(/[A-Za-z0-9._+-]+){2,}", str(self.folder)) or ".." in self.folder.parts:
            problems.append(f"folder={str(self.folder)!r} must be an absolute path of letters, digits, . _ + -")
        # munged refuses a longer path: a socket's address has 108 bytes
        if len(str(self.folder)) > 70:
            problems.append(f"folder={str(self.folder)!r} is longer than 70 characters")
        problems += self._of_names()
        problems += [f"lines={line!r} is not one line" for line in self.lines if not line.isprintable()]
        problems += [f"files={str(path)!r} is not an absolute path" for path in self.files if not path.is_absolute()]
        if problems:
            raise UsageError("the lab's settings cannot be used: " + "; ".join(problems))

    def _of_names(self) -> list[str]:
        # a name is also that of the node's link, of which Linux takes 15 characters
        bad = [name for name in self.names if not _NODE.fullmatch(name) or name in _TAKEN]
        problems = [f"names={name!r} is not the name of a node, of at most 15 letters, digits and -" for name in bad]
        if self.names and not len(self.names) == len(set(self.names)) == self.nodes:
            problems.append(f"names={','.join(self.names)} are not {self.nodes} different ones")
        return problems

    @property
    def node_names(self) -> tuple[str, ...]:
        """``("n1", "n2", ...)``, or the names that were given."""
        return self.names or tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def address(self, node: str) -> str:
        """The address of a node of this lab: 10.213.0.11 is the first one's."""
        return f"10.213.0.{11 + self.node_names.index(node)}"

    def as_json(self) -> dict[str, Any]:
        """Plain values, for the state file and for comparing two labs."""
        plain = dataclasses.asdict(self)
        paths = {name: [str(path) for path in plain[name]] for name in ("files", "expose")}
        return plain | paths | {"folder": str(self.folder)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> LabSettings:
        """The inverse of :meth:`as_json`; unknown keys are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in plain.items() if name in known}
        values["folder"] = Path(values["folder"])
        values |= {name: tuple(Path(path) for path in values.get(name, ())) for name in ("files", "expose")}
        values |= {name: tuple(values.get(name, ())) for name in ("names", "lines")}
        return cls(**values)


# --- slurm conf ---
# Slurm's configuration files as text: settings in, text out. Touches nothing.
#
# The lines are the ones measured to work for slurmd in namespaces on Debian's 22.05; why each exception is there is
# said beside it.

CLUSTER = "slurmftlab"
CONTROLLER, LOGIN = "ctl", "login"
CONTROLLER_ADDRESS = "10.213.0.1"
NETWORK_BITS = 24
DATABASE_USER = "slurm"
DATABASE = "slurm_acct"


class LabPaths:
    """Every path inside the lab's folder; nothing else spells them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etc = folder / "etc"
        """Slurm's configuration folder, world-readable."""

        self.slurm_conf = self.etc / "slurm.conf"
        """What SLURM_CONF points to."""

        self.hosts = self.etc / "hosts"
        """Seen as /etc/hosts by every member."""

        self.resolv_conf = self.etc / "resolv.conf"
        """Empty; seen as /etc/resolv.conf by every member."""

        self.log = folder / "log"
        """One log per daemon and holder."""

        self.munge = folder / "munge"
        """munged's key, socket and seed; owned by the munge user."""

        self.munge_socket = self.munge / "munge.socket"
        """The lab's own munged; the host's is never used."""

        self.database = folder / "db"
        """MariaDB's data and socket; owned by the mysql user."""

        self.database_socket = self.database / "mysqld.sock"
        """Where slurmdbd finds MariaDB."""

        self.state = folder / "state"
        """slurmctld's StateSaveLocation."""

        self.gpus = folder / "gpus"
        """What gres.conf names as the devices of every node."""

        self.spool = folder / "spool"
        """slurmd's spool folders, one per node."""

        self.run = folder / "run"
        """Process id files of the daemons."""

        self.home = folder / "home"
        """The lab user's home, the same path on every member; survives `lab up` and `lab down`."""

        self.mark = folder / "mark"
        """Mount point of the mark that identifies the lab's processes."""

        self.state_file = folder / "lab.json"
        """The built lab: settings and holders."""

        self.lock = folder / "slurmft-lab.lock"
        """Held by every command that changes the lab; its presence says that the folder is a lab's."""


def hosts_text(settings: LabSettings) -> str:
    """/etc/hosts of every member: itself, the controller and all nodes."""
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{CONTROLLER_ADDRESS} {CONTROLLER} {LOGIN}"]
    lines += [f"{settings.address(name)} {name}" for name in settings.node_names]
    return "\n".join(lines) + "\n"


def slurm_conf_text(settings: LabSettings) -> str:
    """slurm.conf for these settings; the same on every member."""
    parts = (_cluster(settings), _scheduling(settings), _accounting(settings), _nodes(settings), settings.lines)
    return "\n".join([*(line for part in parts for line in part), ""])


def _cluster(settings: LabSettings) -> list[str]:
    paths = LabPaths(settings.folder)
    return [
        f"ClusterName={CLUSTER}",
        f"SlurmctldHost={CONTROLLER}({CONTROLLER_ADDRESS})",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={paths.munge_socket}",
        "CryptoType=crypto/munge",
        f"StateSaveLocation={paths.state}",
        f"SlurmdSpoolDir={paths.spool}/%n",
        f"SlurmctldPidFile={paths.run}/slurmctld.pid",
        f"SlurmdPidFile={paths.run}/slurmd.%n.pid",
        f"SlurmctldLogFile={paths.log}/slurmctld.log",
        f"SlurmdLogFile={paths.log}/slurmd.%n.log",
        "MpiDefault=none",
        # without a mail program slurmctld complains at each start
        "MailProg=/bin/true",
        # cgroup plugins need a writable cgroup tree, which containers rarely have
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        # more CPUs per node than the machine has, and the node is not drained for it
        "SlurmdParameters=config_overrides",
        # a node that was DOWN serves again as soon as its slurmd registers
        "ReturnToService=2",
        f"SlurmdTimeout={settings.slurmd_timeout_s}",
        f"KillWait={settings.kill_wait_s}",
        "MessageTimeout=5",
        "TCPTimeout=2",
    ]


def _scheduling(settings: LabSettings) -> list[str]:
    return [
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
    ]


def _accounting(settings: LabSettings) -> list[str]:
    if not settings.accounting:
        return ["AccountingStorageType=accounting_storage/none", "JobAcctGatherType=jobacct_gather/none"]
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={CONTROLLER}",
        # for connections to slurmdbd this, not AuthInfo, names munged's socket
        f"AccountingStoragePass={LabPaths(settings.folder).munge_socket}",
        "JobAcctGatherType=jobacct_gather/linux",
    ]


def _nodes(settings: LabSettings) -> list[str]:
    gpus = f" Gres=gpu:{settings.gpus}" if settings.gpus else ""
    # No memory is ever allocated (CR_CPU); a generous figure keeps --mem requests valid.
    nodes = [
        f"NodeName={name} NodeAddr={settings.address(name)} CPUs={settings.cpus} RealMemory=64000{gpus} State=UNKNOWN"
        for name in settings.node_names
    ]
    every = f"Nodes={','.join(settings.node_names)} MaxTime=INFINITE State=UP"
    grace = settings.grace_s
    return [
        *(["GresTypes=gpu"] if settings.gpus else []),
        *nodes,
        f"PartitionName=low Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} {every}",
        f"PartitionName=nograce PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 {every}",
        f"PartitionName=cancel PriorityTier=1 PreemptMode=CANCEL GraceTime={grace} {every}",
        f"PartitionName=high PriorityTier=10 PreemptMode=OFF {every}",
    ]


def gres_conf_text(settings: LabSettings) -> str:
    """gres.conf: each GPU of a node is a device, of a kind."""
    return f"Name=gpu File={LabPaths(settings.folder).gpus}/[0-{settings.gpus - 1}]\n"


def slurmdbd_conf_text(settings: LabSettings, password: str) -> str:
    """slurmdbd.conf; keep it at mode 600, slurmdbd refuses anything looser."""
    paths = LabPaths(settings.folder)
    return "\n".join(
        [
            f"DbdHost={CONTROLLER}",
            f"DbdAddr={CONTROLLER_ADDRESS}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={paths.munge_socket}",
            f"LogFile={paths.log}/slurmdbd.log",
            f"PidFile={paths.run}/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            f"StorageUser={DATABASE_USER}",
            f"StoragePass={password}",
            f"StorageLoc={DATABASE}",
            "",
        ]
    )
