"""Where an agent finds its supervisor, and how it follows one that has moved to another node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.system.files import read_bytes, read_json, trusted_owners

SILENT_S = 2.5
"""From then on an agent looks for another address: a supervisor with a standby pings every second."""

LOOK_S = 0.5

log = logging.getLogger(__name__)

Address = tuple[list[str], int, bytes]
"""Hosts, best first, a port, and the secret."""


class Whereabouts:
    """The supervisor's address, which it leaves in an attempt's folder.

    Args:
        folder: the attempt's.
        may_move: a standby may take over, and writes its own address then.
    """

    def __init__(self, folder: Path, *, may_move: bool) -> None:
        self.folder, self._may_move = folder, may_move
        self._address: Address | None = None

    def read(self) -> Address:
        """Read once: a reconnection must not wait for a run folder that stalls.

        Raises:
            OSError: it is not there yet, or damaged.
        """
        if self._address is None:
            self._address = self._read()
        return self._address

    def _read(self) -> Address:
        where = read_json(self.folder / "control.json")
        if where is None:
            raise OSError("the supervisor has not said yet where it listens")
        try:
            hosts, port = [str(host) for host in where["hosts"]], int(where["port"])
            if not hosts:
                raise ValueError("no host")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise OSError(f"{self.folder / 'control.json'} is damaged") from error
        return hosts, port, read_bytes(self.folder / "secret", owners=trusted_owners(self.folder))

    async def unless_moved(self, work: Coroutine[Any, Any, None], silent_s: Callable[[], float]) -> None:
        """Do ``work``, which talks to the supervisor; it is cancelled when there is another address than before.

        Args:
            silent_s: for how long nothing has come from the supervisor.
        """
        if not self._may_move:
            await work
            return
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._moved(silent_s))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _moved(self, silent_s: Callable[[], float]) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if silent_s() < SILENT_S:
                continue
            with contextlib.suppress(OSError, StorageError):
                # in a thread: a run folder that stalls must not stall this node
                found = await asyncio.to_thread(self._read)
                if self._address is not None and found != self._address:
                    log.warning("the supervisor is at %s now", found[0][0])
                    self._address = found
                    return
