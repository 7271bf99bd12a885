"""Who is stopped and comes back: slurmft, and three others that requeue with ``scontrol requeue`` alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slurmft.errors import LabError
from slurmft.lab.cluster import Lab

TRAINERS = Path(__file__).parent / "trainers"
NODES, RANKS = 2, 2
"""Nodes, and ranks on each of them."""

START_WITHIN_S = 120.0

SAVE_EVERY = 20
"""Steps between two saves of the plain script."""


class CannotRun(Exception):
    """This contender cannot be measured here; says why."""


@dataclass
class Contender:
    """One training in the lab, being stopped again and again."""

    name: str
    lab: Lab
    folder: Path
    job: str
    signal: list[str]
    """scancel's arguments that deliver the signal this contender waits for."""

    def starts(self) -> list[float]:
        """When the first step of each start was done (Unix seconds)."""
        path = self.folder / "starts"
        return [float(line.split()[1]) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_start(self, number: int, deadline: float) -> float | None:
        """When the ``number``-th start did its first step; None when it had not by ``deadline``."""
        while len(starts := self.starts()) < number:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        return starts[number - 1]

    def stop(self) -> float:
        """Send the signal; returns when (Unix seconds)."""
        at = time.time()
        self.lab.run(["scancel", *self.signal, self.job])
        return at


def empty_queue(lab: Lab, within_s: float = 60.0) -> None:
    """End every job. Some need it twice: to them the first TERM is one more reason to requeue."""
    deadline = time.monotonic() + within_s
    while lab.run_as_admin(["squeue", "-h", "-t", "pending,running", "-o", "%i"]).stdout.strip():
        if time.monotonic() > deadline:
            raise SystemExit(f"the lab's queue was not empty within {within_s:.0f} s")
        lab.run_as_admin(["scancel", "--user", lab.user], check=False)
        time.sleep(1.0)
    lab.wait_until_idle(within_s)


def new_folder(lab: Lab, name: str) -> Path:
    folder = lab.home / name
    folder.mkdir()
    os.chown(folder, lab.uid, lab.gid)
    return folder


def submit_slurmft(lab: Lab, name: str, command: list[str], **changes: Any) -> str:
    """Submit a run of slurmft; returns the job. Its run folder is NAME.run in the lab's home."""
    path = lab.home / f"{name}.yaml"
    config = {
        "command": command, "run_folder": str(lab.home / f"{name}.run"), "nodes": NODES, "nproc_per_node": RANKS,
        "slurm": {"time": "60"}, "checkpoint": {"interval_steps": 1000},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(config | changes))
    return lab.run(["slurmft", "submit", str(path)]).stdout.split(" as job ")[1].split()[0]


def slurmft(lab: Lab) -> Contender:
    folder = new_folder(lab, "slurmft")
    job = submit_slurmft(lab, "slurmft", ["python", str(TRAINERS / "with_slurmft.py"), str(folder)])
    return Contender("slurmft", lab, folder, job, ["--signal=TERM"])


def plain(lab: Lab) -> Contender:
    folder = new_folder(lab, "plain")
    variables = {"FOLDER": str(folder), "TRAINER": str(TRAINERS / "plain.py"), "SAVE_EVERY": str(SAVE_EVERY)}
    job = _sbatch(lab, folder, [str(TRAINERS / "plain.sh")], variables)
    return Contender("a batch script with a plain `scontrol requeue`", lab, folder, job, ["--batch", "--signal=TERM"])


def submitit(lab: Lab) -> Contender:
    import submitit as package

    folder = new_folder(lab, "submitit")
    argv = ["python", str(TRAINERS / "with_submitit.py"), str(folder), str(NODES), str(RANKS)]
    job = lab.run(argv, cwd=folder, env={"PYTHONPATH": str(TRAINERS)}).stdout.split()[-1]
    return Contender(f"submitit {package.__version__}, its own requeue", lab, folder, job, ["--signal=USR2"])


def lightning(lab: Lab) -> Contender:
    """On one rank: with more its save, inside the signal's handler, may wait for ever for ranks in a collective."""
    folder = new_folder(lab, "lightning")
    python = _install_lightning(lab.home / "lightning.venv")
    version = lab.run([str(python), "-c", "import lightning; print(lightning.__version__)"]).stdout.strip()
    trainer = [str(python), str(TRAINERS / "with_lightning.py"), str(folder), "1", "1"]
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun {' '.join(trainer)}\n")
    job = _sbatch(lab, folder, ["--open-mode=append", "--nodes=1", "--ntasks-per-node=1", str(script)], {})
    return Contender(f"Lightning {version}, its own auto-requeue, one rank", lab, folder, job, ["--signal=USR1"])


NEIGHBOURS: list[Callable[[Lab], Contender]] = [plain, submitit, lightning]


def _sbatch(lab: Lab, folder: Path, arguments: list[str], variables: dict[str, str]) -> str:
    size = [f"--nodes={NODES}", f"--ntasks-per-node={RANKS}", "--time=60", "--requeue", "--output=output.log"]
    return lab.run(["sbatch", "--parsable", *size, *arguments], cwd=folder, env=variables).stdout.strip()


def _install_lightning(folder: Path) -> Path:
    """A virtual environment of its own with Lightning, which finds torch in ours; returns its interpreter.

    Raises:
        CannotRun: it cannot be installed.
    """
    python = folder / "bin" / "python"
    try:
        _quietly([sys.executable, "-m", "venv", str(folder)], within_s=60)
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "torch_of_the_project.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _quietly([str(python), "-m", "pip", "install", "--quiet", "lightning"], within_s=240)
    except subprocess.TimeoutExpired as error:
        raise CannotRun(f"{error.cmd[-1]}: not installed within {error.timeout:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise CannotRun((error.stderr.strip().splitlines() or ["not installed"])[-1]) from error
    return python


def _quietly(argv: list[str], within_s: float) -> None:
    subprocess.run(argv, capture_output=True, text=True, timeout=within_s, stdin=subprocess.DEVNULL, check=True)


def started(make: Callable[[Lab], Contender], lab: Lab) -> Contender:
    """The contender, submitted; measuring may begin when it has done its first step.

    Raises:
        CannotRun: it does not come up here.
    """
    try:
        contender = make(lab)
    except LabError as error:
        raise CannotRun(error.what.splitlines()[-1]) from error
    if contender.wait_for_start(1, time.monotonic() + START_WITHIN_S) is None:
        lab.run(["scancel", contender.job])
        raise CannotRun(f"no step within {START_WITHIN_S:.0f} s of its submission")
    return contender
