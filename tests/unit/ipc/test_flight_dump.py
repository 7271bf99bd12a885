"""What the ranks' flight recorders say before a kill: dumps that torch itself has written, and hostile ones.

``data/flight_recorder`` was dumped by torch 2.13 (``_dump_fr_trace``, four ranks over gloo, paths replaced). Those of
NCCL are built from the example in https://docs.pytorch.org/tutorials/prototype/flight_recorder_tutorial.html.
"""

import contextlib
import json
import os
import pickle
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.ipc.channel import BadMessage
from slurmft.ipc.flight_dump import (
    MAX_DUMP_BYTES,
    BadDump,
    plain,
    progress_of,
    read_dump,
    read_new,
)
from slurmft.ipc.messages import EvidenceReply
from slurmft.policy.judge import Progress, Summary, Where, absent_ranks, blame, stuck_collectives, stuck_told

RECORDED = Path(__file__).parents[1] / "data" / "flight_recorder"
EMPTY_OF_2_6 = (
    b"\x80\x02}(X\x07\x00\x00\x00versionq\x00X\x03\x00\x00\x002.4q\x01X\t\x00\x00\x00pg_configq\x02}(uX\t\x00\x00\x00"
    b"pg_statusq\x03}(uX\x07\x00\x00\x00entriesq\x04](euq\x05."
)
"""As torch 2.6.0+cu124 dumps it (``_dump_nccl_trace``) before the first collective."""


def recorded(kind: str) -> dict[int, list[Progress]]:
    return {rank: read_dump(RECORDED / f"{kind}-rank-{rank}") for rank in range(4)}


def entry(number: int, state: str = "completed", **changes: Any) -> dict[str, Any]:
    at = 1724779239936775119 + number
    return {
        "frames": [{"name": "all_reduce", "filename": "/env/torch/distributed/distributed_c10d.py", "line": 2501},
                   {"name": "step", "filename": "/home/ada/train.py", "line": 21}],
        "record_id": number - 1, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": number, "p2p_seq_id": 0,
        "op_id": number, "profiling_name": "nccl:all_reduce", "time_created_ns": at, "input_sizes": [[3, 4]],
        "input_dtypes": ["Float"], "output_sizes": [[3, 4]], "output_dtypes": ["Float"], "state": state,
        "time_discovered_started_ns": None, "retired": state == "completed", "timeout_ms": 600000, "is_p2p": False,
        "time_discovered_completed_ns": at + 39036706 if state == "completed" else None, **changes,
    }  # fmt: skip


def of_nccl(entries: list[dict[str, Any]], ranks: str = "[0, 1, 2, 3]", **groups: str) -> dict[str, Any]:
    config = {"0": ("default_pg", ranks), **{name: ("mesh_tp", text) for name, text in groups.items()}}
    return {
        "version": "2.4", "entries": entries, "nccl_comm_state": {"4242": {"rank": "0"}},
        "pg_config": {name: {"name": name, "desc": desc, "ranks": text} for name, (desc, text) in config.items()},
        "pg_status": {"0": {"last_enqueued_collective": 2, "last_started_collective": -1,
                            "last_completed_collective": 0}},
    }  # fmt: skip


def test_torchs_own_dumps_name_the_rank_that_others_wait_for():
    stuck = stuck_collectives(recorded("missing"))
    assert stuck_told(stuck) == [
        "all_reduce of [4, 3], number 4 of the group 0 (default_pg): entered by ranks 0-1, 3; not entered by rank 2; "
        "called from <module> (train1.py:13)"
    ]
    assert absent_ranks(stuck) == {
        2: "has not entered all_reduce of [4, 3], number 4 of the group 0 (default_pg), which 3 ranks wait for"
    }


def test_torchs_own_dumps_name_the_rank_that_called_something_else():
    (line,) = stuck_told(stuck_collectives(recorded("mismatch")))
    assert "entered by ranks 0-3; rank 1 called broadcast of [7] instead" in line
    assert absent_ranks(stuck_collectives(recorded("mismatch"))) == {}


