"""Who answers what: ranges of requests are leased to agents, and come back when an agent is lost or gives them back."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurmft.policy.inference.poison import Death, evidence_of, is_poison

Run = tuple[int, int]
"""Numbers of requests: the first, and the one behind the last."""

OPEN, LEASED, DONE = 0, 1, 2
NO_AGENT = -1


@dataclass(slots=True)
class _Lease:
    at_s: float
    runs: list[Run]
    doubled: bool = False


class RequestRedistributor:
    """Every request is open, leased, or done; a lost agent's leases are open again at once.

    Args:
        done: one flag for each request; those that are answered already.
        tail_after_s: age from which a lease is given to a second agent when nothing else is open.
    """

    def __init__(self, done: NDArray[np.bool_], *, tail_after_s: float) -> None:
        self._state = np.where(done, DONE, OPEN).astype(np.uint8)
        self._holder = np.full(len(done), NO_AGENT, dtype=np.int32)
        """The agent whose loss opens a request that is leased; a second one at the end of the batch is none."""

        self._tail_after_s = tail_after_s
        self._held: dict[int, deque[_Lease]] = defaultdict(deque)
        self._suspects: deque[int] = deque()
        self._deaths: dict[int, list[Death]] = {}
        self.total = len(done)
        self.done = int(done.sum())
        self._open = _runs(np.flatnonzero(self._state == OPEN))  # sorted, which is a heap

    @property
    def finished(self) -> bool:
        """Every request is done."""
        return self.done == self.total

    def lease(self, agent: int, count: int, now_s: float) -> list[Run]:
        """Up to ``count`` requests for an agent, those first that come first in the input; at the end others' old ones.

        Suspects are not among them: each is leased alone.
        """
        self._forget_ended(agent)
        runs: list[Run] = []
        while count > 0 and self._open:
            first, last = heapq.heappop(self._open)
            if last - first > count:
                heapq.heappush(self._open, (first + count, last))
                last = first + count
            for low, high in self._part(first, last, OPEN):
                self._state[low:high], self._holder[low:high] = LEASED, agent
                count -= high - low
                runs.append((low, high))
        if not runs and count > 0:
            runs = self._tail(agent, count, now_s)
        if runs:
            self._held[agent].append(_Lease(now_s, runs))
        return runs

    def lease_alone(self, agent: int, now_s: float) -> int | None:
        """A request that may have killed an engine, to be tried with nothing beside it; None when there is none."""
        while self._suspects:
            index = self._suspects.popleft()
            if self._state[index] == OPEN:
                self._state[index], self._holder[index] = LEASED, agent
                self._held[agent].append(_Lease(now_s, [(index, index + 1)], doubled=True))
                return index
        return None

    def answered(self, runs: Iterable[Sequence[int]]) -> None:
        """These are committed, by whichever agent."""
        for first, last in runs:
            part = self._state[first:last]
            self.done += int((part != DONE).sum())
            part[:] = DONE

    def answered_as_in(self, done: NDArray[np.bool_]) -> None:
        """Requests whose flag is set are answered."""
        self._state[done] = DONE
        self.done = int((self._state == DONE).sum())

    def reopen(self, indexes: Iterable[int]) -> None:
        """Answers that cannot be read are no answers."""
        for index in indexes:
            self.done -= int(self._state[index] == DONE)
            self._state[index] = OPEN
            heapq.heappush(self._open, (index, index + 1))

    def give_back(self, agent: int, runs: Iterable[Sequence[int]]) -> int:
        """Open again, where it is this agent that has them: it will not answer them. Returns how many."""
        count = 0
        for first, last in runs:
            for low, high in self._part_of(agent, first, last):
                self._state[low:high] = OPEN
                count += high - low
                suspects = [index for index in self._deaths if low <= index < high and self._is_suspect(index)]
                self._suspects.extend(suspects)
                for run in _without((low, high), suspects):
                    heapq.heappush(self._open, run)
        return count

    def died(self, indexes: Sequence[int], replica: str, how: str) -> list[tuple[int, str]]:
        """A replica has died with these in flight. Returns those that are given up, and why.

        One that was there alone, or at an earlier death too, is a suspect now; the others are open again. A request
        that is given up stays leased, to the coordinator: it is answered with an error.
        """
        given_up = []
        for index in indexes:
            if self._state[index] == DONE:
                continue
            deaths = self._deaths.setdefault(index, [])
            deaths.append(Death(replica, alone=len(indexes) == 1, how=how))
            if is_poison(deaths):
                self._state[index], self._holder[index] = LEASED, NO_AGENT
                given_up.append((index, evidence_of(deaths)))
                continue
            self._state[index] = OPEN
            if self._is_suspect(index):
                self._suspects.append(index)
            else:
                heapq.heappush(self._open, (index, index + 1))
        return given_up

    def held(self, agent: int) -> list[Run]:
        """What an agent has, and has not answered."""
        return [
            part
            for lease in self._held.get(agent, ())
            for first, last in lease.runs
            for part in self._part(first, last, LEASED)
        ]

    def lose(self, agent: int) -> int:
        """An agent is lost: all that it holds and has not answered is open again. Returns how many those are."""
        return sum(self.give_back(agent, lease.runs) for lease in self._held.pop(agent, ()))

    def _part(self, first: int, last: int, state: int) -> list[Run]:
        return [(first + low, first + high) for low, high in _runs(np.flatnonzero(self._state[first:last] == state))]

    def _part_of(self, agent: int, first: int, last: int) -> list[Run]:
        is_held = (self._state[first:last] == LEASED) & (self._holder[first:last] == agent)
        return [(first + low, first + high) for low, high in _runs(np.flatnonzero(is_held))]

    def _is_suspect(self, index: int) -> bool:
        deaths = self._deaths[index]
        return len(deaths) > 1 or deaths[0].alone

    def _forget_ended(self, agent: int) -> None:
        leases = self._held[agent]
        while leases and not any(self._part_of(agent, first, last) for first, last in leases[0].runs):
            leases.popleft()

    def _tail(self, agent: int, count: int, now_s: float) -> list[Run]:
        runs: list[Run] = []
        for other, leases in self._held.items():
            if other == agent:
                continue
            for lease in leases:
                if count <= 0 or now_s - lease.at_s < self._tail_after_s:
                    break
                if lease.doubled:
                    continue
                left = [part for first, last in lease.runs for part in self._part_of(other, first, last)]
                lease.doubled = True
                runs += left
                count -= sum(last - first for first, last in left)
        return runs


def _without(run: Run, indexes: Sequence[int]) -> list[Run]:
    """The parts of a run that are left without these numbers."""
    parts, first = [], run[0]
    for index in sorted(indexes):
        if first < index:
            parts.append((first, index))
        first = index + 1
    return [*parts, (first, run[1])] if first < run[1] else parts


def _runs(indexes: NDArray[np.intp]) -> list[Run]:
    if not len(indexes):
        return []
    breaks = np.flatnonzero(np.diff(indexes) > 1)
    firsts = np.concatenate(([indexes[0]], indexes[breaks + 1]))
    lasts = np.concatenate((indexes[breaks], [indexes[-1]])) + 1
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
