"""The lab as one object: bring it up, run commands in it, break it, take it down."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slurmft
from slurmft.errors import LabError, StorageError, UsageError
from slurmft.lab import members
from slurmft.lab import settings as lab_settings
from slurmft.lab.members import (
    PRIVATE_MEMORY,
    Account,
    Member,
    Mount,
    Starting,
    build_bridge,
    compile_sources,
    connect,
    connected,
    ensure_account,
    enter_argv,
    log_on_failure,
    needed_paths,
    paths_to_expose,
    remove_link,
    run_inside,
    set_link,
    verify_exposure,
)
from slurmft.lab.settings import (
    CONTROLLER,
    DATABASE,
    DATABASE_USER,
    LOGIN,
    LabPaths,
    LabSettings,
    default_folder,
    ensure_packages,
    ensure_release,
    kill_processes,
    lab_processes,
    locked,
    make_folder,
    member_of_process,
    require_root,
    run,
    slurmdbd_conf_text,
    wait_until,
    why_unavailable,
)
from slurmft.system.files import read_json, write_json

# --- Accounting for the lab: MariaDB and slurmdbd, both inside the controller's namespaces, reached by no network ---

DATABASE_ACCOUNT = "mysql"


def create_database(paths: LabPaths, inside: Member | None = None) -> None:
    """Make an empty database folder of the mysql user. Needs no namespace, so it may run before the network stands.

    Args:
        inside: the controller, where the database server is that of another release.
    """
    make_folder(paths.database)
    shutil.chown(paths.database, DATABASE_ACCOUNT, DATABASE_ACCOUNT)
    argv = [
        # its temporary tables have numbered names, which would clash between two labs in /tmp
        "env",
        f"TMPDIR={paths.database}",
        "mariadb-install-db",
        "--no-defaults",
        f"--user={DATABASE_ACCOUNT}",
        f"--datadir={paths.database}/data",
        "--auth-root-authentication-method=socket",
        "--skip-test-db",
    ]
    words = [] if inside is None else enter_argv(inside)
    run([*words, *argv], doing="creating the accounting database", timeout_s=120)


def start_accounting(controller: Member, paths: LabPaths, settings: LabSettings) -> None:
    """Start MariaDB, give slurmdbd its database, start slurmdbd; return when slurmdbd answers.

    Raises:
        LabError: one of them did not start; quotes its log.
    """
    password = secrets.token_hex(16)
    _write_private(paths.etc / "slurmdbd.conf", slurmdbd_conf_text(settings, password))
    with log_on_failure(paths.log / "mariadbd.log"):
        _start_database(controller, paths, password)
    with log_on_failure(paths.log / "slurmdbd.log"):
        run_inside(controller, paths, ["slurmdbd"], doing="starting slurmdbd")
        wait_until(lambda: _accounting_answers(controller, paths), doing="waiting for slurmdbd", within_s=30)


def _start_database(controller: Member, paths: LabPaths, password: str) -> None:
    # The grant happens while the server starts, by the server itself: no root login, no password in an argv.
    grants = paths.database / "grants.sql"
    owner = f"'{DATABASE_USER}'@'localhost'"
    _write_private(
        grants,
        f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
        f"CREATE USER IF NOT EXISTS {owner} IDENTIFIED BY '{password}';\n"
        f"GRANT ALL ON {DATABASE}.* TO {owner};\n",
    )
    entry = pwd.getpwnam(DATABASE_ACCOUNT)
    os.chown(grants, entry.pw_uid, entry.pw_gid)
    log = paths.log / "mariadbd.log"
    log.touch(mode=0o640)
    os.chown(log, entry.pw_uid, entry.pw_gid)
    argv = [
        "setsid",
        "--fork",
        "mariadbd",
        "--no-defaults",
        f"--user={DATABASE_ACCOUNT}",
        f"--datadir={paths.database}/data",
        f"--socket={paths.database_socket}",
        f"--tmpdir={paths.database}",
        "--pid-file=mariadbd.pid",
        f"--log-error={log}",
        f"--init-file={grants}",
        "--skip-networking",
        "--innodb-log-file-size=64M",
        "--innodb-flush-log-at-trx-commit=0",
        # slurmdbd warns below these
        "--innodb-buffer-pool-size=128M",
        "--innodb-lock-wait-timeout=900",
    ]
    run_inside(controller, paths, argv, doing="starting MariaDB")
    wait_until(paths.database_socket.exists, doing="waiting for MariaDB", within_s=30)


def _accounting_answers(controller: Member, paths: LabPaths) -> bool:
    try:
        run_inside(controller, paths, ["sacctmgr", "-n", "show", "cluster"], doing="asking slurmdbd", timeout_s=10)
    except LabError:
        return False
    return True


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


# --- The lab's state file, and the lock that lets one command at a time change a lab ---


EXCLUSIVE_S = 120.0


@dataclass(frozen=True, slots=True)
class Built:
    """A lab that was built: its settings, its user, and the holder of every member."""

    settings: LabSettings
    account: Account
    exposed: tuple[str, ...]
    """The expose mounts' targets; another interpreter or checkout needs another lab."""
    holders: Mapping[str, int]
    """Member name to the holder's process id on the host."""

    @property
    def paths(self) -> LabPaths:
        """Where its files are."""
        return LabPaths(self.settings.folder)

    @property
    def controller(self) -> Member:
        """Where slurmctld runs."""
        return self.member(CONTROLLER)

    @property
    def login(self) -> Member:
        """Where users' commands run: the controller's network, no PID namespace of its own."""
        return self.member(LOGIN)

    def member(self, name: str) -> Member:
        """A member by name.

        Raises:
            UsageError: there is no such member.
        """
        if name not in self.holders:
            raise UsageError(f"the lab has no member {name!r}", hint=f"it has {', '.join(self.holders)}")
        return Member(name, self.holders[name])

    def node(self, name: str) -> Member:
        """A compute node by name; the controller is not one.

        Raises:
            UsageError: there is no such node.
        """
        if name not in self.settings.node_names:
            raise UsageError(f"the lab has no node {name!r}", hint=f"it has {', '.join(self.settings.node_names)}")
        return self.member(name)

    def with_holder(self, member: Member) -> Built:
        """The same lab after one member was started again."""
        return dataclasses.replace(self, holders={**self.holders, member.name: member.pid})


