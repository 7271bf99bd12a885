"""Parquet in and out: the same requests and answers as in JSON lines, in the same order, a group of rows at a time."""

import datetime
import decimal
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from click.testing import CliRunner

from slurmft.cli.main import cli
from slurmft.config.inference import InferenceConfig
from slurmft.errors import ConfigError, UsageError
from slurmft.inference import ledger as inference_ledger
from slurmft.inference.ledger import (
    Output,
    open_ledger,
    refuse_foreign_output,
    refuse_unwritable,
    segments_of,
    write_output,
)
from slurmft.inference.requests import Batch, Requests, prepare
from slurmft.storage.queue import SegmentWriter

COUNT = 50
ROWS = [{"custom_id": f"ü{number}" if number % 7 else f"\ud800{number}", "n": number} for number in range(COUNT)]


def prepared(source: Path, folder: Path) -> Batch:
    section = {"input": str(source), "engine": {"callable": "a:b"}}
    return prepare(InferenceConfig.model_validate(section), folder)


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """A batch of which every fifth request ended with an error, answered backwards."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    batch = prepared(source, tmp_path / "inference")
    ledger = open_ledger(batch, 1)
    writer = SegmentWriter(segments_of(batch.folder) / "g000001-n0-r0-1-1.jsonl", {"generation": 1})
    end = writer.append(
        {"index": index, "error": {"code": "no_answer", "message": "dead"}} if index % 5 == 0
        else {"index": index, "response": {"status_code": 200, "body": {"text": f"\ud83d {index}", "x": None}}}
        for index in reversed(range(COUNT))
    )  # fmt: skip
    ledger.commit([(writer.path.name, end, [[0, COUNT]])])
    writer.close()
    ledger.close()
    return batch


def write(batch: Batch, folder: Path, format: str, generation: int) -> None:
    ledger = open_ledger(batch, generation)
    assert write_output(batch, ledger, folder, format=format) == Output(answers=40, errors=10)
    ledger.close()


def test_the_table_holds_what_the_lines_hold_in_the_order_of_the_input(batch, tmp_path, monkeypatch):
    monkeypatch.setattr(inference_ledger, "GROUP_ROWS", 8)
    write(batch, tmp_path / "lines", "jsonl", 2)
    write(batch, tmp_path / "table", "parquet", 3)
    for name, count in ("answers", 40), ("errors", 10):
        content = (tmp_path / "lines" / f"{name}.jsonl").read_bytes().decode()
        lines = [json.loads(line) for line in content.split("\n") if line]
        file = pyarrow.parquet.ParquetFile(tmp_path / "table" / f"{name}.parquet")
        assert file.schema_arrow.names == ["id", "custom_id", "response", "error"]
        assert file.metadata.num_row_groups == -(-count // 8), "no more than a group is held in memory"
        rows: list[dict[str, Any]] = file.read().to_pylist()
        for row in rows:
            row["response"], row["error"] = [
                None if row[key] is None else json.loads(row[key]) for key in ("response", "error")
            ]
        for line in lines:
            line["custom_id"] = line["custom_id"].replace("\ud800", "?")
        assert rows == lines and len(rows) == count
    assert sorted(path.name for path in (tmp_path / "table").iterdir()) == [
        "answers.parquet", "errors.parquet", "source.json"
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_all_rows_go_to_one_file_where_one_is_named(batch, tmp_path, suffix):
    ledger, file = open_ledger(batch, 2), tmp_path / "new" / f"results{suffix}"
    assert write_output(batch, ledger, tmp_path / "out", file=file) == Output(answers=40, errors=10)
    ledger.close()
    if suffix == ".jsonl":
        content = file.read_bytes().decode()
        found = [(row["id"], row["error"] is None) for row in map(json.loads, content.splitlines())]
    else:
        found = [(row["id"], row["error"] is None) for row in pyarrow.parquet.read_table(file).to_pylist()]
    assert found == [(f"batch_req_{number}", number % 5 != 0) for number in range(COUNT)]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["source.json"]


def test_an_output_without_errors_is_an_empty_table(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"n": 1}\n')
    batch = prepared(source, tmp_path / "inference")
    ledger = open_ledger(batch, 1)
    writer = SegmentWriter(segments_of(batch.folder) / "g000001-n0-r0-1-1.jsonl", {"generation": 1})
    end = writer.append([{"index": 0, "response": {"status_code": 200, "body": {}}}])
    ledger.commit([(writer.path.name, end, [[0, 1]])])
    assert write_output(batch, ledger, tmp_path / "out", format="parquet") == Output(answers=1, errors=0)
    assert pyarrow.parquet.read_table(tmp_path / "out" / "errors.parquet").num_rows == 0


def test_answers_to_another_input_are_refused_in_either_form(batch, tmp_path):
    write(batch, tmp_path / "out", "parquet", 2)
    refuse_foreign_output(tmp_path / "out", batch.digest)
    with pytest.raises(UsageError, match="answers to another input"):
        refuse_foreign_output(tmp_path / "out", "another")
    (tmp_path / "out" / "source.json").unlink()
    with pytest.raises(UsageError, match=r"answers\.parquet is there already"):
        refuse_foreign_output(tmp_path / "out", batch.digest)


def test_without_the_package_nothing_starts(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"n": 1}\n')
    config = {
        "run_folder": str(tmp_path / "run"),
        "inference": {"input": str(tmp_path / "in.jsonl"), "output_format": "parquet", "engine": {"callable": "a:b"}},
    }
    (tmp_path / "infer.yaml").write_text(json.dumps(config))
    monkeypatch.setattr("slurmft.inference.ledger.importlib.util.find_spec", lambda name: None)
    found = CliRunner().invoke(cli, ["infer", str(tmp_path / "infer.yaml"), "--cluster", "local"])
    assert isinstance(found.exception, UsageError) and "needs the package pyarrow" in str(found.exception)
    assert not (tmp_path / "run").exists()
    refuse_unwritable("jsonl")


def test_a_table_of_requests_is_read(tmp_path):
    rows = [{"custom_id": "a", "prompt": "x", "n": 1}, {"custom_id": "b", "prompt": "y", "n": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    batch = prepared(tmp_path / "in.parquet", tmp_path / "inference")
    with Requests(batch.folder) as requests:
        assert [requests.get(index) for index in range(2)] == [
            {"id": "a", "body": {"prompt": "x", "n": 1}}, {"id": "b", "body": {"prompt": "y", "n": None}}
        ]  # fmt: skip
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(UsageError, match=r"broken\.parquet cannot be read"):
        prepared(tmp_path / "broken.parquet", tmp_path / "second")


def test_values_of_a_table_become_those_of_json(tmp_path):
    at = datetime.datetime(2026, 11, 26, 12, 30, 0, 5, tzinfo=datetime.UTC)
    table = pyarrow.table({
        "custom_id": ["a", None],
        "at": pyarrow.array([at, None], pyarrow.timestamp("us", "UTC")),
        "exact": pyarrow.array([at.replace(tzinfo=None)] * 2, pyarrow.timestamp("ns")),
        "day": [at.date()] * 2, "hour": [at.time()] * 2, "price": [decimal.Decimal("1.50"), decimal.Decimal("7.00")],
        "map": pyarrow.array([{"k": 1}, {}], pyarrow.map_(pyarrow.string(), pyarrow.int32())),
        "nested": [{"list": [decimal.Decimal(2)]}] * 2,
    })  # fmt: skip
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    batch = prepared(tmp_path / "in.parquet", tmp_path / "inference")
    with Requests(batch.folder) as requests:
        first, second = requests.get(0), requests.get(1)
    assert first == {"id": "a", "body": {
        "at": "2026-11-26T12:30:00.000005+00:00", "exact": "2026-11-26T12:30:00.000005", "day": "2026-11-26",
        "hour": "12:30:00.000005", "price": 1.5, "map": {"k": 1}, "nested": {"list": [2]},
    }}  # fmt: skip
    assert second["id"] == "in.parquet:2" and second["body"]["at"] is None and second["body"]["price"] == 7


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ([float("nan")], r"column x: a float nan has no form"), ([float("-inf")], "column x: a float -inf"),
        ([b"\x00\xff"], "column x: a bytes has no form"), ([datetime.timedelta(1)], "column x: a timedelta"),
        ([decimal.Decimal("0.12345678901234567890123")], "column x: a Decimal 0.1234"),
        ([{"y": [1.0, float("nan")]}], r"column x\.y: a float nan"),
    ],
)  # fmt: skip
def test_a_value_without_a_form_in_json_is_refused_by_the_name_of_its_column(tmp_path, column, told):
    pyarrow.parquet.write_table(pyarrow.table({"x": column}), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match=r"in\.parquet:1: " + told):
        prepared(tmp_path / "in.parquet", tmp_path / "inference")


def test_a_time_that_python_does_not_know_is_refused_by_the_name_of_its_column(tmp_path):
    table = pyarrow.table({"n": [1], "far": pyarrow.array([1 << 60], pyarrow.timestamp("us"))})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(UsageError, match=r"in\.parquet cannot be read: column 'far'"):
        prepared(tmp_path / "in.parquet", tmp_path / "inference")


def test_openai_s_form_as_columns_with_a_body_in_json(tmp_path):
    rows = [{"custom_id": "a", "url": "/v1/completions", "method": None, "body": '{"prompt": "x"}'},
            {"custom_id": "b", "url": None, "method": "POST", "body": '{"prompt": "y"}'}]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    with Requests(prepared(tmp_path / "in.parquet", tmp_path / "inference").folder) as requests:
        assert requests.get(0) == {"id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}
        assert requests.get(1) == {"id": "b", "body": {"prompt": "y"}}


def test_the_package_is_not_imported_for_lines():
    look = "import sys, slurmft.inference.ledger; print('pyarrow' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
