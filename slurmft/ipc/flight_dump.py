"""What torch and NCCL say of collectives that hang, read without trust: flight recorder dumps, and NCCL's report.

A dump is a pickle of plain containers, which torch writes itself (``torch::jit::Pickler``), and it lies in a shared
place. So ``pickletools`` takes it apart, which builds and calls nothing, and the few opcodes for plain containers are
carried out here; every other one is damage. An ``Unpickler`` that refuses classes is no way: eight bytes can make it
take 4 GiB (test_flight_dump.py), and it cannot be stopped when its time is up.
Formats 2.1 (torch 2.4) to 2.10 (torch 2.13) have the same keys, as far as they are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickletools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from slurmft.ipc.channel import Fields, Name, Rank, Text200
from slurmft.policy.judge import Progress
from slurmft.system.files import read_bytes
from slurmft.system.foreign_text import one_line

MAX_DUMP_BYTES = 64 << 20
"""2000 collectives with their stacks are about 2 MB."""

MAX_OPCODES = 5_000_000
MAX_GROUPS, MAX_SPANS, MAX_MEMBERS = 16, 64, 1 << 18
MAX_TEXT = 120
MAX_AGE_S = 120.0
"""Older dumps are of an earlier hang."""

_LOOK_EVERY = 4096
"""Opcodes between two looks at the clock."""

log = logging.getLogger(__name__)

_MARK = object()
_TORCH = re.compile(r"/(torch|slurmft)/|^<|\.(cpp|h|hpp|cc)$")
"""Files whose frames do not say where a collective was called."""


class BadDump(ValueError):
    """Not a dump, a damaged one, or one that took too long to read."""


def read_dump(path: Path, within_s: float = 10.0) -> list[Progress]:
    """How far the rank had come in each of its groups, those first in which it waits.

    Raises:
        BadDump: it is none, or damaged, or was not read within the time.
        OSError: it cannot be read.
    """
    return progress_of(plain(read_bytes(path, limit_bytes=MAX_DUMP_BYTES, follow=False), within_s))


def read_new(paths: Mapping[int, Path], seen: dict[int, tuple[int, int]], within_s: float) -> dict[int, list[Progress]]:
    """Progress of those of these ranks whose dumps are new since the last call, as far as the time allows.

    Args:
        paths: a dump of each rank; most have none.
        seen: the dumps that have been read; kept by the caller, and changed here.
    """
    deadline, found = time.monotonic() + within_s, {}
    for rank, path in paths.items():
        try:
            status = path.lstat()
            stamp = (status.st_mtime_ns, status.st_size)
            if seen.get(rank) != stamp and time.time() - status.st_mtime < MAX_AGE_S:
                found[rank] = read_dump(path, deadline - time.monotonic())
                seen[rank] = stamp
        except FileNotFoundError:
            continue
        except (BadDump, OSError) as error:
            log.warning("the flight recorder's dump of rank %d was not read: %s", rank, error)
    return found


def progress_of(dump: object) -> list[Progress]:
    """As ``read_dump``, of the file's content; values that do not fit are left out.

    Raises:
        BadDump: it has no recorder's keys.
    """
    if not isinstance(dump, Mapping) or not isinstance(dump.get("version"), str) or "pg_config" not in dump:
        raise BadDump("it is not a flight recorder's")
    members = _members(dump["pg_config"])
    status = dump.get("pg_status")
    groups: dict[tuple[str, str], _Group] = {}
    for entry in _list(dump.get("entries")):
        if isinstance(entry, Mapping) and (names := _group_of(entry)) is not None:
            groups.setdefault(names, _Group()).take(entry)
    found = []
    for (name, description), group in groups.items():
        group.complete(status.get(group.id) if isinstance(status, Mapping) else None)
        found.append(
            Progress(
                group=_text(name), description=_text(description), members=members.get(name, ()), entered=group.entered,
                done=group.done, operation=group.operation, called_from=group.called_from,
            )
        )  # fmt: skip
    found.sort(key=lambda each: each.entered <= each.done)
    return found[:MAX_GROUPS]


class _Group:
    """The collectives of one group, without point-to-point transfers."""

    def __init__(self) -> None:
        self.id, self.entered, self.done = "", 0, 0
        self.operation = self.called_from = ""
        self._open: dict[int, Mapping[Any, Any]] = {}
        self._sends = False

    def take(self, entry: Mapping[Any, Any]) -> None:
        number, group = entry.get("collective_seq_id"), entry.get("pg_id")
        self.id = str(group) if _is_count(group) else self.id
        if entry.get("is_p2p") is not False or not _is_count(number):
            self._sends = True
            return
        self.entered = max(self.entered, number)
        if entry.get("state") == "completed":
            self.done = max(self.done, number)
        else:
            self._open.setdefault(number, entry)

    def complete(self, status: object) -> None:
        """Take in the watchdog's progress of the group, whose numbers count sends too where there are any."""
        if (
            isinstance(status, Mapping)
            and not self._sends
            and _is_count(done := status.get("last_completed_collective"))
        ):
            self.done = max(self.done, min(done, self.entered))
        waits = sorted(number for number in self._open if number > self.done)
        if not waits:
            self.done = self.entered
            return
        self.done, first = waits[0] - 1, self._open[waits[0]]
        shapes = [shape for shape in _list(first.get("input_sizes"))[:4] if _is_shape(shape)]
        name = _text(first.get("profiling_name")).rpartition(":")[2]
        self.operation = _text(f"{name} of {', '.join(map(str, shapes))}" if shapes else name)
        self.called_from = _called_from(first.get("frames"))


