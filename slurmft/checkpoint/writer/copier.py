"""The thread of a writer that copies staged and hashed shards to peers and the local disk, beside the durable write.

Nothing waits for it: of waiting snapshots the newest wins, one that is written over meanwhile is dropped, and errors
are logged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmft.checkpoint.replicas.local_tier import keep_local, local_folder
from slurmft.checkpoint.replicas.replication import Peer, find_peers, key_file, send_copy
from slurmft.errors import StorageError
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.memory_folder import is_the_runs

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """A shard in shared memory, with digests."""

    index: Path
    image: Path
    checkpoint_dir: Path
    """The directory of its checkpoint, which the copies belong to."""

    bytes_per_s: float | None = None
    goes_to_peers: bool = True


class CopyLane:
    """Copies offered shards. Without peers and local disk it starts no thread, and is idle for ever."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        key = key_file(environment)
        self._key: Path = key or Path()
        self._peers: list[Peer] = find_peers(environment) if key is not None else []
        told = WorkerSettings.from_environment(environment).checkpoint.local_directory
        self._local = Path(told) if told else None
        self._changed = threading.Condition()
        self._waiting: Staged | None = None
        self._current: Staged | None = None
        if self._peers or self._local is not None:
            threading.Thread(target=self._run, name="copies", daemon=True).start()

    def offer(self, staged: Staged) -> None:
        """Copy this one next, instead of one that waits."""
        if (self._peers and staged.goes_to_peers) or self._local is not None:
            with self._changed:
                self._waiting = staged
                self._changed.notify_all()

    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        with self._changed:
            return self._waiting is None and self._current is None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                self._current, self._waiting = self._waiting, None
            try:
                if self._current is not None:
                    self._copy(self._current)
            except Exception:  # a bug here must not end all copies of this process
                log.exception("a snapshot was not copied")
            with self._changed:
                self._current = None

    def _copy(self, staged: Staged) -> None:
        is_wanted = staged.goes_to_peers and is_the_runs(staged.checkpoint_dir, self._environment)
        peers = self._peers if is_wanted else []
        for sent in send_copy(staged.index, staged.image, peers, self._key, bytes_per_s=staged.bytes_per_s):
            if sent.problem:
                log.warning("no copy with node %d: %s", sent.peer.place, sent.problem)
            else:
                log.info("copied to node %d in %.2f s", sent.peer.place, sent.seconds)
        if self._local is not None:
            try:
                problem = keep_local(staged.index, staged.image, local_folder(self._local, staged.checkpoint_dir))
            except (OSError, StorageError) as error:
                problem = str(error)
            if problem:
                log.warning("no copy in %s: %s", self._local, problem)