def test_the_opcodes_give_what_python_would_read():
    for path in RECORDED.iterdir():
        assert plain(path.read_bytes()) == pickle.loads(path.read_bytes()), path
    assert progress_of(plain(EMPTY_OF_2_6)) == []


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_members_and_stacks_of_nccls_dumps(protocol):
    dump = of_nccl([entry(1), entry(2, "started"), entry(3, "scheduled")], ranks="[0, 1, 2, 5]")
    (found,) = progress_of(plain(pickle.dumps(dump, protocol)))
    assert found == Progress(
        group="0", description="default_pg", members=((0, 2), (5, 5)), entered=3, done=1,
        operation="all_reduce of [3, 4]", called_from="step (train.py:21)",
    )  # fmt: skip


def looks(**ranks: list[Progress]) -> dict[int, list[Progress]]:
    return {int(name[1:]): groups for name, groups in ranks.items()}


def world(entered: int, done: int, operation: str = "all_reduce of [8]") -> Progress:
    return Progress(group="0", description="default_pg", members=((0, 3),), entered=entered, done=done,
                    operation=operation if entered > done else "")  # fmt: skip


def pair(first: int, entered: int, done: int) -> Progress:
    return Progress(group=f"tp{first}", members=((first, first + 1),), entered=entered, done=done,
                    operation="all_gather" if entered > done else "")  # fmt: skip


W, D = world(5, 4), world(4, 4)


@pytest.mark.parametrize(
    ("records", "absent", "words"),
    [
        (looks(r0=[D], r1=[D], r2=[D], r3=[D]), [], []),
        (looks(r0=[W], r1=[W], r2=[D], r3=[W]), [2], ["not entered by rank 2"]),
        (looks(r0=[W], r1=[W], r2=[], r3=[W]), [2], ["not entered by rank 2"]),
        (looks(r0=[W], r1=[W], r2=[world(9, 4)], r3=[W]), [], ["by all of its ranks: the network or a device"]),
        (looks(r0=[W], r1=[W], r3=[W]), [], ["no record of rank 2"]),
        (looks(r0=[W], r1=[world(7, 7)], r2=[W], r3=[world(7, 7)]), [], ["by all of its ranks"]),
        # rank 2 waits for rank 3 alone, so it is rank 3 that all others wait for
        (looks(r0=[W], r1=[W], r2=[D, pair(2, 3, 2)], r3=[D, pair(2, 2, 2)]), [3],
         ["not entered by ranks 2-3", "number 3 of the group tp2: entered by rank 2; not entered by rank 3"]),
        (looks(r0=[W, pair(0, 2, 2)], r1=[D, pair(0, 3, 2)], r2=[W], r3=[W]), [],
         ["not entered by rank 1", "not entered by rank 0", "in other orders"]),
    ],
    ids=["nothing", "absent", "never used the group", "all", "no record", "some have left it", "in a chain", "crossed"],
)  # fmt: skip
def test_who_had_not_entered_what(records, absent, words):
    stuck = stuck_collectives(records)
    assert sorted(absent_ranks(stuck)) == absent
    told = stuck_told(stuck)
    assert len(told) == len(words)
    assert all(each in line for each, line in zip(words, told, strict=True)), told


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.lists(st.builds(lambda entered, back, name: Progress(group=name, entered=entered, done=entered - back,
                                                                members=((0, 9),)),
                           st.integers(2, 6), st.integers(0, 2), st.sampled_from("ab")),
                 max_size=2, unique_by=lambda each: each.group), max_size=10)
)  # fmt: skip
def test_a_rank_that_waits_is_never_the_one_that_others_wait_for(records):
    stuck = stuck_collectives(records)
    named = absent_ranks(stuck)
    assert not {rank for each in stuck for rank in each.waiting} & named.keys()
    assert named.keys() <= records.keys()
    for each in stuck:
        assert not set(each.waiting) & set(each.absent)
        assert each.waiting


# whose fault it is


def summary(rank: int, where: Where = Where.ELSEWHERE, **changes: Any) -> Summary:
    values = {"doing": "is in item (train.py:9)", "attached": True, "step": 7, "tick": 7, "recorded": True, **changes}
    return Summary(rank=rank, node="n1", where=where, **values)


