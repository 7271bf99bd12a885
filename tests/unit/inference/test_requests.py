"""Requests are read once, checked, and found by their numbers."""

import gzip
import json
import os
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from slurmft.config.inference import InferenceConfig
from slurmft.errors import ConfigError, SlurmftError, StorageError, UsageError
from slurmft.inference.requests import MAX_REQUEST_BYTES, Requests, load, prepare, request_of


def section(path: Path | str, **changes: object) -> InferenceConfig:
    return InferenceConfig.model_validate({"input": str(path), "engine": {"callable": "a:b"}, **changes})


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def all_of(folder: Path) -> list[dict]:
    batch = load(folder)
    assert batch is not None
    with Requests(folder) as requests:
        return [requests.get(index) for index in range(batch.total)]


def test_both_forms_are_taken_and_each_has_an_id(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        lines({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"x": 1}}, {"prompt": "hi"})
        + b"\n"
        + lines({"custom_id": 7, "prompt": "number"})
    )
    folder = tmp_path / "run"
    batch = prepare(section(source), folder)
    assert (batch.total, batch.bad) == (3, ())
    assert all_of(folder) == [
        {"id": "a", "url": "/v1/completions", "body": {"x": 1}},
        {"id": "in.jsonl:2", "body": {"prompt": "hi"}},
        {"id": "7", "body": {"prompt": "number"}},
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_compressed_input_is_the_same(tmp_path, suffix):
    content = lines(*({"prompt": f"{number}"} for number in range(5000)))
    packed = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}[suffix](content)
    source = tmp_path / f"in{suffix}"
    source.write_bytes(packed)
    prepare(section(source), tmp_path / "run")
    assert [each["body"]["prompt"] for each in all_of(tmp_path / "run")] == [str(number) for number in range(5000)]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    source = tmp_path / "in"
    (source / "b").mkdir(parents=True)
    (source / "b" / "1.jsonl").write_bytes(lines({"n": 2}))
    (source / "a.jsonl").write_bytes(lines({"n": 1}))
    (source / "notes.txt").write_text("not a request")
    prepare(section(source), tmp_path / "run")
    assert [each["id"] for each in all_of(tmp_path / "run")] == ["a.jsonl:1", "b/1.jsonl:1"]


def test_a_folder_that_holds_the_run_is_read_without_what_is_made_of_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines({"n": 1}))
    (tmp_path / "runs").mkdir()
    prepare(section(tmp_path), tmp_path / "runs" / "1")
    assert [each["id"] for each in all_of(tmp_path / "runs" / "1")] == ["a.jsonl:1"]


def test_an_input_that_is_made_of_an_input_is_refused_and_left_as_it_is(tmp_path):
    own = tmp_path / "requests.jsonl"
    own.write_bytes(lines({"n": 1}))
    with pytest.raises(UsageError, match="what is made of the input"):
        prepare(section(own), tmp_path)
    assert own.read_bytes() == lines({"n": 1})


def test_a_second_reading_changes_nothing_and_a_changed_input_is_refused(tmp_path):
    source, folder = tmp_path / "in.jsonl", tmp_path / "run"
    source.write_bytes(lines({"n": 1}))
    first = prepare(section(source), folder)
    assert prepare(section(source), folder) == first
    source.write_bytes(lines({"n": 2}))
    with pytest.raises(UsageError, match="is not what this run was started with"):
        prepare(section(source), folder)
    source.unlink()
    assert prepare(section(source), folder) == first, "the run has its own copy"


def test_an_id_that_is_there_twice_is_refused_and_nothing_is_kept(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines({"custom_id": "a", "n": 1}, {"n": 2}, {"custom_id": "a", "n": 3}))
    with pytest.raises(UsageError, match="'a' twice: requests 1 and 3 of 3"):
        prepare(section(source), tmp_path / "run")
    assert load(tmp_path / "run") is None


