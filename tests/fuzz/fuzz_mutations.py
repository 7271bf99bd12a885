"""What is done to a file, to a value or to an argument. All of it is drawn from one generator: a seed is an input."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_world import CALLER, STRANGER, World

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**309, 0.5, -0.0, 1e-320, 1e308, float("inf"),
    float("-inf"), float("nan"), "", " ", "0", "-1", "nan", "inf", "1e309", "9" * 309, "x" * 70_000, "yesterday", "-5",
    "../..", "/", "/dev/zero", "/dev/full", "/proc/self/mem", "~", "~root", "a\nb", "a\0b", "\x1b]0;owned\x07\x1b[2J",
    "\u202egpj.exe", "\udcff", "\U0001f600", "n[1-99999999]", "n1,n1", "n[1-", "$(touch executed)", "`touch executed`",
    "; touch executed", "--help", "-", "%s%n{0}", [], {}, [[]], [None], {"": None}, {"a": {"b": {"c": []}}},
    list(range(1000)), [[0.5] * 50] * 50, [10**309] * 3, [float("nan"), None, True], 10**4400,
    -(10**309), 10**15, 1 << 50, {"node": "n1", "rank": 10**309, "at": 1e308}, {"at": 10**20, "node": ["n1"]},
    "9" * 5000, {"format": 999}, "local-1", "7", "7.0.0", "0001-01-01", "9999-12-31T23:59:59+00:00",
]  # fmt: skip
ARGUMENTS = [value for value in VALUES if isinstance(value, str) and "\0" not in value and len(value) < 10_000]


def _fifo(path: Path, _: random.Random, __: World) -> None:
    os.mkfifo(path)


def _socket(path: Path, _: random.Random, __: World) -> None:
    with socket.socket(socket.AF_UNIX) as each:
        folder = os.open(path.parent, os.O_PATH)  # names of sockets are short
        try:
            each.bind(f"/proc/self/fd/{folder}/{path.name[:60]}")
        finally:
            os.close(folder)


def _link(target: Callable[[World], str]) -> Mutation:
    return lambda path, _, world: path.symlink_to(target(world))


def _folder(path: Path, _: random.Random, __: World) -> None:
    path.mkdir()
    (path / "inside").write_text("inside")


def _endless(path: Path, _: random.Random, __: World) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


def _noise(path: Path, chance: random.Random, _: World) -> None:
    path.write_bytes(chance.randbytes(chance.choice([0, 1, 10, 1000, 100_000])))


def _deep(path: Path, _: random.Random, __: World) -> None:
    path.write_text('{"format": 1, "a": ' + "[" * 100_000)


Mutation = Callable[[Path, random.Random, World], None]
INSTEAD: dict[str, Mutation] = {
    "fifo": _fifo, "socket": _socket, "folder": _folder, "endless": _endless, "noise": _noise, "deep": _deep,
    "zero": _link(lambda _: "/dev/zero"), "tty": _link(lambda _: "/dev/tty"), "loop": _link(lambda _: "."),
    "dangling": _link(lambda world: str(world.outside / "not-there")),
    "outside": _link(lambda world: str(world.outside / "precious")),
    "outside-folder": _link(lambda world: str(world.outside / "folder")),
    "missing": lambda _, __, ___: None,
}  # fmt: skip
"""What lies in the place of a file that is gone."""


def mutate_file(path: Path, chance: random.Random, world: World) -> str:
    """Do one thing to a file or folder of the world; returns what, in words."""
    odd = path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 24
    if odd or chance.random() < 0.35:
        name = chance.choice(sorted(INSTEAD))
        _remove(path)
        INSTEAD[name](path, chance, world)
        _belong(path, chance)
        return f"{path.relative_to(world.folder)}: {name}"
    content = path.read_bytes()
    how = chance.choice(["torn", "bytes", "json", "json", "json", "json", "mode", "owner", "text"])
    if how == "json" and (changed := _other_json(content, chance)) is not None:
        path.write_bytes(changed)
    elif how == "torn":
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif how == "mode":
        path.chmod(chance.choice([0o000, 0o200, 0o400, 0o777, 0o666]))
    elif how == "owner":
        _belong(path, chance, always=True)
    elif how == "text":
        word = str(chance.choice(VALUES)).encode("utf-8", "surrogateescape")
        at = chance.randrange(len(content) + 1)
        path.write_bytes(content[:at] + word + content[at:])
    else:
        changed = bytearray(content)
        for _ in range(chance.choice([1, 3, 30])):
            if changed:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
        path.write_bytes(bytes(changed))
    return f"{path.relative_to(world.folder)}: {how}"


def mutate_state(path: Path, chance: random.Random) -> str:
    """Other values in a small file of state, or in a line of the journal; the file stays JSON."""
    if (changed := _other_json(path.read_bytes(), chance)) is None:
        return "nothing"
    path.write_bytes(changed)
    return f"{path}: {changed[:300]!a}"


def mutate_value(value: Any, chance: random.Random) -> Any:
    """``value`` with one place in it replaced, removed, or filled with one more."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value, key=str))
        roll = chance.random()
        if roll < 0.1:
            return {each: of for each, of in value.items() if each != key}
        if roll < 0.2:
            return {**value, str(chance.choice(VALUES)): chance.choice(VALUES)}
        return {**value, key: mutate_value(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [*value[:at], mutate_value(value[at], chance), *value[at + 1 :]]
    return chance.choice(VALUES)


def _other_json(content: bytes, chance: random.Random) -> bytes | None:
    """One line of a JSON file, or the whole of it, with another value in it."""
    lines = content.split(b"\n")
    numbers = [number for number, line in enumerate(lines) if line.startswith(b"{")]
    try:
        if not numbers:
            return None
        number = chance.choice(numbers)
        try:
            value = json.loads(lines[number])
        except ValueError:  # one value over many lines
            lines, number, value = [content], 0, json.loads(content)
    except (ValueError, RecursionError):
        return None
    for _ in range(chance.choice([1, 1, 2, 4])):
        value = mutate_value(value, chance)
    lines[number] = json.dumps(value).encode()
    return b"\n".join(lines)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.was-{len(list(path.parent.iterdir()))}"))
    else:
        path.unlink(missing_ok=True)


def _belong(path: Path, chance: random.Random, *, always: bool = False) -> None:
    """To the stranger now and then, else to the caller: only root can tell them apart."""
    if os.getuid() == 0 and (path.is_symlink() or path.exists()):
        owner = STRANGER if always or chance.random() < 0.3 else CALLER
        os.lchown(path, owner, owner)
