"""Workers read from Slurm's variables what they would under srun, although srun has started one agent on each node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from submitit.slurm.slurm import SlurmJobEnvironment

from slurmft.agent.torchrun import trainers_environment
from slurmft.agent.workers import worker_environment
from slurmft.config.run import validate
from slurmft.ipc.messages import StartWorkers
from slurmft.scheduler.parsing import expand_hostlist
from slurmft.scheduler.slurm import in_order

AGENT = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
         "SLURM_NTASKS": "3", "SLURM_NPROCS": "3", "SLURM_NNODES": "3", "SLURM_JOB_NUM_NODES": "3",
         "SLURM_NTASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
         "SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_GTIDS": "1", "SLURM_JOB_NODELIST": "n[1-3]"}  # fmt: skip
START = StartWorkers(attempt="7.0.0", nodes=2, first_rank=0, master_addr="n3", master_port=1, cycle=0, generation=1,
                     nodelist="n3,n2")  # fmt: skip


def environment_of(rank: int, *, nodes: int = 2, per_node: int = 2, base: dict[str, str] = AGENT) -> dict[str, str]:
    settings = {"command": "true", "run_folder": "/r", "nodes": nodes, "nproc_per_node": per_node}
    start = replace(START, nodes=nodes, first_rank=rank - rank % per_node)
    return worker_environment(validate(settings, source="here"), base, start, rank, "7.0.0")


def test_the_last_of_four_ranks() -> None:
    found = environment_of(3)
    expected = {
        "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4",
        "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_GTIDS": "2,3", "SLURM_JOB_NODELIST": "n3,n2", "SLURM_STEP_NODELIST": "n3,n2", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


@given(nodes=st.integers(1, 5), per_node=st.integers(1, 8))
def test_every_rank_has_a_place_of_its_own(nodes: int, per_node: int) -> None:
    names = ("PROCID", "LOCALID", "NODEID", "NTASKS", "GTIDS")
    found = [environment_of(rank, nodes=nodes, per_node=per_node) for rank in range(nodes * per_node)]
    for rank, one in enumerate(found):
        procid, localid, nodeid, ntasks, gtids = (one[f"SLURM_{name}"] for name in names)
        assert (int(procid), int(localid), int(ntasks)) == (rank, rank % per_node, nodes * per_node)
        assert int(nodeid) * per_node + int(localid) == rank
        assert gtids.split(",")[int(localid)] == procid


def test_submitits_environment_is_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(3).items():
        monkeypatch.setenv(name, value)
    found = SlurmJobEnvironment()
    assert (found.global_rank, found.local_rank, found.node) == (3, 1, 1)
    assert (found.num_tasks, found.num_nodes, found.hostnames) == (4, 2, ["n3", "n2"])


def test_a_trainer_of_torchrun_has_them_too() -> None:
    found = trainers_environment(environment_of(3), {**AGENT, "RANK": "3", "LOCAL_RANK": "1"})
    assert (found["SLURM_PROCID"], found["SLURM_NTASKS"], found["RANK"]) == ("3", "4", "3")


def test_there_are_none_outside_of_slurm() -> None:
    assert not [name for name in environment_of(1, base={}) if name.startswith("SLURM_")]


@pytest.mark.parametrize("hosts", [["n1", "n2", "n3"], ["n3", "n1"], ["b1", "a1", "a2"], ["gpu09", "gpu10"], ["x"]])
def test_nodes_stay_in_the_order_of_ranks(hosts: list[str]) -> None:
    assert expand_hostlist(in_order(hosts)) == hosts


def test_many_nodes_stay_short() -> None:
    assert in_order([f"n{number}" for number in range(1, 1001)]) == "n[1-1000]"
