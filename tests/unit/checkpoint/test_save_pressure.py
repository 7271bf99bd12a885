"""Saves that come faster than the disk takes them, on two ranks of different pace; and a kill in the middle of one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import SAVING, reports_of_ranks
from worker_variable import worker_variable

from slurmft.checkpoint import Catalog, CheckpointManager

LOOP = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from slurmft.checkpoint import Catalog, CheckpointManager
from slurmft.checkpoint.write_requests import VARIABLE
from slurmft.trainer.savers import SAVERS

root, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=world,
                            timeout=timedelta(seconds=120))
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
report = {}

class Listener:
    def __init__(self):
        self.saved, self.failed = [], []

    def on_saved(self, step, seconds):
        self.saved.append(step)

    def on_save_failed(self, step, number):
        self.failed.append(step)

    def __getattr__(self, name):
        return lambda *_, **__: None

def train(step):
    torch.manual_seed(step)
    model(torch.randn(2, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def periodic(checkpoints, step):
    train(step)
    SAVERS.save_begins(urgent=False)
    path = checkpoints.save(model, optimizer, step=step)
    SAVERS.save_ended()
    return path is not None

def stop(checkpoints, step):
    train(step)
    SAVERS.save_begins(urgent=True)
    began = time.monotonic()
    checkpoints.save(model, optimizer, step=step)
    checkpoints.wait()
    SAVERS.save_ended()
    return time.monotonic() - began

def folders(folder):
    return len(list(folder.glob("step-*")))
"""

PRESSURE = """
def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

for name, slow_ranks in (("all", (0, 1)), ("one", (1,)), ("lead", (0,))):
    SAVERS.listener = listener = Listener()
    os.environ["SLURMFT_WORKER"] = os.environ["SLOW" if rank in slow_ranks else "FAST"]
    checkpoints = CheckpointManager(root / name)
    taken, most = [], 0
    for step in range(1, 9):
        taken.append(periodic(checkpoints, step))
        if rank not in slow_ranks and step <= 2:  # written, and waits for the other rank
            until(lambda: not checkpoints._snapshots._busy())
        elif step == 1:  # being written; else its writer, which is still starting, takes the newer of two
            until(lambda: checkpoints._snapshots._writer._writer.page.progress().done_bytes)
        dist.barrier()
        most = max(most, folders(root / name))
    seconds = stop(checkpoints, 9)
    until(lambda: listener.saved and listener.saved[-1] == 9)
    dist.barrier()
    committed = [one.step for one in Catalog(root / name).committed()]
    report[name] = {"taken": taken, "most": most, "seconds": seconds, "committed": committed}
    report[name]["saved"] = [*listener.saved]
    train(10)
    checkpoints.save(model, optimizer, step=10)
    checkpoints.wait()
    dist.barrier()
    report[name]["after"] = [one.step for one in Catalog(root / name).committed()]
    report[name]["loaded"] = checkpoints.load_latest(model, optimizer).step
    dist.barrier()
    checkpoints.close()
(root / f"report-{rank}.json").write_text(json.dumps(report))
"""


def environment(root: Path, world: int) -> dict[str, str]:
    """Saves are capped so that one takes minutes."""
    slow = worker_variable(checkpoint={"async_save": True, "bandwidth": 100})
    fast = worker_variable(checkpoint={"async_save": True})
    (root / "memory").mkdir(mode=0o700, exist_ok=True)
    return {
        **slow, "SLOW": slow["SLURMFT_WORKER"], "FAST": fast["SLURMFT_WORKER"], "LOCAL_WORLD_SIZE": str(world),
        "SLURMFT_MEMORY_DIR": str(root / "memory"),
    }  # fmt: skip


def its_number(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict[str, dict[str, object]]]:
    root = tmp_path_factory.mktemp("ranks")
    return reports_of_ranks(
        LOOP + PRESSURE, root, 2, "2", own=its_number, ahead=SAVING, timeout_s=300, **environment(root, 2)
    )


@pytest.mark.long
@pytest.mark.parametrize("slow", ["all", "one", "lead"])
def test_ranks_of_any_pace_leave_out_the_same_saves_and_wait_for_none_of_them(reports, slow):
    first, second = (report[slow] for report in reports)
    assert first["taken"] == second["taken"] and first["committed"] == second["committed"]
    assert first["most"] <= 2, "uncommitted folders"
    assert first["committed"][0] == 9, "the stop's goes first"
    assert first["seconds"] < 30, "of a save that takes minutes at the pace of the others"
    assert first["saved"][-1] == 9 and first["after"][0] == first["loaded"] == 10
    if slow == "all":  # the one that waits has begun nowhere, and gives way each time
        assert all(first["taken"])
    else:  # it is written on one rank, and what is written is not thrown away for a periodic one
        assert first["taken"] == [True, True, *[False] * 6]


KILLED = """
checkpoints = CheckpointManager(root / "checkpoints")
for step in (1, 2, 3):
    while step == 2 and not checkpoints._snapshots._writer._writer.page.progress().done_bytes:
        time.sleep(0.01)
    if step == 3:
        (root / "writer").write_text(str(checkpoints._snapshots._writer.pid))
        os.environ[VARIABLE] = "slot emptied=kill"
    periodic(checkpoints, step)
    if step == 1:
        torch.save([*model.state_dict().values()], root / "expected")
"""


def test_killed_while_it_takes_the_place_of_a_waiting_save_the_one_before_is_loaded(tmp_path, monkeypatch):
    command = [sys.executable, "-c", LOOP + KILLED, str(tmp_path), "0", "1"]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment(tmp_path, 1) | its_number(0)
    killed = subprocess.run(command, env=variables, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    monkeypatch.setenv("SLURMFT_MEMORY_DIR", str(tmp_path / "memory"))
    model = torch.nn.Linear(8, 4)
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    loaded = checkpoints.load_latest(model, torch.optim.AdamW(model.parameters()))
    assert loaded.step == 1 and not loaded.is_durable
    wanted = torch.load(tmp_path / "expected")
    assert all(torch.equal(one, other) for one, other in zip(model.state_dict().values(), wanted, strict=True))
    checkpoints.wait()
    assert [one.step for one in Catalog(tmp_path / "checkpoints").committed()] == [1]
    os.kill(int((tmp_path / "writer").read_text()), signal.SIGKILL)  # it would write on for minutes
