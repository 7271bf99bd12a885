"""Which GPU each rank computes on, from the job's options to ``torch.cuda.set_device``.

The variables are those that sbatch sets for its options (22.05 and newer); the visible devices are what Slurm gives a
task that gets all GPUs of its node: counted from 0 inside a cgroup, else as the node counts them, and UUIDs for MIG.
"""

import os
from collections.abc import Callable

import pytest
import torch

from slurmft.agent.workers import own_device
from slurmft.policy.worker_settings import WORKER_VARIABLE
from slurmft.supervisor.cluster import agents_environment
from slurmft.worker.session import ProcessGroups

PER_NODE = {"SLURM_GPUS_PER_NODE": "4"}
PER_TASK = {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS_PER_NODE": "4"}
PER_TASK_24 = {**PER_TASK, "SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=1", "SLURM_TRES_BIND": "gres/gpu:per_task:1"}
TASKS_PER_GPU = {"SLURM_GPUS": "4", "SLURM_NTASKS_PER_GPU": "1"}
BOUND = {**PER_NODE, "SLURM_GPU_BIND": "single:1"}
CLOSEST = {**PER_NODE, "SLURM_GPU_BIND": "verbose,closest"}
MASKED = {**PER_NODE, "SLURM_GPU_BIND": "mask_gpu:0x1,0x2,0x4,0x8"}

UUIDS = [f"GPU-b668a901-6b19-5c0c-554c-cce49d58af0{number}" for number in range(4)]
# https://github.com/NVIDIA/mig-parted/issues/6 before driver 470, and the form since then
MIG_OLD = [f"MIG-GPU-63feeb45-94c6-b9cb-78ea-98e9b7a5be6b/{number}/0" for number in range(4)]
MIG = [f"MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3{number}" for number in range(4)]


@pytest.fixture
def gpu_of(monkeypatch) -> Callable[[dict[str, str], int], str]:
    """The GPU that a rank computes on, of those that its agent sees."""
    used: list[str] = []

    def visible() -> list[str]:
        """As CUDA counts: each device once, but of instances only the first."""
        words = [word.strip() for word in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return words[:1] if words[0].startswith("MIG-") else words

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible()))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append(visible()[device.index]))
    for name in ("RANK", "WORLD_SIZE", WORKER_VARIABLE):
        monkeypatch.delenv(name, raising=False)

    def gpu_of(environment: dict[str, str], local_rank: int) -> str:
        for name, value in {**environment, **own_device(environment, local_rank)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        ProcessGroups.join()
        return used.pop()

    return gpu_of


@pytest.mark.parametrize("job", [
    PER_NODE, PER_TASK, PER_TASK_24, TASKS_PER_GPU, BOUND, CLOSEST, MASKED,
], ids=["--gpus-per-node", "--gpus-per-task", "--gpus-per-task in 24.11", "--ntasks-per-gpu", "--gpu-bind=single",
        "--gpu-bind=closest", "--gpu-bind=mask_gpu"])  # fmt: skip
@pytest.mark.parametrize("visible", [
    ["0", "1", "2", "3"], ["4", "5", "6", "7"], ["0", "2", "5", "7"], UUIDS, MIG_OLD, MIG,
], ids=["in a cgroup", "without one", "with gaps", "UUIDs", "MIG before driver 470", "MIG"])  # fmt: skip
def test_each_rank_has_a_gpu_of_its_own(gpu_of, job, visible):
    environment = agents_environment(job)
    assert not {"SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_BIND"} & environment.keys()
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    assert [gpu_of(environment, local_rank) for local_rank in range(4)] == visible


@pytest.mark.parametrize(
    ("visible", "of_each"),
    [
        (["0"], ["0", "0", "0", "0"]),
        (["2", "3"], ["2", "3", "2", "3"]),
        (MIG[:2], [*MIG[:2], *MIG[:2]]),
        (["0", "1", "2", "3", "4", "5"], ["0", "1", "2", "3"]),
    ],
    ids=["one GPU", "two GPUs", "two instances", "more GPUs than ranks"],
)
def test_ranks_share_gpus_in_turns_where_there_are_fewer(gpu_of, visible, of_each):
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
    assert [gpu_of(environment, local_rank) for local_rank in range(4)] == of_each


def test_what_the_job_says_of_nodes_stays():
    job = {"SLURM_GPUS": "8", "SLURM_GPUS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,1,2,3"}
    assert agents_environment(job) == job


def test_a_job_with_tasks_per_gpu_can_start_its_agents():
    """Of srun 22.05: "--ntasks-per-node is mutually exclusive with --ntasks-per-gpu and SLURM_NTASKS_PER_GPU"."""
    assert agents_environment({"SLURM_NTASKS_PER_GPU": "2", "SLURM_NTASKS_PER_TRES": "2"}) == {}
