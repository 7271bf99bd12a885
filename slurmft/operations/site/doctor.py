"""``slurmft doctor``: collects the site's settings and tries the filesystem; ``policy.site.doctor`` judges them."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.config.config import RunConfig
from slurmft.config.health import HealthConfig
from slurmft.errors import ConfigError, LabUnavailable, SlurmError, SlurmUnavailable, StorageError
from slurmft.health.checker import CONFIG_VARIABLE, SYSTEM_CONFIG, load_config
from slurmft.health.node_view import Scene, mounts
from slurmft.health.results import read_results
from slurmft.operations.site.container_trial import look_at_container
from slurmft.policy.site import doctor as policy
from slurmft.policy.site.doctor import (
    AdminFacts,
    Finding,
    FolderFacts,
    Level,
    PartitionFacts,
    Place,
    RoomFacts,
    SiteFacts,
    Wishes,
)
from slurmft.policy.timing.grace import Severity
from slurmft.scheduler import slurm
from slurmft.scheduler.nodes import nodes
from slurmft.scheduler.parsing.parsing import parse_time
from slurmft.storage.checkpoint_names import MANIFEST, names_in
from slurmft.supervisor import grace
from slurmft.system.files import replace_atomically
from slurmft.system.processes import user_name

EXIT_NO_SLURM = LabUnavailable.exit_code
EXIT_SILENT = SlurmUnavailable.exit_code
AS_OF = "as of"
_MOST_LINKS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All findings, and how the command ends."""

    findings: tuple[Finding, ...]
    exit_code: int


def diagnose(config: RunConfig | None, environment: Mapping[str, str], *, here: Path) -> Diagnosis:
    """Look at the site around us, for this run or for any; ``here`` stands for its folder where there is no run."""
    folder = try_folder(here if config is None else config.run_folder)
    found = [*policy.judge_folder(folder)]
    container = None if config is None else look_at_container(config, environment)
    found += [] if container is None else policy.judge_container(container)
    offsets = {} if folder.error else {"the run folder's filesystem": folder.clock_offset_s}
    code = 0
    if not slurm.available():
        found.append(_missing("there is no Slurm on this machine: no client commands, or no configuration for them",
                              "runs with --cluster local work here; log in to a node of a cluster"))  # fmt: skip
        code = EXIT_NO_SLURM
    else:
        try:
            found += _of_slurm(config, environment, offsets)
        except SlurmError as error:
            found.append(_missing(f"Slurm did not answer: {error.what}", "try again, or see scontrol ping"))
            code = EXIT_SILENT
    found += policy.judge_clocks(offsets)
    found += policy.judge_site(_site(environment))
    found += [] if config is None else policy.judge_room(_room(config))
    return Diagnosis(findings=tuple(found), exit_code=code or policy.exit_code(found))


def _missing(text: str, remedy: str) -> Finding:
    return Finding(check="Slurm", level=Level.PROBLEM, text=text, remedy=remedy)


def _of_slurm(config: RunConfig | None, environment: Mapping[str, str], offsets: dict[str, float]) -> list[Finding]:
    before = time.time()
    conf = slurm.configuration()
    if (clock := parse_time(conf.get(AS_OF, ""))) is not None:
        offsets["Slurm's controller"] = round(clock + 0.5 - (before + time.time()) / 2, 1)
    partitions = slurm.partitions(timeout_s=10.0)
    wishes = _wishes(config, environment)
    known = {each.name: PartitionFacts(name=each.name, preempt_mode=each.preempt_mode, grace_s=each.grace_s)
             for each in partitions}  # fmt: skip
    name, version = conf.get("ClusterName", "unknown"), conf.get("SLURM_VERSION", "unknown")
    return [
        Finding(check="Slurm", level=Level.OK, text=f"cluster {name}, version {version}"),
        *policy.judge_cluster(conf, wishes),
        *policy.judge_partitions(conf, known, [each.name for each in partitions if each.is_default], wishes),
        *policy.judge_federation(slurm.federation()),
        *_of_grace(config, environment),
        policy.judge_permissions(_permissions(conf)),
    ]


def _wishes(config: RunConfig | None, environment: Mapping[str, str]) -> Wishes:
    if config is None:
        return Wishes()
    named = environment.get("SBATCH_PARTITION") or config.slurm.partition or ""
    return Wishes(
        partitions=tuple(filter(None, named.split(","))),
        requeue=config.slurm.requeue,
        continue_by=config.preemption.continue_by,
        requeue_delay_s=config.preemption.requeue_delay_s,
        survives_nodes=config.survives_nodes,
    )


def _of_grace(config: RunConfig | None, environment: Mapping[str, str]) -> list[Finding]:
    """The grace budget, from what earlier runs of the same workload have measured."""
    if config is None:
        return []
    levels = {Severity.WARNING: Level.WARNING, Severity.NOTE: Level.NOTE}
    return [
        Finding(check="grace budget", level=levels[each.severity], text=each.text)
        for each in grace.check(config, {}, environment)
    ]


def _permissions(conf: Mapping[str, str]) -> AdminFacts:
    user = user_name()
    if os.getuid() == 0 or conf.get("SlurmUser", "").startswith(f"{user}("):
        return AdminFacts(may_drain=True, why=f"{user} is Slurm's administrator")
    if not policy.has_accounting(conf):
        return AdminFacts(may_drain=None, why="without accounting only Slurm's own user surely may")
    try:
        level = slurm.admin_level(user)
    except SlurmError as error:
        return AdminFacts(may_drain=None, why=f"the accounting did not answer: {error.what}")
    why = f"admin level {level} in the accounting" if level else f"the accounting does not know the user {user}"
    return AdminFacts(may_drain=level in ("Administrator", "Operator"), why=why)


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """For people: findings that need action come last, where a terminal shows them."""
    order = list(Level)
    lines = []
    for each in sorted(findings, key=lambda finding: order.index(finding.level)):
        lines.append(f"{each.level.upper():8} {each.check}: {each.text}")
        if each.remedy:
            lines.append(f"         -> {each.remedy}")
    return lines


