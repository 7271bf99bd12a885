"""Weights in memory on this machine: they outlive a killed engine, and not the run, nor agents that are all killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from slurm.conftest import eventually
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import KEPT_S, LOCK

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
REQUESTS = 400
ENGINE = """
import os, time
import torch
import slurmft

def load():
    note("loads", "x")
    return {"weight": torch.full((1000,), 3.0)}

def note(name, text):
    with open(os.path.join(os.environ["NOTES"], name), "a") as stream:
        stream.write(f"{text}\\n")

class Engine:
    def __init__(self, device):
        self.weight = slurmft.shared_weights("model", load)["weight"]
        note("places", os.environ["SLURMFT_MEMORY_DIR"])

    def __call__(self, bodies):
        time.sleep(0.05)
        note("pids", os.getpid())
        return [{"sum": float(self.weight.sum()) + body["number"]} for body in bodies]
"""


class Batch:
    """A batch on this machine, in two replicas whose weights are shared."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.folder = RunFolder(folder / "run")
        (folder / "its_engine.py").write_text(ENGINE)
        lines = [json.dumps({"custom_id": str(number), "number": number}) for number in range(REQUESTS)]
        (folder / "in.jsonl").write_text("\n".join(lines))
        section = {"engine": {"callable": "its_engine:Engine"}, "input": str(folder / "in.jsonl"), "concurrency": 1,
                   "replicas_per_node": 2}  # fmt: skip
        config = {"run_folder": str(folder / "run"), "inference": section, "environment": {"NOTES": str(folder)}}
        (folder / "run.yaml").write_text(yaml.safe_dump(config))

    def submit(self, *options: str) -> None:
        argv = [sys.executable, "-m", "slurmft", "infer", "run.yaml", "--cluster", "local", *options]
        environment = {**os.environ, "PYTHONPATH": str(self.path)}
        done = subprocess.run(argv, capture_output=True, text=True, cwd=self.path, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def notes(self, name: str) -> list[str]:
        path = self.path / name
        return path.read_text().split() if path.exists() else []

    def wait_for_pids(self, count: int) -> list[int]:
        """Of so many processes that have answered, the newest last."""

        def found() -> list[int]:
            return [int(pid) for pid in dict.fromkeys(self.notes("pids"))]

        eventually(lambda: len(found()) >= count, 100, lambda: f"{count} engines\n{found()}")
        return found()

    def kill_everything(self) -> None:
        def alive() -> list[psutil.Process]:
            return [each for each in psutil.process_iter(["cmdline"])
                    if any(str(self.folder.path) in word for word in each.info["cmdline"] or ())]  # fmt: skip

        while victims := alive():
            for each in victims:
                each.kill()
            psutil.wait_procs(victims, timeout=10)

    def assert_all_answered(self) -> None:
        rows = [json.loads(line) for line in (self.folder.path / "output" / "answers.jsonl").read_text().splitlines()]
        assert [row["response"]["body"]["sum"] for row in rows] == [3000.0 + number for number in range(REQUESTS)]


def test_killed_engines_come_back_without_loading_and_nothing_stays_after_the_run(tmp_path: Path) -> None:
    batch = Batch(tmp_path)
    batch.submit()
    for pid in batch.wait_for_pids(2)[:2]:
        psutil.Process(pid).kill()
    batch.wait_for_pids(4)
    place = Path(batch.notes("places")[0])
    assert len(list((place / "weights").glob("*.json"))) == 1, "two replicas share it"
    eventually(lambda: batch.folder.done() is not None, 100, lambda: "done")
    assert len(batch.notes("loads")) == 1 and len(batch.notes("places")) >= 4
    eventually(lambda: not place.parent.exists(), 30, lambda: f"{place} is left")
    batch.assert_all_answered()


@pytest.mark.long
def test_what_killed_agents_have_left_is_removed_by_the_next_start(tmp_path: Path) -> None:
    batch = Batch(tmp_path)
    batch.submit()
    batch.wait_for_pids(1)
    place = Path(batch.notes("places")[0])
    batch.kill_everything()
    assert list((place / "weights").glob("*.json")), "for an agent that takes it over"
    long_ago = time.time() - KEPT_S - 1
    os.utime(place.parent / LOCK, (long_ago, long_ago))
    batch.submit("--wait")
    assert not place.parent.exists() and len(batch.notes("loads")) == 2
    batch.assert_all_answered()