ABSENT = {2: "has not entered all_reduce, which 3 ranks wait for"}


def test_the_record_decides_where_all_stacks_are_alike():
    ranks = [summary(rank) for rank in range(4)]
    assert blame(ranks).culprits == ()
    (named,) = blame(ranks, absent=ABSENT).culprits
    assert named.rank == 2
    assert named.reason.startswith("has not entered all_reduce, which 3 ranks wait for; is in item")


def test_an_abort_by_torchs_watchdog_is_no_crash_of_the_rank_that_it_ends():
    ranks = [summary(rank, Where.DEAD, exit_code=-6, doing="is dead") for rank in (0, 1, 3)] + [summary(2)]
    assert [each.rank for each in blame(ranks, absent=ABSENT).culprits] == [2]
    ended = [summary(rank, Where.DEAD, exit_code=-6, doing="is dead") for rank in range(4)]
    assert [each.rank for each in blame(ended, absent=ABSENT).culprits] == [2]
    assert blame(ended).culprits == ()
    assert "torch's watchdog" in blame(ended).undecided
    without = [summary(rank, Where.DEAD, exit_code=-6, recorded=False) for rank in range(2)]
    assert [each.rank for each in blame(without).culprits] == [0, 1], "an abort of its own is a crash"


def test_a_crash_goes_before_what_the_others_have_recorded():
    ranks = [summary(0), summary(1, Where.DEAD, exit_code=-11, recorded=False), summary(2), summary(3)]
    assert [each.rank for each in blame(ranks, absent=ABSENT).culprits] == [1]


# what may lie there


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/slurmft-was-run",)


def test_nothing_in_a_dump_is_ever_called(tmp_path):
    for protocol in (0, 1, 2, 4, 5):
        with pytest.raises(BadDump):
            plain(pickle.dumps({"version": Evil()}, protocol))
    assert not Path("/tmp/slurmft-was-run").exists()


MEMO_BOMB = b"\x80\x02]r\xff\xff\xff\xff."
"""A memo of four billion entries, which C's unpickler allocates."""

NESTED = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."


@of_each(
    data=[b"", b".", b"\x80", b"\x80\x02", b"(", b"u.", b"e.", b"\x80\x02}(K\x01u.", b"\x80\x02X\xff\xff\xff\xffabc.",
     b"\x80\x04\x8d" + b"\xff" * 8 + b".", b"\x80\x02h\x07.", b"\x80\x02K\x01a.", b"\x80\x02K\x01K\x02(u.",
     b"\x80\x02c__builtin__\neval\n.", b"\x80\x02ibuiltins\neval\n.", b"\x80\x04\x93.", b"\x80\x02\x82\x01.",
     b"\x80\x02N}b.", b"\x80\x02NQ.", b"\x80\x05\x97.", b"\x80\x02}](]Nu.", b"\x80\x02}((N)\x86Nu.", b"(\x85.", b"(a."],
)  # fmt: skip
def test_damage_is_told_as_damage(data):
    with pytest.raises(BadDump):
        plain(data)


@given(
    st.binary(max_size=200)
    | st.lists(st.sampled_from(list(b"\x80\x02()]}aesutNKXhq.\x85\x86\x94")), max_size=60).map(bytes)
)
def test_bytes_of_any_kind_are_read_or_refused(data):
    with contextlib.suppress(BadDump):
        progress_of(plain(data))


def test_every_cut_of_a_real_dump_is_refused():
    whole = (RECORDED / "missing-rank-0").read_bytes()
    for length in range(len(whole) - 1):
        with pytest.raises(BadDump):
            progress_of(plain(whole[:length]))


def test_what_is_endless_ends(tmp_path):
    began = time.monotonic()
    assert plain(MEMO_BOMB) == []
    plain(NESTED)
    with pytest.raises(BadDump, match="takes too long"):
        plain(b"\x80\x02" + b"N" * 20_000_000)
    with pytest.raises(BadDump, match="takes too long"):
        plain(b"\x80\x02" + b"N" * 100_000, within_s=0.0)
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(MAX_DUMP_BYTES + 1)
    with pytest.raises(OSError, match="longer than"):
        read_dump(huge)
    assert time.monotonic() - began < 60


