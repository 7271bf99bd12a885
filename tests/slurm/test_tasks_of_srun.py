"""Scripts that take their place from srun's variables, in a run; and scripts with a session, under srun alone."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import Run
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

BY_SRUN = """
import os, subprocess, torch, torch.distributed as dist
from datetime import timedelta
rank, local, world = (int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "NTASKS"))
nodes = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
master = subprocess.check_output(nodes, text=True).split()[0]
if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ or os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False":
    os.environ["MASTER_PORT"] = str(20000 + int(os.environ["SLURM_JOB_ID"]) % 1000)  # torchrun listens at its own only
os.environ["MASTER_ADDR"] = master
dist.init_process_group("gloo", timeout=timedelta(seconds=60), rank=rank, world_size=world)
one = torch.ones(1)
dist.all_reduce(one)
print(f"rank {rank} of {world}, local {local}, on {os.environ['SLURM_NODEID']}: sum {one.item()}", flush=True)
dist.destroy_process_group()
"""
BY_SESSION = """
import torch
from slurmft import CheckpointManager, start_session
with start_session(seed=1) as session:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    manager = CheckpointManager(session.checkpoint_dir)
    start = manager.load_latest(model, optimizer).step
    for step in session.steps(start=start, until=start + 2, save=lambda at: manager.save(model, optimizer, step=at)):
        pass
    print(f"rank {session.rank} of {session.world_size}, local {session.local_rank}, from {start}", flush=True)
"""


def script(lab: Lab, name: str, text: str) -> Path:
    path = lab.home / name
    path.write_text(text)
    os.chown(path, lab.uid, lab.gid)
    return path


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["agent", "torchrun"])
def test_ranks_by_sruns_variables_in_a_run(lab: Lab, new_run: Callable[..., Run], launcher: str) -> None:
    run = new_run(command=["python", str(script(lab, "by_srun.py", BY_SRUN))], launcher=launcher)
    run.submit()
    run.wait_until_done()
    said = [run.output(rank).splitlines() for rank in range(4)]
    for rank, lines in enumerate(said):
        assert f"rank {rank} of 4, local {rank % 2}, on {rank // 2}: sum 4.0" in lines, run.story()


@pytest.mark.long
def test_a_session_under_srun_takes_its_place_from_its_task(lab: Lab) -> None:
    path = script(lab, "by_session.py", BY_SESSION)
    folder = lab.home / "by_session"
    folder.mkdir()
    os.chown(folder, lab.uid, lab.gid)
    srun = ["srun", "-N2", "-n4", "--ntasks-per-node=2", "-t2", "python", str(path)]
    for start in (0, 2):
        lines = lab.run(srun, cwd=folder, timeout=120).stdout.splitlines()
        expected = [f"rank {rank} of 4, local {rank % 2}, from {start}" for rank in range(4)]
        assert sorted(line for line in lines if line.startswith("rank ")) == expected
    (newest,) = (folder / "checkpoints").glob("step-00000004*")
    assert newest.is_dir()