def _group_of(entry: Mapping[Any, Any]) -> tuple[str, str] | None:
    names = entry.get("process_group")
    if isinstance(names, str):
        return names, ""
    if isinstance(names, tuple) and len(names) == 2 and all(isinstance(each, str) for each in names):
        return names
    return None


def _members(config: object) -> dict[str, tuple[tuple[int, int], ...]]:
    """The ranks of each group, which torch writes as text, as spans; none where they would be too many spans."""
    found = {}
    for name, facts in config.items() if isinstance(config, Mapping) else ():
        ranks = facts.get("ranks") if isinstance(facts, Mapping) else None
        if isinstance(name, str) and isinstance(ranks, str) and re.fullmatch(r"\[[0-9, ]*\]", ranks):
            spans: list[tuple[int, int]] = []
            for rank in sorted({int(word[:9]) for word in ranks[1:-1].split(",")[:MAX_MEMBERS] if word.strip()}):
                if spans and spans[-1][1] == rank - 1:
                    spans[-1] = (spans[-1][0], rank)
                else:
                    spans.append((rank, rank))
            found[name] = tuple(spans) if len(spans) <= MAX_SPANS else ()
    return found


def _called_from(frames: object) -> str:
    """The innermost frame that is not torch's."""
    for frame in _list(frames)[:100]:
        file, line = (frame.get("filename"), frame.get("line")) if isinstance(frame, Mapping) else (None, None)
        if isinstance(file, str) and _is_count(line) and not _TORCH.search(file):
            return _text(f"{_text(frame.get('name'))} ({file.rpartition('/')[2]}:{line})")
    return ""


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(map(_is_count, value))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return one_line(value[:MAX_TEXT])[:MAX_TEXT] if isinstance(value, str) else ""


# Messages from an agent to the supervisor


# The pickle


def plain(data: bytes, within_s: float = 10.0) -> object:
    """The plain containers that a pickle builds: dicts, lists, tuples, texts, numbers, None.

    Raises:
        BadDump: it is damaged, endless, or wants anything else than those.
    """
    try:
        return _run(data, time.monotonic() + within_s)
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise error if isinstance(error, BadDump) else BadDump("it is damaged, or cut short") from error


