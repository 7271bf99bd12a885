"""``slurmft doctor --production``: collects what a site has for all runs; ``policy.site.production`` judges it."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmft.config.config import RunConfig
from slurmft.config.health import HealthConfig
from slurmft.errors import ConfigError, SlurmError, StorageError
from slurmft.health.checker import CONFIG_VARIABLE, SYSTEM_CONFIG, load_config
from slurmft.health.node_view import Scene, mounts
from slurmft.health.results import read_results
from slurmft.policy.site import production as policy
from slurmft.policy.site.doctor import Finding
from slurmft.policy.site.production import Place, RunFacts, SiteFacts
from slurmft.scheduler import slurm
from slurmft.scheduler.nodes import nodes
from slurmft.storage.checkpoint_names import MANIFEST, names_in

_MOST_LINKS = 40


def examine(config: RunConfig | None, environment: Mapping[str, str]) -> list[Finding]:
    """Look at what the site has for all runs, and at one run's folder and room."""
    found = [*policy.judge_site(_site(environment))]
    return found if config is None else [*found, *policy.judge_run(_run(config))]


def _site(environment: Mapping[str, str]) -> SiteFacts:
    conf: Mapping[str, str] = {}
    names: tuple[str, ...] = ()
    if slurm.available():
        try:
            conf = slurm.configuration()
            names = tuple(sorted({each.node for each in nodes() if each.usable}))
        except SlurmError:
            conf = {}  # the ordinary doctor says so
    named = Path(environment.get(CONFIG_VARIABLE) or SYSTEM_CONFIG)
    settings, error = HealthConfig(), ""
    if named.exists():
        try:
            settings = load_config(named, environment)
        except ConfigError as problem:
            error = str(problem)
    folder = settings.results_folder
    return SiteFacts(
        installation=place(Path(sys.prefix)),
        conf=conf,
        nodes=names,
        programs={
            key: place(Path(path)) for key in policy.HOOKS if (path := conf.get(key, "").split(",")[0])[:1] == "/"
        },
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


def _run(config: RunConfig) -> RunFacts:
    there = nearest(config.run_folder)
    kinds = [each for each in mounts(Scene(node="", now=time.time())) if there.is_relative_to(each.point)]
    try:
        free = shutil.disk_usage(nearest(config.checkpoint_dir)).free
    except OSError:
        free = None
    return RunFacts(
        folder=place(there),
        kind=max(kinds, key=lambda each: len(each.point.parts)).kind if kinds else "",
        nodes=config.nodes,
        free_bytes=free,
        checkpoint_bytes=newest_size(config.checkpoint_dir),
        kept=config.checkpoint.keep_last_n,
        is_told=config.notify.is_on or config.metrics.is_on,
        time_limit=config.slurm.time or "",
    )


def newest_size(folder: Path) -> int:
    """Bytes of the newest committed checkpoint's files; 0 where there is none."""
    try:
        for one in names_in(folder).believed:
            path = folder / one.folder_name
            if (path / MANIFEST).is_file():
                return sum(each.lstat().st_size for each in path.iterdir())
    except OSError:
        pass
    return 0


def nearest(path: Path) -> Path:
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