def save(built: Built) -> None:
    """Write the state file; readable by everyone, so that ``status`` needs no root."""
    plain = {
        "settings": built.settings.as_json(),
        "account": dataclasses.asdict(built.account),
        "exposed": list(built.exposed),
        "holders": dict(built.holders),
    }
    write_json(built.paths.state_file, plain, mode=0o644)


def load(folder: Path) -> Built | None:
    """The lab in the state file, or None when there is none or it cannot be believed."""
    try:
        plain = read_json(LabPaths(folder).state_file)
        if plain is None:
            return None
        return Built(
            settings=LabSettings.from_json(plain["settings"]),
            account=Account(**plain["account"]),
            exposed=tuple(plain["exposed"]),
            holders={str(name): int(pid) for name, pid in plain["holders"].items()},
        )
    except (StorageError, UsageError, KeyError, TypeError, ValueError):
        return None  # a torn or foreign file says nothing; the processes themselves are found by their mark


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Be the only command that changes this lab; the lock vanishes with its process, in any case.

    Raises:
        LabError: another command still holds it after EXCLUSIVE_S, or the folder holds something else.
        LabUnavailable: no root.
    """
    require_root()
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not LabPaths(folder).lock.exists() and any(folder.iterdir()):
        # parts of it are about to be deleted; `--folder /home` must not delete a home
        raise LabError(f"{folder} is not a lab's folder, and not empty", hint="choose a new folder, or an empty one")
    make_folder(folder)
    with locked(LabPaths(folder).lock, within_s=EXCLUSIVE_S):
        yield


# --- building ---
# Building a lab and taking it away. Anything less than a healthy lab with the right settings is built anew.

logger = logging.getLogger(__name__)


def up(settings: LabSettings) -> Built:
    """A healthy lab with these settings: the one that stands, or a new one.

    Guarantees: on return every node is idle and the lab's user can run this Python. On failure nothing is left.

    Raises:
        LabUnavailable: no root, no namespaces, or packages that cannot be installed.
        LabError: a part did not start; quotes its log.
    """
    refuse_inside(settings.folder)
    ensure_packages(accounting=settings.accounting)
    root = ensure_release(settings.release)
    started = time.monotonic()
    compile_sources()
    with exclusive(settings.folder):
        needed = (*needed_paths(), *settings.expose)
        exposed = exposed_paths(settings)
        standing = load(settings.folder)
        same = standing and standing.settings == settings and standing.exposed == _targets(exposed)
        if standing and same and is_healthy(standing):
            verify_exposure(standing.login, standing.account, _proof(needed))
            return standing
        remove_all(settings.folder)
        try:
            built = _build(settings, exposed, needed, root)
        except BaseException:
            remove_processes(settings.folder)
            raise
        save(built)
    logger.info("lab of %d nodes up in %.1f s", settings.nodes, time.monotonic() - started)
    return built


def exposed_paths(settings: LabSettings) -> tuple[Mount, ...]:
    """What the lab's user needs of the host; in a root of its own nothing of the host is there by itself."""
    covered = (Path("/"),) if settings.release else (PRIVATE_MEMORY,)
    return paths_to_expose((*needed_paths(), *settings.expose), writable=(settings.folder,), covered=covered)


