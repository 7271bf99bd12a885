"""Endpoints on the lab whose right answers are known, and the load of a hundred clients."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm.conftest import PATIENCE_S, Run, eventually
from slurmft.inference.endpoint import HighAvailabilityCluster
from slurmft.lab.cluster import Lab

NewEndpoint = Callable[..., "EndpointRun"]
HERE = Path(__file__).parent
CLIENTS, NODES, REPLICAS = 100, 2, 2


class Load:
    """Clients on the login node, in a thread of ours; ``kind`` as serving_load.py has them."""

    def __init__(self, run: EndpointRun, seconds: float, *, kind: str = "patient", clients: int = CLIENTS) -> None:
        argv = ["python", str(run.path.parent / "load.py"), str(run.path), str(clients), str(seconds), kind]
        self._run, self._enough = run, run.path.parent / "enough"
        self._told: dict[str, Any] = {"errors": {"the clients": "have not ended"}}

        def work() -> None:
            result = run.lab.run(argv, check=False, timeout=seconds + 120)
            self._told = json.loads(result.stdout) if result.returncode == 0 else {"errors": result.stderr[-2000:]}

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def enough(self, *, right: int | None = None) -> dict[str, Any]:
        """End all loads on this endpoint, which seconds would end later; this one's counts."""
        self._enough.touch()
        return self.result(right=right)

    def result(self, *, right: int | None = None) -> dict[str, Any]:
        """What was counted; ``right``: none may have failed, and more than so many must have been asked."""
        self._thread.join(200)
        told = self._told
        if right is not None:
            assert told["errors"] == {} and told["right"] == told["asked"] > right, f"{told}\n{self._run.story()}"
        return told


class EndpointRun(Run):
    """An endpoint whose right answers are known."""

    def submit(self, *options: str) -> str:
        output = self.slurmft("serve", str(self.config), *options)
        job = output.split(" as job ")[1].split()[0]
        nodes = yaml.safe_load(self.config.read_text())["nodes"]
        self.wait_for("replica ready", nodes * REPLICAS)
        self.wait_for_routers(2)
        return job

    def wait_for_routers(self, count: int) -> None:
        eventually(lambda: len(self.routers) == count, PATIENCE_S, lambda: f"{count} routers\n{self.story()}")

    def end(self) -> None:
        """Stop it, and return when none of its jobs is left in the queue."""
        self.slurmft("stop", str(self.path))
        for job in self.folder.jobs():
            self.wait_until_out_of_queue(job)

    @property
    def routers(self) -> list[str]:
        """Addresses, one for each router."""
        return [each.urls[0] for each in HighAvailabilityCluster.read(self.path).routers]

    @property
    def other_node(self) -> str:
        """A node without the supervisor."""
        host = self.events("attempt started")[0].details["host"]
        return next(event.details["node"] for event in self.events("node answers") if event.details["node"] != host)


def maker(lab: Lab, request: pytest.FixtureRequest) -> NewEndpoint:
    """For a fixture: makes endpoints of 2 nodes with 2 replicas each."""

    def make(**changes: Any) -> EndpointRun:
        keys = ("slurm", "preemption", "nodes", "spare_nodes", "elastic")
        others = {key: changes.pop(key) for key in keys if key in changes}
        name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")
        name += "-again" * (getattr(request.node, "execution_count", 1) > 1)
        folder = lab.home / "endpoints" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("serving_engine.py", "family_engine.py", "gang_engine.py"):
            shutil.copy(HERE / name, folder / name)
        shutil.copy(HERE / "serving_engine.py", folder / "engine.py")
        shutil.copy(HERE / "serving_load.py", folder / "load.py")
        shutil.copy(HERE / "patient_client.py", folder)
        run = EndpointRun(lab, folder / "run", folder / "serve.yaml")
        section = {
            "engine": {"command": ["python", str(folder / "engine.py"), "--socket", "{socket}", "--delay", "0.2"]},
            "replicas_per_node": REPLICAS, "concurrency": 64, "hang_timeout_s": 5, "serving": {}, **changes,
        }  # fmt: skip
        config: dict[str, Any] = {
            "run_folder": str(run.path), "nodes": NODES, "inference": section, "slurm": {"partition": "low"},
            "fault_tolerance": {"agent_timeout_s": 3, "supervisor_lease_s": 15, "retry_delay_s": 0},
        }  # fmt: skip
        for key, value in others.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        run.config.write_text(yaml.safe_dump(config))
        for path in (folder.parent, folder, *folder.iterdir()):
            os.chown(path, lab.uid, lab.gid)
        return run

    return make