def _run(data: bytes, deadline: float) -> object:
    """Carry out the opcodes, as the standard library reads them."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for count, (code, argument, at) in enumerate(pickletools.genops(data)):
        if count >= MAX_OPCODES or (not count % _LOOK_EVERY and time.monotonic() > deadline):
            break
        name = code.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _GET:
            stack.append(memo[argument])
        elif name in _PUT:
            memo[argument] = stack[-1]
        elif name in _BUILDERS:
            _BUILDERS[name](stack)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name == "STOP":
            return stack[-1]
        elif name not in _SKIPPED:
            raise BadDump(f"opcode {name} at byte {at} builds no plain container")
    raise BadDump("it is cut short, or takes too long to read")


def _pop(stack: list[Any], size: int) -> list[Any]:
    items = stack[len(stack) - size :] if size <= len(stack) else []
    if len(items) < size or any(item is _MARK for item in items):
        raise BadDump("it is damaged")
    return items


def _to_mark(stack: list[Any]) -> list[Any]:
    place = len(stack) - 1
    while stack[place] is not _MARK:
        place -= 1
        if place < 0:
            raise BadDump("it is damaged")
    items = stack[place + 1 :]
    del stack[place:]
    return items


def _append(stack: list[Any]) -> None:
    item = stack.pop()
    _listed(stack[-1]).append(item)


def _appends(stack: list[Any]) -> None:
    items = _to_mark(stack)
    _listed(stack[-1]).extend(items)


def _set_item(stack: list[Any]) -> None:
    key, value = _pop(stack, 2)
    del stack[-2:]
    _mapped(stack[-1])[_key(key)] = value


def _set_items(stack: list[Any]) -> None:
    items = _to_mark(stack)
    target = _mapped(stack[-1])
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[_key(key)] = value


def _tuple(stack: list[Any]) -> None:
    stack.append(tuple(_to_mark(stack)))


def _listed(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise BadDump("it is damaged")
    return value


def _mapped(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise BadDump("it is damaged")
    return value


def _key(value: object) -> str | int:
    """Nested tuples would be hashed recursively."""
    if not isinstance(value, str | int):
        raise BadDump("it is damaged")
    return value


def _tuple_of(size: int) -> Callable[[list[Any]], None]:
    def build(stack: list[Any]) -> None:
        items = _pop(stack, size)
        stack[-size:] = [tuple(items)]

    return build


_VALUES = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
)
_GET, _PUT = frozenset({"BINGET", "LONG_BINGET"}), frozenset({"BINPUT", "LONG_BINPUT"})
_SKIPPED = frozenset({"PROTO", "FRAME"})
_BUILDERS: Mapping[str, Callable[[list[Any]], None]] = {
    "NONE": lambda stack: stack.append(None), "NEWTRUE": lambda stack: stack.append(True),
    "NEWFALSE": lambda stack: stack.append(False), "MARK": lambda stack: stack.append(_MARK),
    "EMPTY_DICT": lambda stack: stack.append({}), "EMPTY_LIST": lambda stack: stack.append([]),
    "EMPTY_TUPLE": lambda stack: stack.append(()), "TUPLE": _tuple, "TUPLE1": _tuple_of(1), "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3), "APPEND": _append, "APPENDS": _appends, "SETITEM": _set_item, "SETITEMS": _set_items,
}  # fmt: skip


# --- NCCL's own report on a job, from NCCL 2.24 on (RAS): processes that do not answer, and ranks that are behind ---
# It comes as text from a port of the ranks' node, in the form that
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html shows. That form differs between
# releases, and anybody on the node may listen at that port: what does not fit is left out, and no text takes long.

RAS_VARIABLE, RAS_DEFAULT = "NCCL_RAS_ADDR", "localhost:28028"
MAX_REPORT_BYTES, MAX_LINE, MAX_OUTLIERS = 4 << 20, 400, 64

_BLOCK = re.compile(r"Communicator ranks have different (\w{1,40}) operation counts", re.ASCII)
_COUNT = r"(?:launched up to operation (\d{1,18})|not launched any operations)"
_HOST = r"on node ([\w.:%-]{1,200})"
_PROCESS = rf" -- GPU .{{1,60}}? managed by process (\d{{1,9}}) {_HOST}"
_GROUP = re.compile(rf"\d{{1,9}} ranks have {_COUNT}", re.ASCII)
_MEMBER = re.compile(rf"Rank \d{{1,9}}{_PROCESS}", re.ASCII)
_ALONE = re.compile(rf"Rank \d{{1,9}} has {_COUNT}{_PROCESS}", re.ASCII)
_MISSING = re.compile(rf"Process (\d{{1,9}}) {_HOST} managing GPU", re.ASCII)


class Outlier(Fields, frozen=True, kw_only=True):
    """A process that is not where the others are."""

    pid: Rank
    host: Name
    """As NCCL names it: a host's name or address."""

    what: Text200


