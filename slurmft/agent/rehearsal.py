"""A spare's rehearsal (``spares: rehearse``): its node runs the trainer for two steps, in a world of its own.

Nothing of it is kept: no agent's page, an empty checkpoint folder of its own, and the session ends the trainer before
it would save. It leaves this node's caches warm (compiled kernels, files of modules and data), so that a takeover costs
no compile.

    python -m slurmft.agent.rehearsal COMMAND...      one rank of it, which dies with the agent
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from slurmft.agent.workers import reserve_port, worker_environment, zygote_arguments
from slurmft.config.run import RunConfig
from slurmft.ipc.messages import RehearsalReport, StartWorkers
from slurmft.policy.verdict import EXIT_TEMPORARY
from slurmft.policy.worker_settings import WORKER_VARIABLE
from slurmft.storage.fence import GENERATION_VARIABLE, RUN_FOLDER_VARIABLE
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE, EVIDENCE_VARIABLE, VERDICT_VARIABLE
from slurmft.system.background import end_child
from slurmft.system.processes import die_with_parent

LIMIT_S = 1800.0
"""A rehearsal that takes longer is ended: compiling takes minutes."""

_LAST_BYTES = 4096

_OF_THE_RUN = (
    RUN_FOLDER_VARIABLE, GENERATION_VARIABLE, VERDICT_VARIABLE, EVIDENCE_VARIABLE, ERROR_DIR_VARIABLE,
    "SLURMFT_ATTEMPT", "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip

log = logging.getLogger(__name__)


class SpareRehearsal:
    """The rehearsal of this node; at most one, and once it went well no other."""

    def __init__(
        self, config: RunConfig, environment: Mapping[str, str], folder: Path, report: Callable[[RehearsalReport], None]
    ) -> None:
        self._config, self._environment, self._report = config, environment, report
        self._folder = folder / "rehearsal"
        self._processes: list[asyncio.subprocess.Process] = []
        self._task: asyncio.Task[None] | None = None
        self._is_done = False

    def begin(self) -> None:
        """Rehearse, unless that is done or under way; returns at once."""
        if not self._is_done and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._rehearse())

    async def stop(self) -> None:
        """End it: the node is needed. Returns when none of its processes is left."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _rehearse(self) -> None:
        began_s = time.monotonic()
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.mkdir(mode=0o700)
            holder, port = reserve_port()
            with holder:
                codes, words = await asyncio.wait_for(self._run(port), LIMIT_S)
        except TimeoutError:
            codes, words = [], f"not done in {LIMIT_S:.0f} s"
        except OSError as error:
            codes, words = [], f"it could not be started: {error}"
        finally:
            await self._end_all()
            shutil.rmtree(self._folder, ignore_errors=True)
        is_well = bool(codes) and set(codes) <= {0, EXIT_TEMPORARY}
        self._is_done = True  # what failed once fails again, and would only keep the node busy
        self._report(RehearsalReport(took_s=time.monotonic() - began_s, problem="" if is_well else words[:255]))

    async def _run(self, port: int) -> tuple[list[int], str]:
        """The exit codes of all ranks, and the last line of the first one that failed."""
        config = self._config
        arguments = zygote_arguments(config.command)  # by this interpreter, where a worker would be
        command = config.command if arguments is None else [sys.executable, *arguments]
        for rank in range(config.nproc_per_node):
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "slurmft.agent.rehearsal", *command,
                    env=self._environment_of(rank, port), cwd=config.trainer_directory, start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT, limit=_LAST_BYTES,
                )
            )  # fmt: skip
        ends = await asyncio.gather(*map(_end_of, self._processes))
        failed = [(code, words) for code, words in ends if code not in (0, EXIT_TEMPORARY)]
        return [code for code, _ in ends], f"exit code {failed[0][0]}: {failed[0][1]}" if failed else ""

    def _environment_of(self, rank: int, port: int) -> dict[str, str]:
        start = StartWorkers(
            attempt="rehearsal",
            cycle=0,
            first_rank=0,
            nodes=1,
            generation=0,
            nodelist=self._environment.get("SLURMD_NODENAME"),
            master_addr="127.0.0.1",
            master_port=port,
        )
        environment = worker_environment(self._config, self._environment, start, rank, "rehearsal")
        for name in _OF_THE_RUN:
            environment.pop(name, None)
        settings = json.loads(environment[WORKER_VARIABLE])
        return environment | {
            WORKER_VARIABLE: json.dumps({**settings, "rehearsal": True}),
            "SLURMFT_CHECKPOINT_DIR": str(self._folder / "checkpoints"),
            "WANDB_MODE": "disabled",
        }

    async def _end_all(self) -> None:
        await asyncio.gather(*map(end_child, self._processes), return_exceptions=True)
        self._processes = []


async def _end_of(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Its exit code, and the last line that it wrote."""
    last = b""
    assert process.stdout is not None
    while part := await process.stdout.read(_LAST_BYTES):
        last = (last + part)[-_LAST_BYTES:]
    lines = last.decode("utf-8", "replace").split("\n")
    return await process.wait(), next((line.strip() for line in reversed(lines) if line.strip()), "")


def main(command: list[str]) -> NoReturn:
    """Become the command."""
    die_with_parent()
    os.execvp(command[0], command)  # noqa: S606 - the user's own command, without a shell


if __name__ == "__main__":
    main(sys.argv[1:])