def down(folder: Path) -> None:
    """End the lab in this folder; no error when there is none. Its home and logs stay readable."""
    refuse_inside(folder)
    if not folder.exists():
        kill_processes(folder)  # the folder was deleted while the lab was up
        return
    with exclusive(folder):
        remove_processes(folder)
        for path in _rebuilt(LabPaths(folder)):
            _delete(path)


def purge(folder: Path) -> None:
    """End the lab and delete its folder, home and logs included. Its user stays: other labs share it."""
    down(folder)
    if folder.exists():
        with exclusive(folder):
            # its lock shows that it is a lab's: last, so that another purge ends one that was cut off
            for path in set(folder.iterdir()) - {LabPaths(folder).lock}:
                _delete(path)
            shutil.rmtree(folder)


def is_healthy(built: Built) -> bool:
    """Whether every member lives, every slurmd runs, slurmctld answers and no cable is out."""
    names = set(built.settings.node_names)
    wanted = {(CONTROLLER, "munged"), (CONTROLLER, "slurmctld"), *((name, "slurmd") for name in names)}
    if built.settings.accounting:
        wanted |= {(CONTROLLER, "slurmdbd"), (CONTROLLER, "mariadbd")}
    if not all(built.member(name).is_alive(built.settings.folder) for name in built.holders):
        return False
    if not wanted <= members.programs(built.settings.folder) or connected(built.controller) != names:
        return False
    states = members.node_states(built.controller, built.paths)
    return set(states) == names and not any(
        state.endswith("*") or state.startswith(("DOWN", "DRAIN", "FAIL")) for state in states.values()
    )


def refuse_inside(folder: Path) -> None:
    """Refuse commands that would end the lab that they run in.

    Raises:
        LabError: this process runs inside the lab.
    """
    if (member := member_of_process(os.getpid(), folder)) is not None:
        raise LabError(f"this command runs inside the lab, on {member}", hint="run it in a shell outside of the lab")


def remove_processes(folder: Path) -> None:
    """Kill every process of the lab; namespaces, mounts and links end with the last of them."""
    kill_processes(folder)
    LabPaths(folder).state_file.unlink(missing_ok=True)


def remove_all(folder: Path) -> None:
    """Processes and every file that is rebuilt, logs included; the home stays."""
    remove_processes(folder)
    paths = LabPaths(folder)
    for path in (*_rebuilt(paths), paths.log):
        _delete(path)


def _rebuilt(paths: LabPaths) -> Sequence[Path]:
    return (paths.etc, paths.gpus, paths.state, paths.spool, paths.run, paths.munge, paths.database, paths.mark)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _targets(exposed: Sequence[Mount]) -> tuple[str, ...]:
    return tuple(mount.target for mount in exposed)


