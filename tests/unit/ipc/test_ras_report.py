"""NCCL's report on a job: the samples of its documentation, and hostile ones.

The samples are those of https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html; the form of
2.26 and later, with one operation and a single rank on a line, is that of src/ras/client_support.cc in NVIDIA/nccl.
"""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import slowness

from slurmft.ipc.flight_dump import MAX_OUTLIERS, RAS_VARIABLE, ask_ras, outliers
from slurmft.policy.judge import Summary, Where, blame
from slurmft.policy.stop import tick_of
from slurmft.supervisor.hangs import late_ranks

WELL = """Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         8         4         1         4        32   RUNNING      OK
"""
BEHIND = """Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
"""
ALONE = """#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1
  Communicator ranks have different Broadcast operation counts
  7 ranks have launched up to operation 2
  Rank 3 has not launched any operations -- GPU 3 (NVML 5) managed by process 91 on node node0
"""
SILENT = """Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21
"""
FINALIZING = """#0-0 (9e17999afaa87dbb) MISMATCH
  Communicator ranks have different status
  26 ranks have status UNKNOWN
  4 ranks have status RUNNING
  Rank 0 -- GPU 0 managed by process 507285 on node 172.16.64.210
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        (WELL, []),
        (BEHIND, [(483072, "6649 collective operations, and others 6650"), (483074, "6649 collective")]),
        (ALONE, [(1650386, "60 AllReduce operations, and others 64"), (91, "0 Broadcast operations, and others 2")]),
        (SILENT, [(3487984, "does not answer")]),
        (FINALIZING, []),
        (SILENT.replace("INCOMPLETE", "DEAD", 1), [(3487984, "does not answer")]),
        ("\r\n".join(BEHIND.splitlines()), [(483072, "6649"), (483074, "6649")]),
        (BEHIND.replace("26 ranks", "1 ranks").replace("6650", "6600"), []),
    ],
    ids=["nothing", "well", "behind", "one of a kind", "silent", "finalizing", "dead", "CRLF", "a few are ahead"],
)
def test_samples(text: str, found: list[tuple[int, str]]) -> None:
    told = outliers(text)
    assert [each.pid for each in told] == [pid for pid, _ in found]
    assert [words for each, (_, words) in zip(told, found, strict=True) if words not in each.what] == []


def test_one_that_is_ahead_anywhere_is_waiting() -> None:
    """A rank that is behind in one group because it waits in another has others ahead of it there, and not here."""
    other = """  Communicator ranks have different AllGather operation counts
  3 ranks have launched up to operation 9
  Rank 1 has launched up to operation 12 -- GPU 3 managed by process 1650386 on node node1
"""
    assert 1650386 not in {each.pid for each in outliers(ALONE + other)}


LINES = [
    *BEHIND.splitlines(),
    *ALONE.splitlines(),
    *SILENT.splitlines(),
    "  Rank 1 -- GPU " + "9" * 500,
    "\x00\x1b[31m",
]


@given(st.lists(st.sampled_from(LINES) | st.text(max_size=200), max_size=60))
def test_whatever_comes_is_bounded_and_printable(lines: list[str]) -> None:
    for each in (found := outliers("\n".join(lines))):
        assert each.what.isprintable() and each.host.isprintable() and 0 <= each.pid < 10**9
    assert len(found) <= MAX_OUTLIERS


@pytest.mark.parametrize(
    "text",
    ["Rank 1 -- GPU " * 300_000, "Communicator ranks have different a operation counts\n" * 80_000,
     ALONE.replace("3 managed", f"{'1 managed by ' * 300_000}"), "\n" * 4_000_000, "9 ranks have " * 300_000,
     "".join(f"Process {n} on node n{n} managing GPU 1\n" for n in range(90_000))],
    ids=["members", "blocks", "a long line", "empty lines", "groups", "processes"],
)  # fmt: skip
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    assert len(outliers(text)) <= MAX_OUTLIERS
    assert time.process_time() - began < 5.0


def answering(text: bytes, *, hangs: bool = False, within_s: float = 5.0) -> tuple[str, bytes]:
    """What ``ask`` gets from a port that says this, and what it had said."""
    heard, writers = b"", []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        writers.append(writer)
        heard = await reader.readline()
        writer.write(text)
        await writer.drain()
        if not hangs:
            writer.close()

    async def both() -> str:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await ask_ras({RAS_VARIABLE: f"127.0.0.1:{port}"}, within_s)
        finally:
            server.close()
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0)

    return asyncio.run(both()), heard


def test_the_report_is_asked_for_in_words_and_never_waited_for_too_long() -> None:
    assert answering(BEHIND.encode()) == (BEHIND, b"verbose status\n")
    assert answering(b"\xff\xfe")[0] == "\ufffd\ufffd"
    began = time.monotonic()
    assert answering(SILENT.encode(), hangs=True, within_s=0.3)[0] == SILENT, "what has come is used"
    assert time.monotonic() - began < 3.0 * slowness()
    for place in ("127.0.0.1:1", "127.0.0.1:x", "127.0.0.1:99999999999", "", "no such host:1"):
        assert asyncio.run(ask_ras({RAS_VARIABLE: place}, 0.2)) == ""
    assert asyncio.run(ask_ras({}, 0.0)) == ""


def test_processes_become_ranks_where_that_is_certain() -> None:
    told = outliers(ALONE)
    pids = {rank: (1000 + rank, f"n{rank // 4}", f"10.0.0.{rank // 4}") for rank in range(8)}
    assert late_ranks(told, pids) == {}
    assert list(late_ranks(told, pids | {5: (1650386, "n1", "10.0.0.1")})) == [5]
    twice = pids | {1: (1650386, "n0", "10.0.0.0"), 5: (1650386, "n1", "10.0.0.1")}
    assert late_ranks(told, twice) == {}, "two nodes have given that number"
    assert list(late_ranks(told, twice | {5: (1650386, "node1", "10.0.0.1")})) == [5]
    assert late_ranks(told, {0: (91, "n0", ""), 1: (1650386, "n1", "")}) == {}, "most of them"


def test_a_rank_that_nccl_reports_is_the_culprit_where_all_stacks_are_alike() -> None:
    ranks = [Summary(rank=rank, node=f"n{rank // 2}", where=Where.ELSEWHERE, doing="is in item (train.py:7)",
                     attached=True, step=7, tick=tick_of(7)) for rank in range(4)]  # fmt: skip
    assert blame(ranks).culprits == ()
    pids = {rank: (1000 + rank, f"n{rank // 2}", "") for rank in range(3)} | {3: (1650386, "node1", "")}
    (named,) = blame(ranks, absent=late_ranks(outliers(ALONE), pids)).culprits
    assert (named.rank, named.node) == (3, "n1") and "60 AllReduce operations" in named.reason
