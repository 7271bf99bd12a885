"""Random faults at random moments on an endpoint under constant load: each request is answered once, or has an error.

As test_random_faults.py: the seed decides; ``SLURMFT_FAULT_SEEDS`` chooses seeds, ``SLURMFT_FAULTS_OUTPUT`` takes a
line of JSON for each run. A hundred clients count what became of their requests. A second storm is of behaviours above
all: engines and clients that are slow, sick, hung or gone without a word, where no engine may be killed without cause.
"""

import dataclasses
import json
import os
import re
import shutil
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from slurm.cluster_faults import CLUSTER_KINDS, ReplicasStorm
from slurm.conftest import eventually
from slurm.endpoints import EndpointRun
from slurm.storm import Kind, errors_in_logs, seeds
from slurmft.inference.endpoint import HighAvailabilityCluster
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(1800)]

MAX_FAULTS = 40
NODES = 3
HERE = Path(__file__).parent
CLUSTER = (
    "agent",
    "zygote",
    "srun",
    "supervisor",
    "TERM",
    "power",
    "power of the batch host",
    "partition",
    "slow node",
)


ON_ITS_NODE = {"engine": 1, "driver": 1, "engine stopped": 1, "driver stopped": 1, "fails": 1, "hangs": 1, "grows": 1,
               "agent": 2, "zygote": 2, "power": 2, "partition": 2, "slow node": 2}  # fmt: skip
ANYWHERE = {"stalling request": 6, "supervisor": 6, "srun": 6, "TERM": 6, "power of the batch host": 6}
"""Deaths of replicas that a fault explains: on the node that it names, or on any; a request that stalls is one of two,
each of which may cost as many engines as make it poison (3)."""

EXPLAINS_S = {"stalling request": 125.0}
"""Seconds after a fault in which it explains deaths, 60 but for these: a request that stalls has 100 s, may wait most
of them in the line of those that are tried alone, and stalls 15 s."""
PATIENCE_S = {"stall": 110.0, "long": 110.0}
"""Seconds that these clients wait for a word; 30 all others."""

SILENT = frozenset({"router stopped", "power", "power of the batch host", "partition", "slow node", "supervisor",
                    "srun", "TERM", "agent"})  # fmt: skip
"""Faults behind which a plain client may hear nothing within its time."""


class Clients:
    """A hundred clients on the login node, in a thread of ours."""

    def __init__(self, run: EndpointRun) -> None:
        self._run, self._told, self._error = run, {}, "the clients have not ended"
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        argv = ["python", str(self._run.path.parent / "load.py"), "load", str(self._run.path)]
        result = self._run.lab.run(argv, check=False, timeout=1700)
        if result.returncode == 0:
            self._told, self._error = json.loads(result.stdout), ""
        else:
            self._error = result.stderr[-2000:]

    def result(self) -> tuple[dict[str, Any], str]:
        """Counts, and what went wrong with the clients themselves."""
        (self._run.path.parent / "enough").touch()
        self._thread.join(300)
        return self._told, self._error