def _build(settings: LabSettings, exposed: Sequence[Mount], needed: Sequence[Path], root: Path | None) -> Built:
    paths = LabPaths(settings.folder)
    _write_files(settings, paths)
    account = ensure_account(paths.home)
    with ThreadPoolExecutor(max_workers=2) as pool:
        # by the release's own program where there is one, which takes its controller
        early = settings.accounting and root is None
        database = pool.submit(create_database, paths) if early else None
        controller, login, nodes = start_members(settings, paths, exposed, root)
        verifying = pool.submit(verify_exposure, login, account, _proof(needed))
        members.start_munged(controller, paths)
        if database is not None:
            database.result()
        elif settings.accounting:
            create_database(paths, controller)
        if settings.accounting:
            start_accounting(controller, paths, settings)
        members.start_slurmctld(controller, paths)
        members.start_slurmds(nodes, paths)
        verifying.result()
    wait_until(
        lambda: set(members.node_states(controller, paths).values()) == {"IDLE"},
        doing="waiting for every node to be idle",
        within_s=30,
    )
    holders = {member.name: member.pid for member in (controller, login, *nodes)}
    return Built(settings, account, _targets(exposed), holders)


def _proof(needed: Sequence[Path]) -> Sequence[Path]:
    """Paths that must be readable for the exposure to have worked: the given ones and one file of ours."""
    return (*needed, Path(slurmft.__file__))


def start_members(
    settings: LabSettings, paths: LabPaths, exposed: Sequence[Mount], root: Path | None = None
) -> tuple[Member, Member, list[Member]]:
    """Controller, login and nodes, all wired, nothing running in them yet."""
    with ExitStack() as interrupted:
        starting = []
        for name in (CONTROLLER, *settings.node_names):
            starting.append(Starting(name, paths, exposed, root=root))
            interrupted.callback(starting[-1].forget)
        controller, *nodes = [one.wait() for one in starting]
        login = Starting(LOGIN, paths, exposed, controller, root=root)
        interrupted.callback(login.forget)
        build_bridge(controller)
        connect(controller, nodes, settings)
        return controller, login.wait(), nodes


def _write_files(settings: LabSettings, paths: LabPaths) -> None:
    spools = [paths.spool / name for name in settings.node_names]
    for folder in (settings.folder, paths.etc, paths.log, paths.run, paths.mark, paths.spool, *spools):
        make_folder(folder)
    make_folder(paths.state, 0o700)
    paths.slurm_conf.write_text(lab_settings.slurm_conf_text(settings), encoding="utf-8")
    (paths.etc / "cgroup.conf").write_text("", encoding="utf-8")
    if settings.gpus:
        (paths.etc / "gres.conf").write_text(lab_settings.gres_conf_text(settings), encoding="utf-8")
        make_folder(paths.gpus)
    for number in range(settings.gpus):  # slurmd insists on devices
        (paths.gpus / str(number)).unlink(missing_ok=True)
        (paths.gpus / str(number)).symlink_to("/dev/null")
    for source in settings.files:
        shutil.copyfile(source, paths.etc / source.name)
    paths.hosts.write_text(lab_settings.hosts_text(settings), encoding="utf-8")
    paths.resolv_conf.write_text("", encoding="utf-8")
    for path in paths.etc.iterdir():
        path.chmod(0o644)


def standing(folder: Path) -> Built:
    """The lab in this folder.

    Raises:
        LabError: there is none.
    """
    require_root()
    built = load(folder)
    if built is None or not built.login.is_alive(folder):
        refuse_inside(folder)  # a node has process ids of its own, and sees none of the login member
        raise LabError(f"no lab stands in {folder}", hint="slurmft lab up")
    return built


# --- The lab as one object: bring it up, run commands in it, break it, take it down ---


