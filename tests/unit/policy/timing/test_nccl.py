"""Who acts first on a collective that hangs, and the variables that keep it so."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.agent.workers import worker_environment
from slurmft.config import run as configuration
from slurmft.ipc.messages import StartWorkers
from slurmft.policy.hangs import (
    HANDLING_VARIABLE,
    HEARTBEAT_VARIABLE,
    MIN_HEARTBEAT_S,
    heartbeat_s,
    watchdog_variables,
    why_not_to_trust,
)
from slurmft.trainer import streams

START = StartWorkers(attempt="7.0.0", nodes=2, first_rank=2, master_addr="n1", master_port=1, cycle=0, generation=1)
FABRIC = {
    "NCCL_P2P_LEVEL": "NVL", "NCCL_IB_HCA": "mlx5_0,mlx5_1", "NCCL_NVLS_ENABLE": "1", "NCCL_SOCKET_IFNAME": "ib0",
    "NCCL_NET_PLUGIN": "ofi", "UCX_TLS": "rc,cuda", "FI_PROVIDER": "efa", "NVSHMEM_DEBUG": "INFO",
}  # fmt: skip


AGENT, WATCHDOG, MONITOR = "slurmft", "torch's watchdog", "torch's monitor"


def acts_on_a_hang(limit_s: float, timeout_s: float, beat_s: float, handling: str) -> list[tuple[float, str]]:
    """Seconds from the start of a collective that hangs, and who ends its rank then; torch's part as in its code."""
    agent = [(limit_s, AGENT)] if limit_s else []
    watchdog = [(timeout_s, WATCHDOG)] if handling != "0" else []
    return sorted([*agent, *watchdog, (timeout_s + beat_s, MONITOR)], key=lambda act: act[0])


@pytest.mark.parametrize(
    ("limit_s", "timeout_s", "handling", "actors"),
    [
        (300, 600, "3", [AGENT, WATCHDOG, MONITOR]),
        (3600, 600, "3", [WATCHDOG, MONITOR, AGENT]),
        (3600, 600, "0", [MONITOR, AGENT]),
        (0, 600, "3", [WATCHDOG, MONITOR]),
        (0, 600, "0", [MONITOR]),
    ],
)
def test_the_order(limit_s, timeout_s, handling, actors):
    assert [actor for _, actor in acts_on_a_hang(limit_s, timeout_s, 600, handling)] == actors


@given(limit_s=st.floats(0, 1e6), timeout_s=st.floats(1, 1e6), handling=st.sampled_from(["0", "1", "2", "3"]))
def test_the_monitor_is_the_last_to_act_whatever_is_configured(limit_s, timeout_s, handling):
    chosen_s = heartbeat_s(timeout_s, limit_s)
    acts = acts_on_a_hang(limit_s, timeout_s, chosen_s, handling)
    assert acts[-1][1] == MONITOR and chosen_s >= MIN_HEARTBEAT_S


@pytest.mark.parametrize("limit_s", [3600, 300])
def test_the_page_says_what_is_computed(limit_s):
    page = (Path(__file__).parents[4] / "docs" / "gpu.md").read_text(encoding="utf-8")
    acts = acts_on_a_hang(limit_s, 600, heartbeat_s(600, limit_s), "3")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {limit_s} s")]
    assert row.endswith("".join(f"| {actor}, {after_s:.0f} s " for after_s, actor in acts) + "|")


def test_what_the_user_has_set_stays():
    assert watchdog_variables({}, timeout_s=600, limit_s=60) == {HANDLING_VARIABLE: "3", HEARTBEAT_VARIABLE: "660"}
    assert watchdog_variables({HANDLING_VARIABLE: "0"}, timeout_s=60, limit_s=60) == {HEARTBEAT_VARIABLE: "480"}
    assert HANDLING_VARIABLE not in watchdog_variables({"NCCL_ASYNC_ERROR_HANDLING": "1"}, timeout_s=60, limit_s=60)


@of_each(
    environment__is_trusted=[
        ({}, True),
        ({HANDLING_VARIABLE: "3"}, True),
        ({HANDLING_VARIABLE: "0"}, True),
        ({HANDLING_VARIABLE: "1"}, False),
        ({HANDLING_VARIABLE: "2"}, False),
        ({"NCCL_ASYNC_ERROR_HANDLING": "2"}, False),
        ({"NCCL_ASYNC_ERROR_HANDLING": "2", HANDLING_VARIABLE: "3"}, True),
    ]
)
def test_an_abort_before_the_end_of_the_process_leaves_nothing_to_trust(environment, is_trusted):
    assert (why_not_to_trust(environment) == "") is is_trusted


@pytest.fixture
def config(tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"run_folder: {tmp_path}/r\ncommand: [python, train.py]\nnodes: 2\nnproc_per_node: 2\n"
    )
    return configuration.load(tmp_path / "run.yaml")


def test_a_worker_gets_them_and_all_that_chooses_the_fabric(config):
    environment = worker_environment(config, {**FABRIC, "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, START, 3, "7.0.0")
    assert environment.items() >= FABRIC.items()
    assert environment["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    assert environment[HANDLING_VARIABLE] == "3"
    assert int(environment[HEARTBEAT_VARIABLE]) >= 3600, "after the agent, whose limit for a step is an hour"


def test_the_users_own_value_wins(config):
    assert worker_environment(config, {HEARTBEAT_VARIABLE: "7"}, START, 2, "7.0.0")[HEARTBEAT_VARIABLE] == "7"


def test_the_page_lists_every_collective_of_this_package():
    """A developer who adds one says over which group it goes, and why all ranks come by in the same order."""
    root, page = Path(streams.__file__).parents[1], Path(streams.__file__).parents[2] / "docs" / "gpu.md"
    calls = re.compile(r"\bdist\.(all_\w+|broadcast\w*|reduce\w*|gather\w*|scatter\w*|i?send|i?recv|barrier|new_group"
                       r"|batch_isend_irecv)\(")  # fmt: skip
    users = {
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in root.rglob("*.py") if calls.search(path.read_text(encoding="utf-8"))
    } - {"examples.plain_ddp"}  # fmt: skip
    listed = set(re.findall(r"^\| `([\w.]+)`", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert users <= listed
    assert {"trainer.savers", "worker.standalone"} <= users
