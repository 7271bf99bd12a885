"""Building a lab and taking it away. Anything less than a healthy lab with the right settings is built anew."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import slurmft
from slurmft.errors import LabError
from slurmft.lab import accounting, daemons, slurm_conf
from slurmft.lab.access import ensure_account, verify_exposure
from slurmft.lab.exposure import PRIVATE_MEMORY, Mount, compile_sources, needed_paths, paths_to_expose
from slurmft.lab.members import Member, Starting, build_bridge, connect, connected
from slurmft.lab.packages import ensure_packages
from slurmft.lab.processes import kill_processes, make_folder, member_of_process, wait_until
from slurmft.lab.releases import ensure_release
from slurmft.lab.settings import LabSettings
from slurmft.lab.slurm_conf import CONTROLLER, LOGIN, LabPaths
from slurmft.lab.state import Built, exclusive, load, save

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
        with exclusive(
            folder
        ):  # its lock shows that it is a lab's: last, so that another purge ends one that was cut off
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
    if not wanted <= daemons.programs(built.settings.folder) or connected(built.controller) != names:
        return False
    states = daemons.node_states(built.controller, built.paths)
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
    return (paths.etc, paths.state, paths.spool, paths.run, paths.munge, paths.database, paths.mark)


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
        database = pool.submit(accounting.create_database, paths) if early else None
        controller, login, nodes = start_members(settings, paths, exposed, root)
        verifying = pool.submit(verify_exposure, login, account, _proof(needed))
        daemons.start_munged(controller, paths)
        if database is not None:
            database.result()
        elif settings.accounting:
            accounting.create_database(paths, controller)
        if settings.accounting:
            accounting.start_accounting(controller, paths, settings)
        daemons.start_slurmctld(controller, paths)
        daemons.start_slurmds(nodes, paths)
        verifying.result()
    wait_until(
        lambda: set(daemons.node_states(controller, paths).values()) == {"IDLE"},
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
    paths.slurm_conf.write_text(slurm_conf.slurm_conf_text(settings), encoding="utf-8")
    (paths.etc / "cgroup.conf").write_text("", encoding="utf-8")
    for source in settings.files:
        shutil.copyfile(source, paths.etc / source.name)
    paths.hosts.write_text(slurm_conf.hosts_text(settings), encoding="utf-8")
    paths.resolv_conf.write_text("", encoding="utf-8")
    for path in paths.etc.iterdir():
        path.chmod(0o644)
