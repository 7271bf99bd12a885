"""Who recovers: slurmft, torchrun, and the ft_launcher of nvidia-resiliency-ext, each as its documentation has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRAINER = Path(__file__).with_name("trainer.py")
MANY = "1000"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to start the trainer so that it survives the death of a rank."""

    name: str
    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Its processes are a session of their own, and die with it."""
        with (folder / "output").open("ab") as output:
            return subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment}, start_new_session=True,
            )  # fmt: skip


def slurmft(folder: Path, ranks: int, step_limit_s: float | None = None, root: Path | None = None) -> Contender:
    """``root``: of the checkout whose code runs; None: of this one."""
    config: dict[str, Any] = {
        "command": ["python", str(TRAINER), str(folder), "session"],
        "run_folder": str(folder / "run"),
        "nodes": 1,
        "nproc_per_node": ranks,
        "checkpoint": {"interval_steps": 20},
        "fault_tolerance": {"num_in_job_restarts": int(MANY)},
    }
    if step_limit_s is not None:
        config["fault_tolerance"] |= {"rank_section_timeouts": {"step": step_limit_s}, "num_warmup_iterations": 1}
    (folder / "config.yaml").write_text(json.dumps(config))
    argv = [sys.executable, "-P", "-m", "slurmft", "run", str(folder / "config.yaml")]
    return Contender(name="slurmft", argv=argv, environment={"PYTHONPATH": str(root)} if root is not None else {})


def torchrun(folder: Path, ranks: int, *, own_store: bool) -> Contender:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            f"--max-restarts={MANY}", str(TRAINER), str(folder), "plain"]  # fmt: skip
    if not own_store:
        return Contender(name="torchrun", argv=argv)
    return Contender(
        name="torchrun, a store per attempt", argv=argv, environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    )


def ft_launcher(folder: Path, ranks: int, packages: Path) -> Contender:
    """``packages`` is what ``pip install --target`` made of nvidia-resiliency-ext."""
    (folder / "ft.yaml").write_text("fault_tolerance:\n  rank_heartbeat_timeout: 60\n")
    argv = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--standalone",
            f"--nproc-per-node={ranks}", f"--max-restarts={MANY}", f"--fault-tol-cfg-path={folder / 'ft.yaml'}",
            str(TRAINER), str(folder), "plain"]  # fmt: skip
    environment = {"PYTHONPATH": str(packages), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Contender(name="nvidia-resiliency-ext 0.4.1, ft_launcher", argv=argv, environment=environment)
