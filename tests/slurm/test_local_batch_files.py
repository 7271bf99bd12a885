"""``slurmft infer -i requests.jsonl -o results.jsonl`` on this machine, as ``vllm run-batch`` takes them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]
ENGINE = "def answer(bodies):\n    return [{'said': body['prompt'].upper()} for body in bodies]\n"


def infer(folder: Path, *options: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "slurmft", "infer", "run.yaml", "--cluster", "local", "--wait", *options]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def test_one_file_in_and_one_file_out(tmp_path: Path) -> None:
    (tmp_path / "its_engine.py").write_text(ENGINE)
    section = {"engine": {"callable": "its_engine:answer"}, "input": "another.jsonl", "on_bad_input": "report"}
    config = {"run_folder": str(tmp_path / "run"), "inference": section}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    rows = [{"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"p{number}"}}
            for number in range(20)]  # fmt: skip
    rows[7]["method"] = "PUT"
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "results.jsonl").write_text("mine\n")
    refused = infer(tmp_path, "-i", "in.jsonl", "-o", "results.jsonl")
    assert refused.returncode != 0 and "results.jsonl is there already" in refused.stderr
    (tmp_path / "results.jsonl").unlink()
    done = infer(tmp_path, "-i", "in.jsonl", "-o", "results.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    named = [row["custom_id"] if number != 7 else "in.jsonl:8" for number, row in enumerate(rows)]
    assert [row["custom_id"] for row in found] == named, "answers and errors, in the order of the input"
    assert found[7]["error"]["code"] == "bad_request" and found[7]["response"] is None
    assert found[8]["response"] == {"status_code": 200, "request_id": "req_8", "body": {"said": "P8"}}
    assert sorted(path.name for path in (tmp_path / "run" / "output").iterdir()) == ["source.json"]
