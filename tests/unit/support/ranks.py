"""Ranks of one job as processes of their own, forked from one that has imported torch once for all of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FORKS = """
import importlib, json, os, sys
import torch
script, folder, own, ahead, *arguments = sys.argv[1:]
for name in ahead.split():
    importlib.import_module(name)
pids = []
for rank, environment in enumerate(json.loads(own)):
    if not (pid := os.fork()):
        break
    pids.append(pid)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(f"the ranks ended with {codes}" if any(codes) else 0)
os.environ.update(environment)
sys.argv = ["-c", folder, str(rank), *arguments]
exec(script)
"""
SAVING = "torch._dynamo slurmft.checkpoint"
"""What building an optimizer and saving its state import: as long as torch itself."""


def run_ranks(
    script: str, folder: Path, count: int = 2, *arguments: str, ahead: str = "", timeout_s: float = 150.0,
    meet: bool = False, own: Callable[[int], Mapping[str, str]] = lambda _rank: {}, **environment: str,
) -> None:  # fmt: skip
    """Run a script in each rank, with the folder, the rank and more as its arguments.

    Raises:
        AssertionError: a rank has ended with an error; with what all have written.

    Args:
        ahead: modules that are imported before the forks.
        meet: they are told of each other by torch's variables.
        own: variables of one rank; ``environment`` has those of all.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    each = [dict(own(rank)) for rank in range(count)]
    if meet:
        environment |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        each = [{"RANK": str(rank), **variables} for rank, variables in enumerate(each)]
    argv = [sys.executable, "-c", FORKS, script, str(folder), json.dumps(each)]
    support = str(Path(__file__).parent)
    variables = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": support} | environment
    with tempfile.TemporaryFile("w+") as errors:  # writers outlive their ranks, and would hold a pipe open
        ranks = subprocess.Popen([*argv, ahead, *arguments], env=variables, stderr=errors, start_new_session=True)
        try:
            code = ranks.wait(timeout_s)
        except BaseException:
            os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()
            raise
        errors.seek(0)
        assert code == 0, errors.read()


def reports_of_ranks(script: str, folder: Path, count: int = 2, *arguments: str, **options: Any) -> list[Any]:
    """As ``run_ranks``; returns what each has left in ``report-RANK.json``."""
    run_ranks(script, folder, count, *arguments, **options)
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(count)]