def _tree(depth: int) -> Any:
    tree: Any = "x"
    for _ in range(depth):
        tree = [tree] * 10
    return tree


@of_each(
    changes=[{"entries": None}, {"entries": {}}, {"pg_config": []}, {"pg_status": "x"},
     {"pg_config": {"0": {"ranks": 7}}},
     {"pg_config": {"0": {"ranks": "[99999999999999, 1]"}}}, {"pg_config": {"0": None, 7: {}}}],
)  # fmt: skip
def test_values_of_other_types_are_left_out(changes):
    progress_of({**of_nccl([entry(1)]), **changes})


@of_each(
    changes=[
        {name: value} for name in entry(1) for value in (None, -1, 1 << 70, "\x1b[31m", [], {}, _tree(40), True, 1.5)
    ],
)
def test_entries_of_other_types_are_left_out(changes):
    found = progress_of(of_nccl([{**entry(1, "scheduled"), **changes}]))
    shown = json.dumps([asdict(each) for each in found])
    assert len(shown) < 2000
    assert "\\u001b" not in shown


def test_the_lines_stay_short_with_many_ranks_and_groups():
    began = time.monotonic()
    records = {
        rank: [Progress(group=f"g{group}", members=((0, 9999),), entered=4 + rank % 2, done=4, operation="x" * 120)
               for group in range(10)]
        for rank in range(10_000)
    }  # fmt: skip
    told = stuck_told(stuck_collectives(records))
    assert len(json.dumps(told)) < 20_000
    assert time.monotonic() - began < 30


# on its way


def evidence(**changes: Any) -> dict[str, Any]:
    one = {"rank": 0, "pid": 7, "kind": "elsewhere", "doing": "x", "process": "S", "wchan": "", "attached": True,
           "state": 1, "step": 1, "tick": 1, "sections": [], "python_top": [], "killed": False, "exit_code": None,
           "collectives": [{**asdict(world(5, 4)), **changes}]}  # fmt: skip
    return {"kind": "reply", "ranks": [json.loads(json.dumps(one))]}


def test_progress_travels_as_it_is():
    (found,) = EvidenceReply.parse(evidence(), "a reply").ranks
    assert found.collectives == (world(5, 4),)


@of_each(changes=[{"group": 7}, {"group": "x" * 121}, {"entered": -1}, {"done": True}, {"members": [[0, 1 << 30]]},
     {"members": [[0, 200_000]] * 3}, {"members": [[3, 1]]}, {"members": [[1]]}, {"members": 7}])  # fmt: skip
def test_progress_of_another_shape_is_refused(changes):
    with pytest.raises(BadMessage):
        EvidenceReply.parse(evidence(**changes), "a reply")


def test_progress_of_a_newer_version_is_taken():
    assert EvidenceReply.parse(evidence(other=1), "a reply").ranks[0].collectives == (world(5, 4),)


def test_a_dump_is_read_once_and_an_old_one_never(tmp_path):
    path, seen = tmp_path / "flight-recorder-rank-0", {}
    paths = {0: path, 1: tmp_path / "none"}
    assert read_new(paths, seen, 5.0) == {}
    path.write_bytes(b"damaged")
    assert read_new(paths, seen, 5.0) == {}
    path.write_bytes((RECORDED / "missing-rank-0").read_bytes())
    assert [each.entered for each in read_new(paths, seen, 5.0)[0]] == [4, 3]
    assert read_new(paths, seen, 5.0) == {}
    path.write_bytes(pickle.dumps(of_nccl([entry(1), entry(2)]), 2))
    old = time.time() - 3600
    os.utime(path, (old, old))
    assert read_new(paths, seen, 5.0) == {}, "it tells of an earlier hang"
    path.unlink()
    os.mkfifo(path)
    assert read_new(paths, seen, 5.0) == {}
