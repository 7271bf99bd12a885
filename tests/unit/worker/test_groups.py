"""Process groups have the configured timeouts, read back from the groups, before and after the first step."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
from waiting import slowness
from worker_variable import worker_variable

from slurmft.trainer.savers import SAVERS
from slurmft.worker import session as groups

PROGRAM = """
import json, torch.distributed as dist
from slurmft.worker.session import start_session
with start_session(seed=1) as session:
    early = session.new_group([0])
    facts = {"before": session._groups.timeouts()}
    for step in session.steps(start=0, until=2, save=lambda step: None):
        pass
    late = session.new_group([0])
    facts["after"] = session._groups.timeouts()
    facts["backend"] = dist.get_backend()
    print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts() -> dict:
    environment = os.environ | {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        **worker_variable(init_timeout_minutes=7, step_timeout_minutes=0.5, backend="gloo"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_group_starts_with_the_long_timeout(facts):
    assert list(facts["before"].values()) == [420.0, 420.0]


def test_every_group_has_the_short_one_after_the_first_step(facts):
    assert list(facts["after"].values()) == [30.0, 30.0, 30.0], "later groups as well"


def test_the_backend_is_the_configured_one(facts):
    assert facts["backend"] == "gloo"


class Saver:
    """A checkpoint manager that is never called."""


class Group:
    """A process group on a device."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self.abort = abort


def test_nothing_is_kept_of_what_a_device_computes_behind_an_abort(monkeypatch):
    """With its communicators aborted it goes on with gradients that were never reduced."""
    known: list[list[object]] = []
    group = Group(lambda: known.append(SAVERS.savers))
    world = SimpleNamespace(pg_map={group: None}, pg_names={})
    monkeypatch.setattr(groups, "distributed_c10d", SimpleNamespace(_world=world))
    monkeypatch.setattr(groups, "takes_host_data", lambda _: False)
    monkeypatch.setattr(groups, "_together", lambda _: contextlib.nullcontext())
    saver = Saver()
    monkeypatch.setattr(SAVERS, "_savers", [])
    SAVERS.join(saver)
    assert SAVERS.savers == [saver]
    assert groups.abort_device_groups()
    assert known == [[]]


# where rank 0's store listens later than the others come


def test_a_rank_goes_on_as_soon_as_the_store_listens():
    """Torch's own client would wait half a second or more after its first try."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        host, port = held.getsockname()
        late = threading.Timer(0.1, held.listen)
        late.start()
        began = time.monotonic()
        groups.await_listener(host, str(port), timedelta(seconds=20))
        took_s = time.monotonic() - began
        late.join()
        with socket.create_connection((host, port), timeout=5):
            pass
    assert 0.1 <= took_s < 15


@pytest.mark.parametrize(
    ("host", "port"),
    [("", "1"), ("127.0.0.1", ""), ("127.0.0.1", "x"), ("127.0.0.1", "99999999"), ("no.such.host.invalid", "1")],
)
def test_an_address_that_leads_nowhere_is_left_to_torch(host, port):
    began = time.monotonic()
    groups.await_listener(host, port, timedelta(seconds=0.2))
    assert time.monotonic() - began < 15 * slowness()


TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1", "SLURM_GTIDS": "2,3", "SLURM_STEP_NODELIST": "gpu-[08-10,12]-ib,login"}  # fmt: skip


def test_a_task_of_srun_has_its_place() -> None:
    environment = dict(TASK)
    groups.take_place_of_task(environment)
    place = [environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
    assert place == ["3", "4", "1", "2", "gpu-08-ib"]
    ports = {}
    for step in ("0", "1"):
        other = {**TASK, "SLURM_STEP_ID": step, "SLURM_PROCID": "0"}
        groups.take_place_of_task(other)
        ports[step] = int(other["MASTER_PORT"])
    assert ports["0"] == int(environment["MASTER_PORT"]) != ports["1"]
    assert all(1024 < port < 32768 for port in ports.values())


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
        {"SLURM_PROCID": "x"},
        {"SLURM_PTY_PORT": "4000"},
        {"RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_others_keep_the_place_they_have(change: dict[str, str]) -> None:
    environment = {**TASK, **change}
    groups.take_place_of_task(environment)
    assert environment == {**TASK, **change}


def test_what_the_user_has_set_stays() -> None:
    environment = {**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    groups.take_place_of_task(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"], environment["RANK"]) == ("10.0.0.1", "4000", "3")
