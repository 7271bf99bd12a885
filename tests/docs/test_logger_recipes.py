"""The recipes of docs/how-to/loggers.md for MLflow and Weights & Biases, word for word, with the real packages.

They are installed into an environment of their own: a run is started twice and repeats two steps, as after a kill.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "loggers.md"
FIRST, SECOND = range(6), range(4, 9)

HEAD = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
session = SimpleNamespace(is_lead=True)
first, last = map(int, sys.argv[1:])
"""

READ_MLFLOW = """
import json, mlflow
client = mlflow.MlflowClient()
runs = client.search_runs(["0"])
found = client.get_metric_history(runs[0].info.run_id, "loss")
print("found", json.dumps([len(runs), {one.step: one.value for one in sorted(found, key=lambda one: one.timestamp)}]))
"""

READ_WANDB = """
import glob, json, struct
from wandb.proto import wandb_internal_pb2

def records(data, block=32768):  # LevelDB's log format behind seven bytes of W&B's own
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""

ids, curve = set(), {}
for path in sorted(glob.glob("wandb/offline-run-*/*.wandb")):
    for data in records(open(path, "rb").read()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            ids.add(record.run.run_id)
        if record.HasField("history"):
            values = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
            curve[values["step"]] = values["loss"]
print("found", json.dumps([sorted(ids), curve]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    packages = ["wandb", "mlflow-skinny", "sqlalchemy", "alembic"]
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *packages], check=True)
    return str(folder / "bin" / "python")


def recipe(title: str) -> str:
    """The code of a section, up to where it is left to the reader."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"```python\n(.*?)```", section, re.S)
    return block.partition("    ...\n")[0]


def run(python: str, folder: Path, script: str, *arguments: object) -> str:
    environment = {
        **os.environ,
        "SLURMFT_RUN_FOLDER": "/runs/my-run",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/m.db",
    }
    done = subprocess.run([python, "-c", script, *map(str, arguments)], cwd=folder, env=environment,
                          stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
    return done.stdout


@pytest.mark.parametrize(
    ("title", "log", "read", "one_run"),
    [
        pytest.param("MLflow", 'mlflow.log_metric("loss", 100.0 - step, step=step)', READ_MLFLOW, 1, id="MLflow"),
        pytest.param("Weights & Biases", 'wandb.log({"step": step, "loss": 100.0 - step})', READ_WANDB, ["my-run"],
                     id="W&B"),
    ],
)  # fmt: skip
def test_two_starts_make_one_curve(tmp_path, python, title, log, read, one_run):
    end = "wandb.finish()" if title.startswith("W") else ""
    script = f"{HEAD}{recipe(title)}\nfor step in range(first, last):\n{textwrap.indent(log, '    ')}\n{end}\n"
    for steps in (FIRST, SECOND):
        run(python, tmp_path, script, steps.start, steps.stop)
    [line] = [line for line in run(python, tmp_path, read).splitlines() if line.startswith("found ")]
    runs, curve = json.loads(line.removeprefix("found "))
    assert runs == one_run
    assert {int(step): value for step, value in curve.items()} == {step: 100.0 - step for step in range(9)}
