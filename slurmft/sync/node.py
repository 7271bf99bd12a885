"""The agent's side of kept folders (``sync:``): their process is started here, and what it says is passed on.

Nothing here waits for a store: orders are sent, and the supervisor asks whether they are carried out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.ipc.channel import Sent
from slurmft.ipc.messages import Synced, SyncFolders, SyncReport
from slurmft.system.background import Background, end_child

COMMAND = (sys.executable, "-P", "-m", "slurmft.sync.folder")
MAX_LINE_BYTES = 1 << 16
RESTART_S = 10.0
END_S = 0.5
"""How long its end is waited for: one that hangs in a filesystem cannot be killed, and is left behind."""

log = logging.getLogger(__name__)


class NodeSync:
    """Starts the process when it is needed first, and again where it has ended by itself.

    Args:
        report: sends a report to the supervisor.
    """

    def __init__(self, config: RunConfig, environment: Mapping[str, str], report: Callable[[Sent], None]) -> None:
        self._folders = config.sync
        self._environment, self._report = environment, report
        self._process: asyncio.subprocess.Process | None = None
        self._background = Background()
        self._number = 0
        self._waiting: set[int] = set()
        self._problems: list[str] = []
        self._began: SyncFolders | None = None
        """The attempt that the folders are kept for."""

    async def handle(self, call: SyncFolders) -> Synced:
        """Begin what is ordered, once, and say whether it is done."""
        if call.number != self._number:
            if not call.upload:
                self._began = call
            self._number, self._problems = call.number, []
            self._waiting = set(range(len(self._folders)))
            await self._send(call)
        return Synced(done=not self._waiting, problem="; ".join(self._problems)[:4000])

    async def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            await end_child(process, END_S)
        await self._background.cancel_all()

    async def _send(self, call: SyncFolders, *, resume: bool = False) -> None:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=dict(self._environment),
                limit=MAX_LINE_BYTES,
            )  # fmt: skip
            self._write({"folders": [each.model_dump(mode="json") for each in self._folders]})
            self._background.start(self._listen(self._process))
            if call.upload and self._began is not None:  # it has forgotten what for
                self._write(_order(self._began, "resume"))
        self._write(_order(call, "resume" if resume else "upload" if call.upload else "restore"))

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        while process.stdout is not None and (line := await process.stdout.readline()):
            self._hear(json.loads(line))
        code = await process.wait()
        if self._process is not process:
            return
        self._process = None
        reason = f"the process that keeps folders has ended with {code}"
        self._problems += [reason] if self._waiting else []
        self._waiting = set()
        for each in self._folders:
            self._report(SyncReport(what="failed", path=str(each.path), reason=reason))
        await asyncio.sleep(RESTART_S)
        if self._process is None and self._began is not None:
            await self._send(self._began, resume=True)

    def _hear(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "done":
            if message["number"] == self._number and message["folder"] in self._waiting:
                self._waiting.discard(message["folder"])
                self._problems += [message["problem"]] if message["problem"] else []
            return
        self._report(SyncReport(**{name: value for name, value in message.items() if name != "kind"}))


def _order(call: SyncFolders, action: str) -> Mapping[str, Any]:
    return {
        "action": action, "number": 0 if action == "resume" else call.number, "run": call.run, "place": call.place,
        "generation": call.generation, "within_s": call.within_s,
    }  # fmt: skip
