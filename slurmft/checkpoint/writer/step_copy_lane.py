"""The thread of a writer that copies steps to other nodes' memory between two saves. Nothing of them goes to disk.

It works beside the durable write, which may take a hundred times as long. No torch.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmft.checkpoint.format.image_writing import Mappings, digests
from slurmft.checkpoint.format.shard_index import read_index, write_index
from slurmft.checkpoint.replicas.replication import Peer, find_peers, key_file, located, send_copy
from slurmft.checkpoint.staging.holding import holding
from slurmft.checkpoint.writer.fault_points import reached
from slurmft.checkpoint.writer.image_lane import POLITE_BYTES, size_of
from slurmft.checkpoint.writer.priority import do_politely
from slurmft.checkpoint.writer.writer_task import Left, Task
from slurmft.errors import StorageError
from slurmft.storage.checkpoint_names import Identity

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Copy:
    task: Task
    stop: threading.Event = field(default_factory=threading.Event)


class StepCopyLane:
    """Hashes each offered step and sends it to this node's peers; the worker offers the next one when it has ended.

    The listening thread calls everything here, and never waits. Without an offer it starts no thread.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._peers: list[Peer] | None = None
        self._changed = threading.Condition()
        self._waiting: list[_Copy] = []
        self._current: _Copy | None = None
        self._images = Mappings()

    def offer(self, task: Task) -> None:
        """Copy this one after those that were offered before."""
        with self._changed:
            if self._peers is None:
                self._peers = find_peers(self._environment) if key_file(self._environment) is not None else []
                threading.Thread(target=self._run, name="step copies", daemon=True).start()
            self._waiting.append(_Copy(task))
            self._changed.notify()

    def abandon(self, identity: Identity) -> bool:
        """Whether this lane had it."""
        with self._changed:
            for one in (*self._waiting, self._current):
                if one is not None and one.task.request.identity == identity:
                    one.task.stop("abandoned")
                    one.stop.set()
                    return True
        return False

    def end_within(self, seconds: float) -> None:
        """Its worker is gone: what has not arrived then is left, as the next attempt has chosen its state by then."""

        def leave() -> None:
            with self._changed:
                left = [one for one in (*self._waiting, self._current) if one is not None]
            for one in left:
                self.abandon(one.task.request.identity)

        timer = threading.Timer(seconds, leave)
        timer.daemon = True
        timer.start()

    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        with self._changed:
            return not self._waiting and self._current is None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                self._current = one = self._waiting.pop(0)
            if size_of(one.task.request.image) < POLITE_BYTES:
                self._finish(one)
            else:
                do_politely(functools.partial(self._finish, one))
            with self._changed:
                self._current = None

    def _finish(self, one: _Copy) -> None:
        try:
            problem = self._copy(one)
            one.task.tell("copied", final=True, phase=one.task.phase, text=problem)
        except Left as left:
            one.task.tell(left.kind, final=True, phase=one.task.phase)
        except Exception as error:  # a bug here must not end all copies of this process
            log.exception("step %d was not copied", one.task.request.identity.step)
            one.task.tell_failure(error, final=True)

    def _copy(self, one: _Copy) -> str:
        """Why a peer does not have it; empty where all do."""
        task, request = one.task, one.task.request
        task.phase = "reading the image"
        with holding(request.image) as source:
            index = read_index(request.snapshot)
            if index is None or (index.identity, index.shard) != (request.identity, request.shard):
                raise StorageError(f"{request.snapshot} holds another snapshot than {request.identity.folder_name}")
            if not index.is_hashed:
                with self._images.of(source, index.size_bytes) as view:
                    hashed = index.with_digests(digests(view, index, lambda _: task.leave_if_stopped()))
                write_index(request.snapshot, hashed, durable=False)
            reached("step hashed")
            task.phase = "sending it"
            return self._send(one)

    def _send(self, one: _Copy) -> str:
        request, problems = one.task.request, list[str]()
        key = key_file(self._environment) or Path()
        for number, peer in enumerate(self._peers or ()):
            known = peer if peer.addresses else located(peer)
            (sent,) = send_copy(
                request.snapshot, request.image, [known], key, bytes_per_s=request.max_bytes_per_s or None,
                stop=one.stop, keep=request.keeps,
            )  # fmt: skip
            one.task.leave_if_stopped()
            if sent.problem:
                problems.append(f"node {peer.place}: {sent.problem}")
                log.warning("no copy of step %d with node %d: %s", request.identity.step, peer.place, sent.problem)
            if self._peers is not None:  # another agent may have taken its place in the meantime
                self._peers[number] = replace(known, addresses=()) if sent.problem else known
        reached("step sent")
        return "; ".join(problems)