SERVER = {"command": ["transformers", "serve", "{port}"], "allow_paths": ["/mine"]}
BROKEN = [
    b"{", b"[]", b"3", b'{"x": NaN}', b'{"custom_id": "", "x": 1}', b'{"custom_id": true}', b'{"custom_id": ["a"]}',
    b'{"body": 3}', b'{"body": {}, "url": "http://elsewhere/"}', b'{"body": {}, "url": "//elsewhere/"}',
    b'{"body": {}, "url": "/v1/load_lora_adapter"}', b'{"body": {}, "url": "/SLEEP?level=1"}',
    b'{"body": {}, "url": "/v1/%6coad_lora_adapter"}', b'{"body": {}, "url": "/v1/../sleep"}',
    b'{"body": {}, "url": "/debug/x#y"}', b'{"body": {}, "url": "/load_model"}', b'{"x": 1e999}',
    b'{"body": {"stream": true}}', b'{"stream": 1}', b'{"body": {"stream": "false"}}',
    b'{"method": "POST", "url": "/v1/completions"}',
    b'{"body": {}, "method": "DELETE"}', b"\xff\xfe", b"[" * 100_000, b'{"custom_id": "' + b"a" * 600 + b'"}',
    b'{"x": "' + b"a" * MAX_REQUEST_BYTES + b'"}',
]  # fmt: skip


@pytest.mark.parametrize("line", BROKEN, ids=[str(number) for number in range(len(BROKEN))])
def test_a_broken_line_is_refused_or_reported(tmp_path, line):
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines({"n": 1}) + line + b"\n" + lines({"n": 3}))
    with pytest.raises(ConfigError, match=r"1 of 3 lines are no requests: in\.jsonl:2: "):
        prepare(section(source, engine=SERVER), tmp_path / "run")
    batch = prepare(section(source, engine=SERVER, on_bad_input="report"), tmp_path / "run")
    assert (batch.total, batch.bad) == (3, ((1, 2),))
    bad = all_of(tmp_path / "run")[1]
    assert bad["id"] == "in.jsonl:2" and bad["bad"]


def test_a_line_may_use_what_clients_may_use_and_a_callable_takes_any(tmp_path):
    taken = lines({"body": {}, "url": "/mine/x?y=1"}, {"body": {"stream": False}, "url": "/v1/embeddings"})
    (tmp_path / "in.jsonl").write_bytes(taken)
    assert prepare(section(tmp_path / "in.jsonl", engine=SERVER), tmp_path / "a").total == 2
    (tmp_path / "in.jsonl").write_bytes(taken + lines({"body": {"stream": True}, "url": "/any"}, {"stream": 3}))
    assert prepare(section(tmp_path / "in.jsonl"), tmp_path / "b").total == 4


@given(st.binary(max_size=200))
def test_any_line_is_a_request_or_a_problem(line):
    try:
        request = request_of(line, "here")
    except ValueError as error:
        assert str(error)
    else:
        assert isinstance(request["body"], dict) and json.dumps(request)


@pytest.mark.parametrize("kind", ["missing", "empty", "empty folder", "fifo", "torn gz", "not gz", "unreadable"])
def test_an_input_that_is_none_is_refused_before_anything_starts(tmp_path, kind):
    source = tmp_path / ("in.jsonl.gz" if "gz" in kind else "in.jsonl")
    match kind:
        case "empty":
            source.write_bytes(b"\n\n")
        case "empty folder":
            source.mkdir()
        case "fifo":
            os.mkfifo(source)
        case "torn gz":
            source.write_bytes(gzip.compress(lines(*({"n": n} for n in range(1000))))[:-20])
        case "not gz":
            source.write_bytes(b"plain")
        case "unreadable":
            source.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=r"inference\.input"):
        prepare(section(source), tmp_path / "run")
    assert load(tmp_path / "run") is None


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format": 1, "total": "x", "bad": [], "digest": ""}', b"[1]"])
def test_a_damaged_description_is_told(tmp_path, damage):
    source, folder = tmp_path / "in.jsonl", tmp_path / "run"
    source.write_bytes(lines({"n": 1}))
    prepare(section(source), folder)
    (folder / "input.json").write_bytes(damage)
    with pytest.raises(StorageError):
        load(folder)


def test_a_request_beyond_the_last_one_is_an_error(tmp_path):
    source, folder = tmp_path / "in.jsonl", tmp_path / "run"
    source.write_bytes(lines({"n": 1}))
    prepare(section(source), folder)
    with Requests(folder) as requests, pytest.raises(SlurmftError):
        requests.get(1)
