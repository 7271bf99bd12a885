"""The node's memory for snapshots, and its keeper: the agent's child that takes copies of other nodes' shards.

The agent holds the listening socket, so a keeper that dies is followed by another one at the same address.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from slurmft.errors import StorageError
from slurmft.storage.memory_folder import GENERATION_FILE, KEY_FILE, announcement, copies_key
from slurmft.system.files import replace_atomically, write_json
from slurmft.system.opening import open_regular

BACKLOG = 64

log = logging.getLogger(__name__)


class Keeping:
    """The keeper of one node, over all attempts of its agent. A run without copies has none.

    Nothing here may keep workers from starting: errors are logged, and the copies are missing.
    """

    def __init__(self, memory: Path, copies: int) -> None:
        self._memory, self._copies = memory, copies
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def begin(
        self, attempt_folder: Path, *, generation: int, place: int, nodes: int, hosts: Sequence[str], secret: bytes
    ) -> None:
        """Workers of a new attempt begin: copies of older ones are refused from now on, and its nodes get our address.

        Args:
            place: of this node in the attempt.
            hosts: names and addresses at which other nodes find this one.
        """
        try:
            self._advance_fence(generation)
            if nodes < 2:
                return
            if not (self._memory / KEY_FILE).exists():
                replace_atomically(self._memory / KEY_FILE, copies_key(secret).decode(), durable=False)
            if not self._copies:
                return
            if self._listener is None:
                self._listener = _listen(hosts)
            self.look_after()
        except OSError as error:
            log.error("no copies of other nodes' snapshots are taken: %s", error)
            self.close()  # it may know an older fence
            return
        where = {"hosts": list(hosts), "port": self._listener.getsockname()[1]}
        path = announcement(attempt_folder, place)
        # not waited for: a run folder that stalls must not keep the workers from starting
        threading.Thread(target=_announce, args=(path, where), daemon=True).start()

    def _advance_fence(self, generation: int) -> None:
        """On a full filesystem in place: the file's page is there already, and a generation never gets shorter.

        Raises:
            OSError: there is no room, and no such file yet.
        """
        path = self._memory / GENERATION_FILE
        try:
            replace_atomically(path, str(generation), durable=False)
        except OSError:
            descriptor = open_regular(path, os.O_WRONLY)
            try:
                os.write(descriptor, str(generation).encode())
            finally:
                os.close(descriptor)

    def look_after(self) -> None:
        """Start the keeper where it should run and does not.

        Raises:
            OSError: it cannot be started.
        """
        if self._listener is None or (self._process is not None and self._process.poll() is None):
            return
        if self._process is not None:
            log.warning("the keeper of copies ended with code %s; starting another", self._process.returncode)
        number = self._listener.fileno()
        argv = [sys.executable, "-P", "-m", "slurmft.checkpoint.replicas.keeper", str(self._memory), str(number)]
        self._process = subprocess.Popen(argv, pass_fds=[number], stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """End the keeper."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @property
    def pid(self) -> int | None:
        """The keeper's process id, where one runs."""
        return None if self._process is None else self._process.pid


def _listen(hosts: Sequence[str]) -> socket.socket:
    local = all(host.startswith("127.") for host in hosts)
    dual = not local and socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if dual:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("127.0.0.1" if local else "", 0))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _announce(path: Path, where: dict[str, object]) -> None:
    try:
        write_json(path, where, durable=False)
    except (OSError, StorageError) as error:
        log.error("other nodes will send no copies here: %s", error)


async def look_after_regularly(keeping: Keeping, interval_s: float) -> None:
    """Start the keeper again whenever it has died."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            keeping.look_after()
        except OSError as error:
            log.error("no copies of other nodes' snapshots are taken: %s", error)
