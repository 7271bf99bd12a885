"""NCCL's own report on a job, from NCCL 2.24 on (RAS): processes that do not answer, and ranks that are behind in the
number of collectives that they have launched.

It comes as text from a port of the ranks' node, in the form that
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html shows. That form differs between
releases, and anybody on the node may listen at that port: what does not fit is left out, and no text takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from slurmft.ipc.channel import Fields, Name, Rank, Text200

VARIABLE, DEFAULT = "NCCL_RAS_ADDR", "localhost:28028"
MAX_BYTES, MAX_LINE, MAX_OUTLIERS = 4 << 20, 400, 64

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
    lines = [line[:MAX_LINE].strip() for line in text[:MAX_BYTES].split("\n")]
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


async def ask(environment: Mapping[str, str], within_s: float) -> str:
    """The report of the ranks on this node; empty where none comes in time. Never raises."""
    host, _, port = (environment.get(VARIABLE) or DEFAULT).rpartition(":")
    received = bytearray()
    writer: asyncio.StreamWriter | None = None
    if within_s <= 0:
        return ""
    with contextlib.suppress(OSError, ValueError, OverflowError):  # TimeoutError is an OSError
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(b"verbose status\n")
            while len(received) < MAX_BYTES and (piece := await reader.read(1 << 16)):
                received += piece
    if writer is not None:
        writer.transport.abort()
    return received.decode(errors="replace")