class Lab:
    """A standing Slurm cluster on this machine.

    Every method raises LabError with what failed and what to do; commands run in the lab are the caller's to judge.
    """

    def __init__(self, built: Built) -> None:
        self._built = built
        self.settings = built.settings
        """What it was built from."""

        self.folder, self.nodes = built.settings.folder, built.settings.node_names
        """Where its files are, and the names of the compute nodes."""

        self.user, self.uid, self.gid = built.account.name, built.account.uid, built.account.gid
        """The ordinary user that jobs run as; the same numbers on the host."""

        self.home = built.paths.home
        """A folder of the user that every node sees at the same path: the shared filesystem."""

        self.slurm_conf = built.paths.slurm_conf
        """The configuration in use, world-readable."""

    @staticmethod
    def availability(*, accounting: bool = False) -> str | None:
        """Why no lab can be built here right now, or None. Installs nothing; for skipping tests by name."""
        return why_unavailable(accounting=accounting)

    @classmethod
    def up(cls, settings: LabSettings | None = None) -> Lab:
        """The lab with these settings, built when none stands; see :func:`up`."""
        return cls(up(settings or LabSettings()))

    @classmethod
    def standing(cls, folder: Path | None = None) -> Lab:
        """The lab that stands in ``folder``.

        Raises:
            LabError: there is none.
        """
        return cls(standing(folder or default_folder()))

    def down(self) -> None:
        """End the lab: no process, mount, namespace or link is left. Home and logs stay."""
        down(self.folder)

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as the lab's user on the login member; options as for :func:`run_command`."""
        return run_command(self._built, self._built.login, self._built.account, argv, **options)

    def second_user(self) -> members.Account:
        """Another ordinary user, who shares nothing with the first; made when it is missing."""
        return members.ensure_account(self.folder / "home2", members.SECOND_USER)

    def run_as(
        self, account: members.Account, argv: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command as ``second_user`` on the login member, in that user's home."""
        home = str(self.folder / "home2")
        return run_command(self._built, self._built.login, account, argv, cwd=home, env={"HOME": home}, **options)

    def run_as_admin(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """The same as root, which is also Slurm's administrator."""
        return run_command(self._built, self._built.login, None, argv, **options)

    def run_on(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as the lab's user inside a node, beside its jobs, not through Slurm."""
        return run_command(self._built, self._member(node), self._built.account, argv, **options)

    def run_on_as_admin(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """The same as root."""
        return run_command(self._built, self._member(node), None, argv, **options)

    def _member(self, name: str) -> Member:
        self._built = load(self.folder) or self._built  # start_node changes holders, perhaps from another process
        return self._built.member(name)

    def command(
        self, argv: Sequence[str], *, node: str | None = None, admin: bool = False, cwd: Path | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """Argv and environment for the caller's own ``Popen`` or ``exec``; falls back to home where cwd is closed."""
        member = self._member(node) if node else self._built.login
        account = None if admin else self._built.account
        folder = cwd or self.home
        if not members.can_enter(member, account, folder):
            folder = self.home
        environment = members.environment_of(account, self._built.paths, os.environ)
        return members.command_argv(member, account, folder, argv), environment

    # The faults injected into it, and their repair

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Built]:
        """The lab as it stands, while no other command changes it."""
        with exclusive(self.folder):
            self._built = standing(self.folder)
            yield self._built

    def kill_node(self, name: str) -> None:
        """End a node as a power cut does: at once, without closing its connections."""
        refuse_inside(self.folder)
        with self._changing() as built:
            if built.node(name).is_alive(self.folder):
                # first the cable: a dying process would still close its connections
                set_link(built.controller, name, "down")
            kill_processes(self.folder, member=name)

    def start_node(self, name: str) -> None:
        """Start a node again; when it still lives, only its slurmd and cable are seen to."""
        refuse_inside(self.folder)
        with self._changing() as built:
            node = built.node(name)
            if not node.is_alive(self.folder):
                kill_processes(self.folder, member=name)
                remove_link(built.controller, name)
                root = ensure_release(built.settings.release)
                node = Starting(name, built.paths, exposed_paths(built.settings), root=root).wait()
                connect(built.controller, [node], built.settings)
                self._built = built.with_holder(node)
                save(self._built)
            set_link(built.controller, name, "up")
            if not members.processes_named(self.folder, name, "slurmd"):
                members.start_slurmds([node], built.paths)

    def partition(self, name: str) -> None:
        """Cut a node off the network; everything on it goes on running."""
        with self._changing() as built:
            set_link(built.controller, _living(built, name), "down")

    def heal(self, name: str) -> None:
        """Undo :meth:`partition`."""
        with self._changing() as built:
            set_link(built.controller, _living(built, name), "up")

    def slow_node(self, name: str, *, cpus: float, for_s: float = 120.0) -> None:
        """Leave a node no more than so many CPUs, for so many seconds; its jobs, later ones too, run on."""
        refuse_inside(self.folder)
        with self._changing() as built:
            limit_cpus(self.folder, _living(built, name), cpus=cpus, for_s=for_s)

    def restore_speed(self, name: str) -> None:
        """Undo :meth:`slow_node` before its time is up; nothing where the node is not slow."""
        with self._changing() as built:
            lift_limit(_cpu_group(self.folder, built.node(name).name))

    def stop_controller(self) -> None:
        """Stop slurmctld cleanly, as for maintenance: its state is saved, jobs go on."""
        with self._changing():
            members.end_program(self.folder, CONTROLLER, "slurmctld", signal.SIGTERM)

    def crash_controller(self) -> None:
        """Kill slurmctld; state that it had not saved yet (up to some seconds) is lost."""
        with self._changing():
            members.end_program(self.folder, CONTROLLER, "slurmctld", signal.SIGKILL)

    def start_controller(self) -> None:
        """Start slurmctld from its saved state and return when it answers; no effect on one that does."""
        with self._changing() as built:
            if not members.processes_named(self.folder, CONTROLLER, "slurmctld"):
                members.start_slurmctld(built.controller, built.paths)

    # Its state

    def node_states(self) -> dict[str, str]:
        """Each node's state as sinfo prints it in capitals; empty when slurmctld does not answer."""
        return members.node_states(self._built.controller, self._built.paths)

    def wait_until_idle(self, timeout: float = 60) -> None:
        """Return when no job is left and every node is idle.

        Raises:
            LabError: not within ``timeout`` seconds; says what was still there.
        """
        try:
            wait_until(self._is_idle, doing="waiting for an idle lab", within_s=timeout, every_s=0.1)
        except LabError as error:
            jobs = self.run_as_admin(["squeue", "-h", "-o", "%i %T %r %N"], check=False).stdout.strip()
            raise LabError(f"{error.what}; nodes {self.node_states()}, jobs: {jobs or 'none'}") from error

    def _is_idle(self) -> bool:
        jobs = self.run_as_admin(["squeue", "-h", "-o", "%i"], check=False)
        return jobs.returncode == 0 and not jobs.stdout.strip() and set(self.node_states().values()) == {"IDLE"}


def _living(built: Built, name: str) -> str:
    if not built.node(name).is_alive(built.settings.folder):
        raise LabError(f"node {name} is dead", hint=f"slurmft lab start-node {name}")
    return name


def run_command(
    built: Built,
    member: Member,
    account: members.Account | None,
    argv: Sequence[str],
    *,
    check: bool = True,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    input: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in the lab and capture its text output.

    Args:
        cwd: working folder, the user's home by default; must be one the user may enter.
        env: added to a clean login environment; the caller's own is not passed on.

    Raises:
        LabError: ``check`` is set and it did not exit with 0, or it exceeded ``timeout`` and was killed.
    """
    environment = members.environment_of(account, built.paths, os.environ) | dict(env or {})
    words = members.command_argv(member, account, Path(cwd or built.paths.home), argv)
    result = _captured(words, environment, input, timeout=timeout, name=" ".join(map(str, argv)))
    if check and result.returncode != 0:
        said = f"{result.stderr.strip()}\n{result.stdout.strip()}".strip()
        raise LabError(f"{' '.join(map(str, argv))}: ended with {result.returncode}\n{said}".rstrip())
    return result


def _captured(
    words: Sequence[str], environment: Mapping[str, str], given: str | None, *, timeout: float, name: str
) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # so that a timeout ends the children of the command too
    ) as process:
        try:
            out, err = process.communicate(given, timeout=timeout)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise LabError(f"{name}: no end within {timeout:g} s, killed") from error
            raise
    return subprocess.CompletedProcess(list(words), process.returncode, out, err)


# --- The present state of a lab, as one value ---


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node: Slurm's name for its state (``unknown`` without an answer), after ``dead`` or ``cut off`` if it is."""

    name: str
    address: str
    state: str


@dataclass(frozen=True, slots=True)
class LabStatus:
    """The state of the lab in a folder."""

    folder: str
    standing: bool
    healthy: bool = False
    user: str = ""
    home: str = ""
    slurm_conf: str = ""
    accounting: bool = False
    controller: str = "none"
    nodes: tuple[NodeStatus, ...] = ()


def status_of(folder: Path) -> LabStatus:
    """Look at the lab in ``folder``; never changes it.

    Raises:
        LabUnavailable: no root.
    """
    require_root()
    built = load(folder)
    if built is None or not built.login.is_alive(folder):
        return LabStatus(folder=str(folder), standing=False)
    answering = members.answers(built.controller, built.paths)
    states = members.node_states(built.controller, built.paths) if answering else {}
    plugged = connected(built.controller)
    nodes = []
    for name in built.settings.node_names:
        alive = built.member(name).is_alive(folder)
        state = states.get(name, "unknown").lower()
        if not alive:
            state = f"dead ({state})"
        elif name not in plugged:
            state = f"cut off ({state})"
        nodes.append(NodeStatus(name, built.settings.address(name), state))
    return LabStatus(
        folder=str(folder),
        standing=True,
        healthy=is_healthy(built),
        user=built.account.name,
        home=str(built.paths.home),
        slurm_conf=str(built.paths.slurm_conf),
        accounting=built.settings.accounting,
        controller="answers" if answering else "silent",
        nodes=tuple(nodes),
    )


# --- A node that has become slow: a limit on the CPU time of everything that runs on it, now and later ---
# A cgroup of the cpu controller (version 1 or 2) holds the node's processes; their children start in it. A process of
# its own (``python -m slurmft.lab.cluster GROUP SECONDS``) lifts the limit in time: no test that dies leaves a slow
# node behind.

PERIOD_US = 50_000
_NO_GROUPS = "this machine has no cpu cgroup that can be written to"


def limit_cpus(folder: Path, member: str, *, cpus: float, for_s: float) -> None:
    """Leave the member of the lab in ``folder`` no more than ``cpus`` CPUs together, for so many seconds.

    A limit that it has already is replaced; the earlier of both ends counts.

    Raises:
        LabError: the kernel does not let us.
    """
    if not 0.01 <= cpus <= 1024 or not 0 < for_s <= 3600:
        raise LabError(f"{cpus:g} CPUs for {for_s:g} s is not a valid limit", hint="0.01 to 1024 CPUs for up to 3600 s")
    group = _cpu_group(folder, member)
    try:
        group.mkdir(exist_ok=True)
        _set_limit(group, round(cpus * PERIOD_US))
        wait_until(lambda: not _move_into(folder, member, group), doing=f"limiting {member}", within_s=10)
    except OSError as error:
        raise LabError(f"cannot limit the CPUs of {member}: {error}", hint=_NO_GROUPS) from error
    run(
        [sys.executable, "-P", "-m", "slurmft.lab.cluster", str(group), str(for_s)],
        doing=f"arranging for the end of {member}'s limit",
    )


def lift_limit(group: Path) -> None:
    """Remove a limit and its group; nothing where there is none."""
    with contextlib.suppress(OSError):
        _set_limit(group, None)
    for _ in range(100):
        if not group.is_dir():
            return
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it is gone
                    (group.parent / "cgroup.procs").write_text(pid)
            group.rmdir()
        time.sleep(0.02)


def _cpu_group(folder: Path, member: str) -> Path:
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    return _controller() / f"slurmft-lab-{name}-{member}"


def _controller() -> Path:
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()[:3]
        where = Path(before.split()[4])
        if kind == "cgroup" and "cpu" in options.split(",") and os.access(where, os.W_OK):
            return where
        if kind == "cgroup2" and "cpu" in _words_in(where / "cgroup.subtree_control") and os.access(where, os.W_OK):
            return where
    raise LabError("no node can be made slow here", hint=_NO_GROUPS)


def _words_in(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _set_limit(group: Path, quota_us: int | None) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {PERIOD_US}")
    elif quota_us is None:
        (group / "cpu.cfs_quota_us").write_text("-1")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(max(1000, quota_us)))


def _move_into(folder: Path, member: str, group: Path) -> list[int]:
    """Move the member's processes into the group; those that were still outside."""
    inside = set(_words_in(group / "cgroup.procs"))
    outside = [pid for pid, owner in lab_processes(folder).items() if owner == member and str(pid) not in inside]
    for pid in outside:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))
    return outside


def _lift_later(group: Path, after_s: float) -> None:
    """Return at once; a process of its own lifts the limit, or ends when it is gone already."""
    if os.fork():
        return
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)  # readers of our output must not wait for us
    deadline = time.monotonic() + after_s
    while group.is_dir() and time.monotonic() < deadline:
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
    lift_limit(group)
    os._exit(0)


if __name__ == "__main__":
    _lift_later(Path(sys.argv[1]), float(sys.argv[2]))
