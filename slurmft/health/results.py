"""Results of the probes on a shared folder: one file for each node, which only that node's probes write.

    <folder>/<node>.json   {"format": 1, "node": ..., "checkups": [newest last, at most KEEP, and the newest long one]}
    a checkup              {"node", "at", "context", "level", "ok": [names], "results": [those that are not OK]}

Written atomically; of two writers at once on one node (a prolog beside the HealthCheckProgram) one may lose its look,
never the file. A reader leaves out invalid looks and reports them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from slurmft.errors import StorageError, StorageUnavailable
from slurmft.policy.node_health import Checkup, ProbeResult, Problem, Status
from slurmft.system.files import read_json, write_json

KEEP = 12
"""Looks of one node that its file holds."""

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_RESULTS, MAX_TEXT, MAX_LINES = 200, 2000, 50
MAX_NUMBER = 1e300
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The content of a results folder."""

    checkups: Mapping[str, list[Checkup]]
    """Node -> its looks, oldest first."""

    problems: tuple[str, ...] = ()
    """Files that could not be read, one line each."""


def write_result(folder: Path, node: str, result: Checkup) -> Path:
    """Add one look to the node's file; returns the file. The folder is made where it is missing.

    Raises:
        StorageUnavailable: there is no room, or the folder cannot be written.
        StorageError: this is not the name of a node.
    """
    path = _path(folder, node)
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        before = _stored(path, node) if path.exists() else []
    except OSError as error:
        raise StorageUnavailable(f"cannot keep results in {folder}: {error.strerror or error}") from error
    except StorageError:
        before = []  # damaged or newer: this look is worth more than an unreadable file
    looks = sorted([*before, result], key=lambda each: each.at)
    long = [look for look in looks[:-KEEP] if look.level > 1][-1:]  # rare, and said to be due without it
    kept = looks[-KEEP:] if any(look.level > 1 for look in looks[-KEEP:]) else [*long, *looks[-KEEP:]]
    try:
        write_json(path, {"node": node, "checkups": [brief_json(each) for each in kept]}, mode=0o644, durable=False)
    except OSError as error:
        raise StorageUnavailable(f"cannot write {path}: {error.strerror or error}") from error
    return path


def read_results(folder: Path) -> Results:
    """Every node's looks; a folder that is not there holds none.

    Only files of root, of this user, or of the folder's own owner are believed: a drain may follow from them.

    Raises:
        StorageUnavailable: the folder cannot be listed.
    """
    checkups: dict[str, list[Checkup]] = {}
    problems = []
    try:
        trusted = {0, os.geteuid(), folder.stat().st_uid}
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".json"))
    except FileNotFoundError:
        return Results(checkups={})
    except OSError as error:
        raise StorageUnavailable(f"cannot list {folder}: {error.strerror or error}") from error
    for name in names:
        node = name.removesuffix(".json")
        if name.startswith("."):
            continue  # a writer's temporary file
        try:
            path = _path(folder, node)
            if (owner := path.lstat().st_uid) not in trusted:
                raise StorageError(f"{path} belongs to user {owner}: not believed")
            checkups[node] = _stored(path, node)
        except (StorageError, OSError) as error:
            problems.append(" ".join(str(error).split()))
    return Results(checkups=checkups, problems=tuple(problems))


def checkup_json(checkup: Checkup) -> dict[str, Any]:
    """A look as plain values; ``checkup_of`` reads it back."""
    results = [result_json(result) for result in checkup.results]
    return {"node": checkup.node, "at": checkup.at, "results": results, "context": checkup.context,
            "level": checkup.level}  # fmt: skip


def brief_json(checkup: Checkup) -> dict[str, Any]:
    """For the shared folder: only the names of OK results, since a sweep reads the files of ten thousand nodes."""
    value = checkup_json(checkup)
    value["ok"] = [result.name for result in checkup.results if result.status is Status.OK]
    value["results"] = [each for each in value["results"] if each["status"] != Status.OK.name]
    return value