@dataclass(slots=True)
class _Block:
    """The ranks of one communicator by how many collectives they have launched, as far as they are listed."""

    kind: str
    counts: list[int] = field(default_factory=list)
    listed: list[tuple[int, tuple[int, str]]] = field(default_factory=list)


def outliers(text: str) -> list[Outlier]:
    """The processes of a report that the others wait for, as far as it shows them; at most MAX_OUTLIERS."""
    behind: dict[tuple[int, str], str] = {}
    ahead: set[tuple[int, str]] = set()
    missing: dict[tuple[int, str], str] = {}
    lines = [line[:MAX_LINE].strip() for line in text[:MAX_REPORT_BYTES].split("\n")]
    for line in lines:
        if match := _MISSING.match(line):
            missing.setdefault((int(match[1]), match[2]), "does not answer NCCL's RAS")
    for block in _blocks(lines):
        newest = max(block.counts, default=0)
        for count, process in block.listed:
            if count == newest:
                ahead.add(process)
            else:
                behind.setdefault(process, f"has launched {count} {block.kind} operations, and others {newest}")
    found = {**behind, **missing}
    return [Outlier(pid=pid, host=host, what=f"{what} (NCCL's RAS)")
            for (pid, host), what in found.items() if (pid, host) not in ahead][:MAX_OUTLIERS]  # fmt: skip


def _blocks(lines: Iterable[str]) -> Iterator[_Block]:
    block: _Block | None = None
    for line in lines:
        if match := _BLOCK.match(line):
            if block is not None:
                yield block
            block = _Block(match[1])
        elif block is not None and (match := _GROUP.match(line)):
            block.counts.append(int(match[1] or 0))
        elif block is not None and (match := _ALONE.match(line)):
            block.counts.append(int(match[1] or 0))
            block.listed.append((block.counts[-1], (int(match[2]), match[3])))
        elif block is not None and block.counts and (match := _MEMBER.match(line)):
            block.listed.append((block.counts[-1], (int(match[1]), match[2])))
        elif block is not None:
            yield block
            block = None
    if block is not None:
        yield block


async def ask_ras(environment: Mapping[str, str], within_s: float) -> str:
    """The report of the ranks on this node; empty where none comes in time. Never raises."""
    host, _, port = (environment.get(RAS_VARIABLE) or RAS_DEFAULT).rpartition(":")
    received = bytearray()
    writer: asyncio.StreamWriter | None = None
    if within_s <= 0:
        return ""
    with contextlib.suppress(OSError, ValueError, OverflowError):  # TimeoutError is an OSError
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(b"verbose status\n")
            while len(received) < MAX_REPORT_BYTES and (piece := await reader.read(1 << 16)):
                received += piece
    if writer is not None:
        writer.transport.abort()
    return received.decode(errors="replace")
