"""The GPUs of a node: which are proven not to be a suspect, which rank uses which, and who still holds their memory.

A small program stands in for nvidia-smi, and prints in the format of drivers 535 and newer.
"""

import time

import pytest
from of_each import of_each
from waiting import slowness

from slurmft.agent.workers import gpu_uuids, own_device, pids_on_gpus, visible_without, wait_until_free
from slurmft.supervisor.cluster import agents_environment

FOUR = "0, GPU-a\\n1, GPU-b\\n2, GPU-c\\n3, GPU-d\\n"


@pytest.fixture
def smi(tmp_path):
    def write(body: str) -> dict[str, str]:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    return write


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]),
        ("2,0", ["GPU-c", "GPU-a"]),
        ("GPU-d, 1", ["GPU-d", "GPU-b"]),
        ("", []),
        ("0,9", []),
        ("MIG-1", []),
    ],
)
def test_what_a_worker_would_see(smi, visible, uuids):
    environment = smi(f"printf '{FOUR}'")
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    assert gpu_uuids(environment) == uuids


@pytest.mark.parametrize("body", ["exit 9", "echo 'no devices were found'", "printf '%b' '\\xff\\n'"])
def test_a_tool_that_cannot_tell(smi, body):
    assert gpu_uuids(smi(body)) == []


def test_a_node_without_the_tool(tmp_path):
    assert gpu_uuids({"PATH": str(tmp_path)}) == []


@pytest.mark.parametrize(
    ("suspects", "needed", "visible"),
    [
        ({"GPU-a"}, 3, "GPU-b,GPU-c,GPU-d"),
        ({"GPU-a"}, 4, None),
        ({"GPU-a", "GPU-c"}, 1, "GPU-b,GPU-d"),
        ({"GPU-elsewhere"}, 4, "GPU-a,GPU-b,GPU-c,GPU-d"),
    ],
)
def test_what_is_left_beside_the_suspects(smi, suspects, needed, visible):
    assert visible_without(smi(f"printf '{FOUR}'"), suspects, needed) == visible


def test_nothing_is_proven_where_nothing_is_known(tmp_path):
    assert visible_without({"PATH": str(tmp_path)}, {"GPU-a"}, 1) is None


@of_each(
    visible__local_rank__own=[
        ("MIG-a,MIG-b", 0, "MIG-a"),
        ("MIG-a, MIG-b", 1, "MIG-b"),
        ("MIG-a,MIG-b", 3, "MIG-b"),
        ("MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/7/0", 2, "MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/7/0"),
        ("0,1", 1, None),
        ("GPU-a,GPU-b", 1, None),
        ("MIG-a,0", 1, None),
        ("", 1, None),
        (None, 1, None),
    ]
)
def test_each_rank_has_an_instance_of_a_split_gpu_of_its_own(visible, local_rank, own):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert own_device(environment, local_rank) == ({} if own is None else {"CUDA_VISIBLE_DEVICES": own})


@pytest.mark.parametrize(
    ("printed", "pids"),
    [
        ("1234\\n77\\n1234\\n", {1234, 77}),
        ("", set()),
        ("No running processes found\\n", set()),
        ("[Insufficient Permissions]\\n", set()),
        ("[Not Found]\\n12\\n", {12}),
        ("99999999999999999999\\n", set()),
    ],
)
def test_who_holds_memory_of_a_gpu(smi, printed, pids):
    assert pids_on_gpus(smi(f"printf '{printed}'")) == pids


@pytest.fixture
def driver(tmp_path):
    path = tmp_path / "nvidiactl"
    path.touch()
    return path


def test_the_next_workers_wait_until_the_memory_of_those_before_is_free(smi, tmp_path, driver):
    environment = smi(f"echo look >> {tmp_path}/looks; [ $(wc -l < {tmp_path}/looks) -lt 3 ] && echo 41 || echo 7")
    assert wait_until_free({41, 42}, environment, limit_s=20, driver=driver) == set()
    assert (tmp_path / "looks").read_text().count("look") == 3


def test_memory_that_stays_held_is_waited_for_with_a_limit(smi, driver):
    began = time.monotonic()
    assert wait_until_free({41, 42}, smi("printf '41\\n'"), limit_s=0.3, driver=driver) == {41}
    assert time.monotonic() - began < 15 * slowness()


def test_without_a_driver_nothing_is_asked(smi, tmp_path, driver):
    environment = smi(f"touch {tmp_path}/asked; echo 41")
    assert wait_until_free({41}, environment, driver=tmp_path / "none") == set()
    assert wait_until_free(set(), environment, driver=driver) == set()
    assert not (tmp_path / "asked").exists()


def test_an_agent_sees_the_gpus_of_all_its_ranks():
    job = {
        "SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "single:1", "SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:1",
        "SLURM_TRES_BIND": "gres/gpu:single:1", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    assert agents_environment(job) == {"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "7"}
    assert agents_environment({"SLURM_TRES_PER_TASK": "cpu:4"}) == {"SLURM_TRES_PER_TASK": "cpu:4"}
