"""Kept folders (``sync:``), the supervisor's side: restored before workers start, uploaded when they have ended."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from slurmft.config.config import RunConfig
from slurmft.errors import LaunchError
from slurmft.ipc.calls import SyncFolders
from slurmft.ipc.sync import SyncReport
from slurmft.storage.events import EventName
from slurmft.storage.patience import write_state
from slurmft.supervisor.fleet.agents import AgentLink, AgentLost, AgentPool
from slurmft.supervisor.start import Start
from slurmft.system.files import read_json

LOOK_S = 0.2
MARGIN_S = 30.0
"""Beyond an agent's own limit: when this has passed, the agent does not answer as it should."""

IDENTITY_S = 60.0
EVENTS: Mapping[str, EventName] = {
    "restored": EventName.FOLDER_RESTORED,
    "kept": EventName.FOLDER_KEPT,
    "set aside": EventName.FOLDER_SET_ASIDE,
    "uploaded": EventName.FOLDER_UPLOADED,
    "failed": EventName.SYNC_FAILED,
    "works again": EventName.SYNC_WORKS_AGAIN,
}


class KeptFolders:
    """Has agents restore and upload their folders; nothing where none is configured."""

    def __init__(self, config: RunConfig, start: Start, pool: AgentPool) -> None:
        self._folders = config.sync
        self._start, self._pool = start, pool
        self._run = ""
        self._generation = 0

    async def restore(self, start: Start, members: Sequence[AgentLink], over: asyncio.Event) -> None:
        """Return when every member has what its workers are to find, or the attempt is over.

        Raises:
            LaunchError: a folder cannot be restored.
            AgentLost: an agent is gone.
        """
        if not self._folders:
            return
        self._start, self._generation = start, start.generation
        self._run = self._run or await asyncio.to_thread(self._identity)
        limit_s = max(each.restore_timeout_s for each in self._folders) + MARGIN_S
        problems = await asyncio.gather(
            *(
                self._order(link, place, "restore", within_s=0.0, until_s=lambda: time.monotonic() + limit_s, over=over)
                for place, link in enumerate(members)
            )
        )
        if not over.is_set() and (problem := next(filter(None, problems), "")):
            raise LaunchError(problem)

    async def upload(self, until_s: Callable[[], float]) -> None:
        """Have every member that can be reached upload what its workers have left; failures are in the journal.

        Args:
            until_s: the monotonic time at which there is none left, which may become known in between.
        """
        if not self._folders or not self._run:
            return
        end_s = time.monotonic() + max(each.upload_timeout_s for each in self._folders)

        def until() -> float:
            return min(end_s, until_s())

        members = list(enumerate(self._pool.members))
        results = await asyncio.gather(
            *(
                self._order(link, place, "upload", within_s=max(1.0, until() - time.monotonic()), until_s=until)
                for place, link in members
            ),
            return_exceptions=True,
        )
        for (_, link), result in zip(members, results, strict=True):
            if isinstance(result, AgentLost):
                self._note_failure(link, f"the last upload was not made: {result}")
            elif isinstance(result, BaseException):
                raise result

    def note(self, link: AgentLink, report: SyncReport) -> None:
        """Write into the journal what a node reports."""
        if (event := EVENTS.get(report.what)) is None:
            return
        facts = {"version": report.version, "files": report.files, "bytes": report.bytes}
        facts = {name: value for name, value in facts.items() if value}
        took = {"seconds": round(report.took_s, 3)} if report.took_s else {}
        reason = {"reason": report.reason} if report.reason else {}
        self._start.journal.append(event, node=link.host, path=report.path, **facts, **took, **reason)

    def _note_failure(self, link: AgentLink, reason: str) -> None:
        paths = ", ".join(str(each.path) for each in self._folders)
        self.note(link, SyncReport(what="failed", path=paths, reason=reason))

    async def _order(
        self, link: AgentLink, place: int, action: str, *, within_s: float, until_s: Callable[[], float],
        over: asyncio.Event | None = None,
    ) -> str:  # fmt: skip
        call = SyncFolders(upload=action == "upload", number=secrets.randbits(60), run=self._run, place=place,
                           generation=self._generation, within_s=within_s)  # fmt: skip
        end_s = until_s()
        while over is None or not over.is_set():
            reply = await link.call(call)
            if reply.done:
                return reply.problem
            if time.monotonic() > (min(end_s, until_s()) if over is None else end_s):
                problem = f"{action} of the kept folders on {link.host} was not done in time"
                self._note_failure(link, problem)
                return problem
            await asyncio.sleep(LOOK_S)
        return ""

    def _identity(self) -> str:
        """The run's name where folders are stored: two runs with one address, or a later one of this name, never meet.

        Raises:
            StorageError: the run folder cannot be read or written.
        """
        path = self._start.run.path / "sync.json"

        def work() -> str:
            found = (read_json(path) or {}).get("run")
            if not isinstance(found, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", found):
                name = re.sub(r"[^A-Za-z0-9_-]", "_", self._start.run.path.name)[:60]
                found = f"{name}-{secrets.token_hex(8)}"
                write_state(path, {"run": found})
            return found

        return self._start.thread.call(work, timeout_s=IDENTITY_S)
