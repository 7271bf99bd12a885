"""Digests of a worker's state at regular steps and before every save, left in its page for the agent.

No step waits: the device computes a digest behind its other work, and the number is picked up at a later step. Only
the first three digests of an attempt are compared among the ranks themselves, tensor by tensor: what differs by design
(seeds, running statistics of each rank's own batches) is found there, named, and left out from then on.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from slurmft.ipc.pages.digest_ring import DigestRing
from slurmft.ipc.pages.heartbeat import Page
from slurmft.policy.nodes.digests import is_left_out, left_out
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.trainer import streams
from slurmft.trainer.host_group import host_group
from slurmft.trainer.savers import SAVERS
from slurmft.worker.digests.state import Digester, Named, digester_of, group_of, signed, tensors_of

LEARNED = 3
"""Digests of an attempt in which the ranks look for what differs by design."""

SHOWN = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A digest that the device is still computing."""

    step: int
    group: int
    host_part: int
    number: torch.Tensor
    ready: streams.Event


class ReplicaDigests:
    """The digests of one session. All ranks call each method at the same steps."""

    def __init__(self, interval_steps: int, page: Page, *, world_size: int, is_lead: bool) -> None:
        self._interval = interval_steps if world_size > 1 else 0
        self._ring, self._is_lead = DigestRing(page), is_lead
        self._digesters: dict[torch.device, Digester] = {}
        self._left_out: frozenset[str] = frozenset()
        self._pending: list[_Pending] = []
        self._start = self._done = -1
        self._rounds = 0
        self._groups: dict[int, int] = {}

    @classmethod
    def from_environment(cls, page: Page, *, world_size: int, is_lead: bool) -> Self:
        """As the run's configuration says.

        Raises:
            ConfigError: a variable of the agent cannot be read.
        """
        settings = WorkerSettings.from_environment(os.environ)
        return cls(settings.digest_interval_steps, page, world_size=world_size, is_lead=is_lead)

    def begin(self, start: int) -> None:
        """The loop of steps begins after ``start`` steps."""
        self._start, self._done, self._rounds, self._left_out = start, -1, 0, frozenset()

    def at_boundary(self, step: int) -> None:
        """``step`` steps are complete: compute a digest if one is due, and pick up those that are ready."""
        if not self._interval:
            return
        if self._pending:
            self._collect(wait=False)
        if step % self._interval == 0 or step - self._start < LEARNED:
            self.at_save(step)

    def at_save(self, step: int) -> None:
        """The state after ``step`` steps is about to be saved: compute its digest, unless that was done."""
        if not self._interval or self._done == step:
            return
        self._done = step
        trained = SAVERS.trained
        if trained is None:
            if self._is_lead and not self._rounds:
                log.warning("no digests of replicas: no checkpoint manager has seen a model yet")
            self._rounds = max(1, self._rounds)
            return
        tensors = tensors_of(*trained)
        if self._rounds < LEARNED and step - self._start < LEARNED:
            self._learn(tensors, trained=step > self._start)
            self._rounds += 1
        if self._left_out:
            tensors = [one for one in tensors if not is_left_out(one.name, self._left_out)]
        self._digest(step, tensors)

    def flush(self) -> None:
        """Pick up all digests, waiting for the device."""
        if self._pending:
            self._collect(wait=True)

    def _digest(self, step: int, tensors: list[Named]) -> None:
        group = self._groups.get(len(tensors))
        if group is None:
            group = self._groups[len(tensors)] = group_of(tensors)
        host_part, device_part = 0, None
        for device in sorted({one.tensor.device for one in tensors}, key=str):
            found = self._digester(device).digest(one.tensor for one in tensors if one.tensor.device == device)
            if device_part is None and streams.of(device) is not None:
                device_part = found
            else:
                host_part += int(found)
        if device_part is None:
            self._ring.add(group, step, signed(host_part))
            return
        gpu = streams.of(device_part.device)
        if gpu is None:
            raise RuntimeError(f"{device_part.device} has gone")
        number = torch.empty((), dtype=torch.int64, pin_memory=True)
        gpu.copy(number, device_part)
        (ready := gpu.event()).record()
        self._pending.append(_Pending(step, group, host_part, number, ready))

    def _digester(self, device: torch.device) -> Digester:
        if device not in self._digesters:
            self._digesters[device] = digester_of(device)
        return self._digesters[device]

    def _collect(self, *, wait: bool) -> None:
        while self._pending:
            first = self._pending[0]
            while not first.ready.query():
                if not wait:
                    return
                time.sleep(streams.FIRST_LOOK_S)
            self._pending.pop(0)
            self._ring.add(first.group, first.step, signed(first.host_part + int(first.number)))

    def _learn(self, tensors: list[Named], *, trained: bool) -> None:
        """Find the tensors that differ between replicas by design. A collective, of the first steps only."""
        buffers = {one.name for one in tensors if one.is_buffer}
        group = group_of(tensors)
        most, least = _bounds(torch.tensor([group]))
        if most.equal(least):
            digests = [self._digester(one.tensor.device).digest([one.tensor]) for one in tensors]
            most, least = _bounds(torch.tensor([int(each) for each in digests], dtype=torch.int64))
            differing = {one.name for one, same in zip(tensors, (most == least).tolist(), strict=True) if not same}
        else:  # ranks hold different parts, and cannot compare them tensor by tensor
            differing = buffers
        found = left_out(differing, buffers=buffers, trained=trained, so_far=self._left_out)
        if (new := sorted(found - self._left_out)) and self._is_lead:
            more = f" and {len(new) - SHOWN} more" if len(new) > SHOWN else ""
            log.warning("replicas are compared without %s%s: each rank has its own", ", ".join(new[:SHOWN]), more)
        if found != self._left_out:
            self._left_out, self._groups = found, {}


def _bounds(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest and the smallest of all ranks, of each number."""
    both = torch.cat([numbers, ~numbers])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=host_group())
    return both[: len(numbers)], ~both[len(numbers) :]
