"""Results on a shared folder: what is written comes back, and what cannot be believed hides no other node."""

import json
import math
import multiprocessing
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.errors import StorageError, StorageUnavailable
from slurmft.health.checker import KEEP, checkup_of, read_results, result_of, write_result
from slurmft.policy.node_health import Checkup, ProbeResult, Problem, Status

FAILED = ProbeResult(name="disk", status=Status.CRITICAL, detail="full", value=1.5, unit="%", evidence=("/run/x",),
                     remedy="make room", problem=Problem.HARDWARE, took_s=0.25)  # fmt: skip
LOOK = Checkup(node="n1", at=1000.0, results=(FAILED,), context="healthcheck", level=1)


def test_what_is_written_comes_back(tmp_path):
    path = write_result(tmp_path / "a b", "n1", LOOK)
    assert path.stat().st_mode & 0o777 == 0o644
    assert read_results(tmp_path / "a b").checkups == {"n1": [LOOK]}


def test_of_what_is_well_only_the_name_is_kept(tmp_path):
    fine = ProbeResult(name="load", status=Status.OK, detail="load 1", value=1.0)
    path = write_result(tmp_path, "n1", replace(LOOK, results=(fine, FAILED)))
    assert "load 1" not in path.read_text()
    assert read_results(tmp_path).checkups["n1"][0].results == (
        FAILED, ProbeResult(name="load", status=Status.OK, detail=""),
    )  # fmt: skip


def test_only_the_newest_looks_are_kept(tmp_path):
    for at in range(KEEP + 5):
        write_result(tmp_path, "n1", replace(LOOK, at=float(at)))
    found = read_results(tmp_path).checkups["n1"]
    assert [look.at for look in found] == [float(at) for at in range(5, KEEP + 5)]


def test_no_folder_is_no_result(tmp_path):
    assert read_results(tmp_path / "none").checkups == {}


DAMAGE = {
    "empty": b"",
    "half": b'{"format": 1, "node": "n2", "checkups": [{"no',
    "no object": b"[]",
    "no format": b'{"checkups": []}',
    "newer": b'{"format": 99, "checkups": []}',
    "no checkups": b'{"format": 1}',
    "a stranger's": b'{"format": 1, "checkups": [{"node": "n3", "at": 1, "results": []}]}',
    "nan": b'{"format": 1, "checkups": [{"node": "n2", "at": NaN, "results": []}]}',
    "a huge number": b'{"format": 1, "checkups": [{"node": "n2", "at": 1' + b"0" * 400 + b', "results": []}]}',
    "no status": b'{"format": 1, "checkups": [{"node": "n2", "at": 1, "results": [{"name": "x", "status": 2}]}]}',
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_hides_no_other_node(tmp_path, content):
    write_result(tmp_path, "n1", LOOK)
    (tmp_path / "n2.json").write_bytes(content)
    found = read_results(tmp_path)
    assert found.checkups == {"n1": [LOOK]}
    assert len(found.problems) == 1
    assert "n2" in found.problems[0]
    write_result(tmp_path, "n2", replace(LOOK, node="n2"))  # the next look of that node heals it
    assert set(read_results(tmp_path).checkups) == {"n1", "n2"}


def test_names_that_are_none(tmp_path):
    for name in ("", "../n1", "a/b", "n 1", "-n", "n\n1", "x" * 300):
        with pytest.raises(StorageError, match="not the name of a node"):
            write_result(tmp_path, name, LOOK)
    for name in (".n1.json.x.tmp", "a b.json", "notes.txt"):
        (tmp_path / name).write_text("x")
    found = read_results(tmp_path)
    assert (found.checkups, len(found.problems)) == ({}, 1)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable):
        write_result(tmp_path / "file" / "below", "n1", LOOK)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_strangers_file_is_not_believed(tmp_path):
    path = write_result(tmp_path, "n1", LOOK)
    os.chown(path, 12345, 12345)
    found = read_results(tmp_path)
    assert found.checkups == {}
    assert "user 12345" in found.problems[0]


def _write_many(folder, node):
    for at in range(20):
        write_result(folder, node, replace(LOOK, node=node, at=float(at)))


def test_two_writers_at_once_leave_a_whole_file(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path, "n1")) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert read_results(tmp_path).problems == ()
    for writer in writers:
        writer.join()
    assert read_results(tmp_path).checkups["n1"]
    assert [path.name for path in tmp_path.iterdir()] == ["n1.json"]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["name", "status", "detail", "value", "evidence", "at", "node", "results", "problem",
                         "ok"]), inner),
    max_leaves=12,
)  # fmt: skip


@given(plain)
def test_anything_is_read_or_refused(value):
    for read in (checkup_of, result_of):
        try:
            found = read(value)
        except ValueError:
            continue
        assert isinstance(found, Checkup | ProbeResult)


@given(st.floats())
def test_a_number_that_is_none_is_left_out(number):
    value = result_of({"name": "x", "status": "OK", "value": number}).value
    assert value is None or (math.isfinite(value) and value == number)
    json.dumps(value, allow_nan=False)


def test_the_newest_long_look_outlives_the_short_ones(tmp_path):
    write_result(tmp_path, "n1", replace(LOOK, at=1.0, level=2))
    write_result(tmp_path, "n1", replace(LOOK, at=2.0, level=2))
    for at in range(3, KEEP + 20):
        write_result(tmp_path, "n1", replace(LOOK, at=float(at)))
    found = read_results(tmp_path).checkups["n1"]
    assert [look.at for look in found if look.level > 1] == [2.0]
    assert len(found) == KEEP + 1
    write_result(tmp_path, "n1", replace(LOOK, at=99.0, level=2))
    assert [look.at for look in read_results(tmp_path).checkups["n1"] if look.level > 1] == [99.0]
