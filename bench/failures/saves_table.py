"""The same training with a save every epoch, every 5 and every 10, and a kill; on this machine, without Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from observed import Fault, clock_of, facts_of
from saves_plan import EVERY, KILL_AT, STATE_MIB, STEP_S, STEPS, STEPS_OF_EPOCH

from slurm.conftest import eventually
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import RunFolder

TRAINER = Path(__file__).with_name("trainer.py")
PATIENCE_S = 240.0


@dataclass(frozen=True)
class LocalTraining:
    """A run that needs no Slurm, as ``observed`` wants one."""

    path: Path

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    def events(self, name: str | None = None) -> list[Event]:
        return [event for event in self.folder.journal().read() if name in (None, event.event)]

    def story(self) -> str:
        return "\n".join(f"{event.at:%H:%M:%S} {event.event} {event.details}" for event in self.events())

    def worker(self, rank: int) -> int:
        """Process id of a living rank: its output goes to its own log."""
        logs = {os.fspath(path) for path in self.folder.attempts.glob(f"*/rank-{rank}.log")}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.fspath(Path(f"/proc/{process.pid}/fd/1").readlink()) in logs:
                    return process.pid
        raise ProcessLookupError(f"rank {rank} does not live")

    def slurmft(self, *arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "slurmft", *arguments], check=True, timeout=120, capture_output=True)


def measure(folder: Path, told: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row for each interval: the epochs between two saves, and the facts of ``observed`` without its figure."""
    rows = []
    for every in EVERY:
        facts = _train(LocalTraining(folder / f"every-{every}"), every)
        told(f"every {every} epochs: {facts['training_s']} s of training, {facts['faults']}")
        rows.append(
            {"every": every, **{key: value for key, value in facts.items() if key not in ("intervals", "steps")}}
        )
    return rows


def _train(run: LocalTraining, every: int) -> dict[str, Any]:
    options = ["--steps", str(STEPS), "--step-s", str(STEP_S), "--state-mib", str(STATE_MIB)]
    config = {
        "command": [sys.executable, str(TRAINER), f"{run.path}.clock", *options],
        "run_folder": str(run.path),
        "nodes": 1,
        "nproc_per_node": 2,
        # without the state of the ranks that live on, which would hide what an interval costs
        "checkpoint": {"interval_steps": every * STEPS_OF_EPOCH, "just_in_time": False},
        "fault_tolerance": {"num_in_job_restarts": 3},
    }
    run.path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    run.slurmft("submit", str(run.path.with_suffix(".yaml")), "--cluster", "local")
    try:
        eventually(lambda: (clock_of(run) or [(0, 0.0)])[-1][0] >= KILL_AT, PATIENCE_S, run.story)
        fault = Fault(label="kill -9 of rank 1", noticed=[EventName.WORKER_FAILED])
        os.kill(run.worker(1), signal.SIGKILL)
        eventually(lambda: run.folder.done() is not None, PATIENCE_S, run.story)
    finally:
        if run.folder.done() is None:
            run.slurmft("stop", str(run.path), "--timeout", "10")
    return facts_of(run, [fault])
