"""The supervisor's reads and writes in the run folder while an attempt runs, none of which blocks the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from slurmft.errors import SlurmftError, StorageError, StorageUnavailable
from slurmft.scheduler.parsing.parsing import ended_tasks
from slurmft.scheduler.parsing.srun_lines import parse_srun_lines
from slurmft.storage import signs_of_life
from slurmft.storage.patience import write_state
from slurmft.storage.run_folder import Attempt
from slurmft.supervisor.start import Start
from slurmft.supervisor.watch.hangs import Hangs
from slurmft.supervisor.watch.observations import Observations
from slurmft.supervisor.watch.slow_nodes import SlowNodes
from slurmft.system.opening import read_part

FIRST_FILE_S = 60.0
"""How long the first file of an attempt may take; nothing can start without it."""

PROGRESS_S = 1.0
"""How often progress is written."""

LEASE_LOOK_S = 0.25
SRUN_ERRORS_BYTES = 1 << 20
MAX_WORDS = 6
_OWN = ("slurmft: ", "  hint: ")
_OF_NO_USE = ("srun: ", "slurmstepd", "slurmft ")
"""Beginnings of lines that say how a task ended, or are of an agent's log."""


Result = TypeVar("Result")


class AttemptFolder:
    """One attempt's view of its run folder.

    Args:
        of: an earlier attempt of this start of the job, in whose folder agents find their supervisor.
    """

    def __init__(
        self, start: Start, *, of: Attempt | None = None, on_superseded: Callable[[], None] = lambda: None
    ) -> None:
        self._run, self._journal, self._thread = start.run, start.journal, start.thread
        self.attempt, self._generation = of or start.cluster.attempt, start.generation
        self._is_superseded, self._on_superseded, self._lease = False, on_superseded, start.lease
        self.path = start.run.attempts / str(self.attempt)
        self._kill_seen = False
        self._told_at = 0.0

    async def watch(self) -> None:
        """End the attempt where its supervisor has lost its lease: a standby may have taken the run over."""
        while self._lease is not None:
            await asyncio.sleep(LEASE_LOOK_S)
            if self._lease.is_lost:
                self._is_superseded = True
                self._on_superseded()
                return

    async def tell_agents(self, where: Mapping[str, Any]) -> None:
        """Write where the supervisor listens.

        Raises:
            StorageError: it cannot be written.
        """
        path = self.path / "control.json"
        try:
            await asyncio.wait_for(self._do(lambda: write_state(path, where)), FIRST_FILE_S)
        except TimeoutError as error:
            raise StorageUnavailable(f"{path} could not be written within {FIRST_FILE_S:.0f} s") from error

    async def ended_agent(self) -> tuple[str, str] | None:
        """Node of an agent that has ended, or could not be started, and how, in srun's words; None when there is none.

        Where one could not be started, srun ends the others.
        """
        with contextlib.suppress(OSError, StorageError):
            text = await self._do(self._srun_errors)
            return next(iter((*parse_srun_lines(text).refused, *ended_tasks(text))), None)
        return None

    async def requests(self, *, ready: bool) -> dict[str, str]:
        """New requests and their authors: KILL, REQUEUE, and SAVE when the workers are ``ready`` for one."""
        if self._is_superseded:  # requests are for the new owner to handle
            return {}
        with contextlib.suppress(OSError, StorageError):  # a transient filesystem error; the next look finds the file
            found = await self._do(lambda: self._look(ready=ready))
            self._kill_seen = self._kill_seen or "KILL" in found
            return found
        return {}

    async def tell_progress(self, seen: Observations, slow: SlowNodes, hangs: Hangs) -> None:
        """Write progress, and events that the journal could not take before, when they are due."""
        if time.monotonic() - self._told_at < PROGRESS_S:
            return
        self._told_at = time.monotonic()
        self._journal.retry()
        with contextlib.suppress(OSError, StorageError):
            await self._do(lambda: signs_of_life.touch(self._run, self.attempt))
            await self._do(seen.write_progress)
            await self._do(slow.exchange)
            await self._do(hangs.exchange)
            owner = await self._do(self._run.owner)
            if owner is not None and owner.generation > self._generation:
                self._is_superseded = True
                self._on_superseded()

    def leave(self, seen: Observations, slow: SlowNodes, hangs: Hangs) -> None:
        """Write the last progress before anything that is journaled from now on."""

        def work() -> None:
            with contextlib.suppress(OSError, SlurmftError):
                seen.write_progress()
                seen.write_timings()
                slow.exchange()
                hangs.leave()

        self._thread.submit(work)

    def remove_secret(self) -> None:
        """Remove the secret, so that no further agent can connect."""

        def work() -> None:
            with contextlib.suppress(OSError):
                (self.path / "secret").unlink(missing_ok=True)

        self._thread.submit(work)

    def last_words(self) -> str:
        """Why agents could not start, in their own words or else in those of what starts them; empty when unknown."""
        lines = [*self._lines("agents.log"), *self._lines("srun.err")]
        own = [line for line in lines if line.startswith(_OWN)]
        others = [line for line in lines if not line.startswith((*_OWN, *_OF_NO_USE))]
        if words := dict.fromkeys(line.strip()[:300] for line in (*others[-1:], *own[-MAX_WORDS:])):
            return f"; {'; '.join(words)}"
        return f"; srun: {lines[-1][:300]}" if lines else ""

    def _lines(self, name: str) -> list[str]:
        try:
            text = read_part(self.path / name, -SRUN_ERRORS_BYTES, SRUN_ERRORS_BYTES).decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()]

    def _srun_errors(self) -> str:
        return read_part(self.path / "srun.err", -SRUN_ERRORS_BYTES, SRUN_ERRORS_BYTES).decode(errors="replace")

    def _look(self, *, ready: bool) -> dict[str, str]:
        found = {
            "KILL": None if self._kill_seen else self._run.see_request("KILL"),
            "REQUEUE": self._run.take_request("REQUEUE"),
            "SAVE": self._run.take_request("SAVE") if ready else None,
        }
        return {kind: who for kind, who in found.items() if who is not None}

    async def _do(self, work: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._thread.submit(work))