def result_json(result: ProbeResult) -> dict[str, Any]:
    """A result as plain values; ``result_of`` reads it back."""
    return {**asdict(result), "status": result.status.name, "evidence": list(result.evidence)}


def checkup_of(value: Any) -> Checkup:
    """A look from plain values.

    Raises:
        ValueError: it is invalid; says why.
    """
    if not isinstance(value, dict):
        raise ValueError("a look is not an object")
    node, at, results = value.get("node"), value.get("at"), value.get("results")
    if not isinstance(node, str) or not _is_node(node):
        raise ValueError(f"{str(node)[:40]!r} is not the name of a node")
    if not is_number(at):
        raise ValueError(f"at={str(at)[:40]} is not a time")
    if not isinstance(results, list) or len(results) > MAX_RESULTS:
        raise ValueError("its results are not a list, or too many")
    level, context, fine = value.get("level", 1), value.get("context", ""), value.get("ok", [])
    try:
        passed = _passed(tuple(fine)) if isinstance(fine, list) else None
    except TypeError:  # a list in it
        passed = None
    if passed is None:
        raise ValueError("the OK results are not a list of names, or too many")
    return Checkup(node=node, at=float(at), results=(*map(result_of, results), *passed),
                   context=str(context)[:40], level=level if type(level) is int else 1)  # fmt: skip


@functools.lru_cache(maxsize=1000)
def _passed(names: tuple[str, ...]) -> tuple[ProbeResult, ...] | None:
    """The same few lists are in the files of ten thousand nodes. None where it is not one of names."""
    if len(names) > MAX_RESULTS or not all(isinstance(name, str) for name in names):
        return None
    return tuple(ProbeResult(name=_text(name), status=Status.OK, detail="") for name in names)


def result_of(value: Any) -> ProbeResult:
    """One probe's result from plain values.

    Raises:
        ValueError: it is invalid; says why.
    """
    if not isinstance(value, dict):
        raise ValueError("a result is not an object")
    name, status, problem = value.get("name"), value.get("status"), value.get("problem", Problem.NODE.value)
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a result has no name")
    if not isinstance(status, str) or status not in Status.__members__:
        raise ValueError(f"{name[:40]!r} has no status")
    lines = value.get("evidence", [])
    return ProbeResult(
        name=_text(name), status=Status[status], detail=_text(value.get("detail", "")),
        value=_number(value.get("value")), unit=_text(value.get("unit", "")),
        evidence=tuple(_text(line) for line in lines[:MAX_LINES]) if isinstance(lines, list) else (),
        remedy=_text(value.get("remedy", "")),
        problem=Problem(problem) if problem in tuple(Problem) else Problem.NODE,
        took_s=_number(value.get("took_s")) or 0.0,
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _is_node(name: str) -> bool:
    return _NODE.fullmatch(name) is not None


def _path(folder: Path, node: str) -> Path:
    if not _is_node(node):
        raise StorageError(f"{node[:80]!r} is not the name of a node")
    return folder / f"{node}.json"


def _stored(path: Path, node: str) -> list[Checkup]:
    value = read_json(path, limit_bytes=MAX_FILE_BYTES) or {}
    found = value.get("checkups")
    if not isinstance(found, list):
        raise StorageError(f"{path} holds no checkups")
    try:
        looks = [checkup_of(each) for each in found[-KEEP - 1 :]]
    except ValueError as error:
        raise StorageError(f"{path}: {error}") from error
    if strangers := {look.node for look in looks} - {node}:
        raise StorageError(f"{path} holds looks at {min(strangers)[:80]}")
    return looks


def _text(value: Any) -> str:
    return " ".join(str(value).split())[:MAX_TEXT]


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a finite number that a float can hold, and not a truth value."""
    return type(value) in (int, float) and abs(value) < MAX_NUMBER