class ServingStorm(ReplicasStorm):
    name = "serving"
    run: EndpointRun

    engine = "^[^ ]*python[^ ]* [^ ]*/word_engine.py"

    def signal_router(self, signal: str) -> str | None:
        routers = HighAvailabilityCluster.read(self.run.path).routers
        if not routers:
            return None
        router = self.chance.choice(routers)
        listening = self.lab.run_on_as_admin(router.node, ["ss", "-tlnpH", f"sport = :{router.port}"], check=False)
        if (found := re.search(r"pid=(\d+)", listening.stdout)) is None:
            return None
        sent = self.lab.run_on_as_admin(router.node, ["kill", f"-{signal}", found[1]], check=False)
        return f"{signal} on {router.node}" if sent.returncode == 0 else None

    def bad_client(self, how: str, count: int = 3, *, admin: bool = False) -> str:
        words = f"python {self.run.path.parent}/load.py {how} {self.run.path} {self.chance.randrange(1 << 20)}"
        run = self.lab.run_as_admin if admin else self.lab.run
        run(["bash", "-c", f"for n in $(seq {count}); do setsid {words}$n > /dev/null 2>&1 & done"])
        return f"{count} of them"

    def without_cause(self) -> list[str]:
        """Deaths of replicas that no fault explains."""
        left = [[one, {**ON_ITS_NODE, **ANYWHERE}.get(one.kind, 0)] for one in self.done]
        found = []
        for event in (event for event in self.journal() if event.event == "replica died"):
            at_s, node = event.seconds(), event.details["node"]
            causes = [each for each in left if each[1] and -1 < at_s - each[0].at_s < EXPLAINS_S.get(each[0].kind, 60)
                      and (each[0].kind in ANYWHERE or node in each[0].said.split())]  # fmt: skip
            if causes:  # of a node's own first
                min(causes, key=lambda each: each[0].kind in ANYWHERE)[1] -= 1
            else:
                found.append(f"{event.at:%T} {node}: {event.details['reason']}")
        return found

    def late(self, told: dict[str, Any]) -> dict[str, list[str]]:
        """Requests without a word in time, by when that was, while and before which no fault made routers silent."""
        struck = [one.at_s for one in self.done if one.kind in SILENT]
        late: dict[str, list[str]] = {}
        for kind, count in told.items():
            for ended_s in count["late"]:
                began_s = ended_s - PATIENCE_S.get(kind, 30)
                if not any(began_s - 35 < at_s < ended_s + 5 for at_s in struck):
                    late.setdefault(kind, []).append(f"{datetime.fromtimestamp(began_s, UTC):%T}")
        return late

    def outcomes(self) -> dict[str, Any]:
        """Of the requests that take long or stall, in the form of the clients' counts."""
        path, found = self.run.path.parent / "outcomes", dict[str, Any]()
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            into = found.setdefault(line["kind"], {"asked": 0, "right": 0, "refused": Counter(), "wrong": Counter(),
                                                   "longest_s": 0.0, "late": []})  # fmt: skip
            for key in ("asked", "right", "refused", "wrong", "late"):
                into[key] += Counter(line[key]) if isinstance(line[key], dict) else line[key]
            into["longest_s"] = max(into["longest_s"], line["longest_s"])
        return found

    kinds: ClassVar = {
        "engine": Kind(16, lambda storm: storm.signal_engine("KILL")),
        "driver": Kind(10, lambda storm: storm.signal_driver("KILL")),
        "engine stopped": Kind(8, lambda storm: storm.signal_engine("STOP")),
        "driver stopped": Kind(6, lambda storm: storm.signal_driver("STOP")),
        "router": Kind(10, lambda storm: storm.signal_router("KILL")),
        "router stopped": Kind(4, lambda storm: storm.signal_router("STOP"), 15),
        "slow client": Kind(5, lambda storm: storm.bad_client("slow")),
        "garbage": Kind(5, lambda storm: storm.bad_client("garbage")),
        **{name: CLUSTER_KINDS[name] for name in CLUSTER},
    }  # fmt: skip