def try_folder(path: Path) -> FolderFacts:
    """What works where ``path`` is or will be: in its nearest folder that exists. Leaves nothing behind."""
    there = next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))
    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix=".slurmft-doctor-", dir=there) as name:
            return _tried(there, Path(name), began_s)
    except OSError as error:
        return FolderFacts(path=str(there), error=error.strerror or str(error))


def _tried(there: Path, folder: Path, began_s: float) -> FolderFacts:
    one = folder / "one"
    descriptor = os.open(one, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.close(descriptor)
    try:
        os.close(os.open(one, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        exclusive = False
    except FileExistsError:
        exclusive = True
    before = time.time()
    replace_atomically(one, "new")
    at = one.stat().st_mtime
    return FolderFacts(
        path=str(there), exclusive=exclusive, renames=one.read_text(encoding="utf-8") == "new", flock=_flock(one),
        clock_offset_s=0.0 if before - 1 <= at <= time.time() + 1 else at - before, took_s=time.monotonic() - began_s,
    )  # fmt: skip


def _flock(path: Path) -> str:
    """Whether a lock keeps a second opening of the same file out."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(path.open("r+", encoding="utf-8"))
        second = stack.enter_context(path.open("r+", encoding="utf-8"))
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.strerror or str(error)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "works"
        except OSError as error:
            return error.strerror or str(error)
        return "two hold it at once"


def _site(environment: Mapping[str, str]) -> SiteFacts:
    """What the administrator has set up for all runs; empty where Slurm does not answer."""
    conf: Mapping[str, str] = {}
    names: tuple[str, ...] = ()
    with contextlib.suppress(SlurmError):
        if slurm.available():
            conf = slurm.configuration()
            names = tuple(sorted({each.node for each in nodes() if each.usable}))
    named = Path(environment.get(CONFIG_VARIABLE) or SYSTEM_CONFIG)
    settings, error = HealthConfig(), ""
    if named.exists():
        try:
            settings = load_config(named, environment)
        except ConfigError as problem:
            error = str(problem)
    folder = settings.results_folder
    programs = {key: Path(conf.get(key, "").split(",")[0]) for key in policy.HOOKS}
    return SiteFacts(
        installation=place(Path(sys.prefix)),
        conf=conf,
        nodes=names,
        programs={key: place(path) for key, path in programs.items() if path.is_absolute()},
        health=place(named),
        health_error=error,
        results=None if folder is None else place(folder),
        looked_at={} if folder is None else _ages(folder),
    )


def _ages(folder: Path) -> dict[str, float]:
    now = time.time()
    try:
        found = read_results(folder).checkups
    except StorageError:
        return {}
    return {node: now - max(each.at for each in looks) for node, looks in found.items() if looks}


def _room(config: RunConfig) -> RoomFacts:
    there = _nearest(config.run_folder)
    kinds = [each for each in mounts(Scene(node="", now=time.time())) if there.is_relative_to(each.point)]
    try:
        free = shutil.disk_usage(_nearest(config.checkpoint_dir)).free
    except OSError:
        free = None
    return RoomFacts(
        folder=place(there),
        kind=max(kinds, key=lambda each: len(each.point.parts)).kind if kinds else "",
        nodes=config.nodes,
        free_bytes=free,
        checkpoint_bytes=newest_size(config.checkpoint_dir),
        kept=config.checkpoint.keep_last_n,
    )


def newest_size(folder: Path) -> int:
    """Bytes of the newest committed checkpoint's files; 0 where there is none."""
    with contextlib.suppress(OSError):
        for one in names_in(folder).believed:
            path = folder / one.folder_name
            if (path / MANIFEST).is_file():
                return sum(each.lstat().st_size for each in path.iterdir())
    return 0


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists, without links."""
    return next((each for each in (path, *path.parents) if each.exists()), Path("/")).resolve()


def place(path: Path) -> Place:
    """Who may change what lies there: itself, what its links lead to, and by the folders above."""
    if not path.exists():
        return Place(path=str(path), exists=False)
    owner = path.stat().st_uid
    found = sorted({who for each in _rooms(path) for who in _changers(each, beside=owner)})
    return Place(path=str(path), owner=_name(owner), changeable_by=", ".join(found))


def _rooms(path: Path) -> Iterator[Path]:
    """The path, its folders, and those of what its links name."""
    for _ in range(_MOST_LINKS):
        yield from (path, *path.parents)
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    real = path.resolve()
    yield from (real, *real.parents)


def _changers(path: Path, *, beside: int) -> Iterator[str]:
    facts = path.lstat()
    if stat.S_ISLNK(facts.st_mode):
        return
    if facts.st_uid not in (0, os.geteuid(), beside):
        yield _name(facts.st_uid)
    is_sticky = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
    if facts.st_mode & stat.S_IWOTH and not is_sticky:
        yield "every user"
    elif facts.st_mode & stat.S_IWGRP and not is_sticky and not _is_alone(facts.st_uid, facts.st_gid):
        yield f"group {facts.st_gid}"


def _is_alone(uid: int, gid: int) -> bool:
    """Whether a group holds root, or this user, and no other: many sites give each user one."""
    try:
        return gid == 0 or (pwd.getpwuid(uid).pw_gid == gid and not grp.getgrgid(gid).gr_mem)
    except KeyError:
        return False


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