class BehaviourStorm(ServingStorm):
    name = "behaviours"

    kinds: ClassVar = {
        **{name: Kind(each.weight // 2, each.strike, each.takes_s) for name, each in ServingStorm.kinds.items()
           if name not in CLUSTER},
        "fails": Kind(9, lambda storm: storm.signal_engine("USR1")),
        "hangs": Kind(9, lambda storm: storm.signal_engine("USR2")),
        "grows": Kind(6, lambda storm: storm.signal_engine("URG")),
        "long request": Kind(8, lambda storm: storm.bad_client("long", 4)),
        "stalling request": Kind(3, lambda storm: storm.bad_client("stall", 2)),
        "disconnecting clients": Kind(6, lambda storm: storm.bad_client("leaves", 8)),
        "half-open": Kind(6, lambda storm: storm.bad_client("half-open", 1, admin=True)),
        **{name: dataclasses.replace(CLUSTER_KINDS[name], weight=1)
           for name in ("agent", "supervisor", "power", "slow node")},
    }  # fmt: skip


@pytest.fixture
def stormy(lab: Lab, request: pytest.FixtureRequest) -> EndpointRun:
    name = request.node.name.replace("[", "-").replace("]", "")
    folder = lab.home / "endpoints" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(HERE / "serving_storm_load.py", folder / "load.py")
    shutil.copy(HERE / "patient_client.py", folder)
    shutil.copy(HERE.parent / "unit" / "support" / "word_engine.py", folder)
    run = EndpointRun(lab, folder / "run", folder / "serve.yaml")
    section = {
        "engine": {"command": ["python", str(folder / "word_engine.py"), "{port}", "0.1", "/dev/null"]},
        "replicas_per_node": 2, "concurrency": 64, "hang_timeout_s": 6, "max_restarts": 50, "max_retries": 20,
        "serving": {"restart_window_s": 15, "client_timeout_s": 5, "tls_own": False},
    }  # fmt: skip
    config = {
        "run_folder": str(run.path), "nodes": NODES, "inference": section, "slurm": {"partition": "low"},
        "exclusions": {"path": str(folder / "exclusions"), "threshold": 1000, "probation": 999},
        "fault_tolerance": {"num_in_job_restarts": 100, "num_job_retries_on_failure": 100, "retry_delay_s": 0,
                            "max_no_progress_cycles": 100, "max_retry_delay_s": 1, "agent_timeout_s": 3,
                            "supervisor_lease_s": 6},
    }  # fmt: skip
    run.config.write_text(yaml.safe_dump(config))
    for path in (folder.parent, folder, *folder.iterdir()):
        os.chown(path, lab.uid, lab.gid)
    return run


@pytest.mark.parametrize("seed", seeds())
def test_random_serving_faults(stormy: EndpointRun, seed: int) -> None:
    endure(ServingStorm(stormy, seed), (0.2, 1.5))


@pytest.mark.parametrize("seed", seeds())
def test_random_behaviours(stormy: EndpointRun, seed: int) -> None:
    endure(BehaviourStorm(stormy, seed), (1.0, 4.0))


def endure(storm: ServingStorm, pauses_s: tuple[float, float]) -> None:
    run = storm.run
    run.submit()
    clients = Clients(run)
    with storm.ending() as failures:
        run.wait_for_step(100)
        while len(storm.done) < MAX_FAULTS and not storm.is_over():
            storm.wait(storm.chance.uniform(*pauses_s))
            if storm.is_settled() or storm.chance.random() < 0.1:
                storm.strike()
        storm.wait(5)
        asking = ["pgrep", "-f", f"[l]oad.py (long|stall) {run.path}"]
        eventually(lambda: not run.lab.run(asking, check=False).stdout, 150, "a long request has not ended")
        if storm.is_over():
            failures.append("the run has ended by itself")
    told, error = clients.result()
    if isinstance(storm, BehaviourStorm):
        told |= storm.outcomes()
        failures += [f"a replica was killed without cause: {death}" for death in storm.without_cause()]
        failures += [f"no word in time: {late}" for late in [storm.late(told)] if late]
    failures += [error] if error else []
    failures += [f"an error of ours: {error}" for error in errors_in_logs(run)]
    failures += storm.unexplained_waits()
    for kind, count in told.items():
        if count["wrong"]:
            failures.append(f"neither answered nor refused: {kind}: {count['wrong']}")
        is_poison = [why for why in count["refused"] if "this request has crashed" in why]
        if kind == "patient" and len(count["refused"]) > len(
            is_poison
        ):  # a stream that has begun may end with an error
            failures.append(f"an error of a patient client: {kind}: {count['refused']}")
    run.slurmft("stop", str(run.path), check=False)
    deaths, ended, lost = (len(run.events(name)) for name in ("replica died", "router ended", "agent lost"))
    poison = sum(count["refused"][why] for kind, count in told.items() if kind != "stall" for why in count["refused"]
                 if "this request has crashed" in why)  # fmt: skip
    storm.record(failures, poison=poison, clients=told, deaths=deaths, routers=ended, nodes_lost=lost)
    assert failures == [], storm.story()
