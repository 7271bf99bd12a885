"""One attempt of a sweep: a batch that may grow while it is worked on, on the nodes of as many jobs as it needs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as with_values

from slurmft.config.run import RunConfig
from slurmft.errors import LaunchError, RunBusy, SlurmftError, StorageError, StorageUnavailable
from slurmft.inference.coordinator import Coordinator
from slurmft.inference.ledger import AnswersSoFar
from slurmft.inference.requests import Batch, folder_of, load
from slurmft.inference.trials import Added, Known, add, add_values, rows
from slurmft.ipc.messages import ReplicaDied
from slurmft.policy.inference import EXIT_NODE
from slurmft.policy.verdict import EXIT_USAGE, Cause, Verdict
from slurmft.scheduler.slurm import expand
from slurmft.storage.journal import EventName
from slurmft.supervisor.agents import AgentLink
from slurmft.supervisor.cluster import SlurmCluster, Start
from slurmft.supervisor.crew import Crew
from slurmft.supervisor.inference import LENT_S, InferenceAttempt
from slurmft.supervisor.placement import EvidenceSender
from slurmft.supervisor.serving import Lenders, end_lenders
from slurmft.system.background import end_child
from slurmft.system.processes import die_with_parent

LOOK_S = 1.0
COUNT_S = 5.0
ASK_S = 0.25
MAX_VAIN = 1000
"""Answers of ``trials.next`` in a row that name trials, and none that is new."""

KEEP_S = 30.0
"""So long nodes are kept that have no trial while ``trials.next`` may name more: a search goes from batch to batch."""

MAX_LINE_BYTES = 64 << 20
END_S = 5.0

log = logging.getLogger(__name__)


class SweepAttempt(InferenceAttempt):
    """Runs trials in this job, and in others while there are enough of them."""

    def __init__(self, config: RunConfig, start: Start, sender: EvidenceSender, crew: Crew) -> None:
        super().__init__(config, start, sender, crew)
        self._pilots: Lenders | None = None
        if isinstance(self._cluster, SlurmCluster) and config.size.maximum > config.nodes:
            # of trials that have a job each, two jobs may share a node
            self._shares = self._section.replicas_per_node == 1
            self._pilots = Lenders(config, start, self._slurm, is_patient=True, spread=not self._shares,
                                   nodes=self._section.engine.nodes)  # fmt: skip
        self._asking: asyncio.subprocess.Process | None = None
        self._is_complete = config.trials is None or config.trials.next is None
        self._failed = set[str]()
        self._told = self._asking_failed = ""

    def _read_batch(self) -> Batch:
        folder = folder_of(self._run.path)
        if (batch := load(folder)) is not None:
            return batch
        assert self._config.trials is not None  # a batch script written by hand: nothing has been added yet
        add(self._run.path, self._config.trials)
        batch = load(folder)
        assert batch is not None
        return batch

    async def _open(self) -> None:
        await super()._open()
        self._background.start(self._look_for_more())
        self._background.start(self._count_failed())
        if self._config.trials is not None and self._config.trials.next is not None:
            self._background.start(self._ask(self._config.trials.next))
        if self._pilots is not None:
            self._background.start(self._keep_pilots(self._pilots))

    async def _look_for_more(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._grow()

    async def _grow(self) -> bool:
        """Take in what was added meanwhile; whether there was anything."""
        coordinator = self._coordinator
        assert isinstance(coordinator, Coordinator)
        try:
            batch = await self._in_folder(lambda: load(folder_of(self._run.path)))
        except StorageError as error:
            log.warning("trials that were added cannot be read, trying again: %s", error)
            return False
        if batch is None or batch.total <= coordinator.batch.total:
            return False
        # in the thread of the ledger's commits, none of which may see half of it
        await self._in_folder(lambda: coordinator.ledger.grow(batch))
        coordinator.grow(batch)
        self._journal.append(EventName.REQUESTS_OPENED, total=batch.total, answered=coordinator.requests.done)
        return True

    async def _count_failed(self) -> None:
        """For status."""
        coordinator, told, pause_s = self._coordinator, None, COUNT_S
        rows_of = _RowsOf(self._run.path)
        assert isinstance(coordinator, Coordinator)
        while True:
            await asyncio.sleep(pause_s)
            began_s, (ended, now) = time.monotonic(), coordinator.ledger.done_since(told)
            try:
                found = await asyncio.to_thread(rows_of, ended) if ended else []
            except SlurmftError as error:
                log.warning("failed trials cannot be counted, trying again: %s", error)
                continue
            told, pause_s = now, max(COUNT_S, 20 * (time.monotonic() - began_s))
            for row in found:
                (self._failed.add if row["state"] == "failed" else self._failed.discard)(row["trial"])

    def _progress(self, done: int) -> dict[str, Any]:
        failed = {"replicas": f"{len(self._failed)} trials failed"} if self._failed else {}
        return super()._progress(done) | failed

    async def _finish(self) -> None:
        if await self._grow():
            return
        if self._is_complete:
            await super()._finish()
            states = await asyncio.to_thread(_states_in, self._run.path)
            self._told = f"{states['done']} trials have a result, {states['failed']} failed"
        else:
            await asyncio.sleep(ASK_S)

    async def _ask(self, function: str) -> None:
        try:
            await self._ask_for_trials(function)
        except (SlurmftError, ValueError, OSError) as error:
            self._asking_failed = f"trials.next: {function}: {error}"
            self._over.set()

    async def _ask_for_trials(self, function: str) -> None:
        """Ask the user's function for trials, as long as there is room for them, until it has no more."""
        coordinator, told, known, rows_of = self._coordinator, None, Known(self._run.path), _RowsOf(self._run.path)
        assert isinstance(coordinator, Coordinator)
        asking = self._asking = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "slurmft.inference.trial_call", "--next", function, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, cwd=self._config.trainer_directory, limit=MAX_LINE_BYTES,
            env={**os.environ, **self._config.environment}, preexec_fn=die_with_parent,
        )  # fmt: skip
        assert asking.stdin is not None and asking.stdout is not None
        room, vain = self._section.replicas_on(self._config.size.maximum), 0
        while vain < MAX_VAIN:
            while coordinator.requests.total - coordinator.requests.done >= room:
                await asyncio.sleep(ASK_S)
            ended, told = coordinator.ledger.done_since(told)
            found = await asyncio.to_thread(rows_of, ended) if ended else []
            asking.stdin.write(json.dumps(found).encode() + b"\n")
            if not (line := await asking.stdout.readline()):
                raise LaunchError(f"its process ended with {await asking.wait()}; see the log of this job")
            answer = json.loads(line)
            if "error" in answer:
                raise LaunchError(answer["error"])
            if answer["trials"] is None:
                self._is_complete = True
                return
            if answer["trials"] == []:
                await asyncio.sleep(ASK_S)
                continue
            added = await self._put(answer["trials"], known)
            await self._grow()
            vain = 0 if added.new else vain + 1
            await asyncio.sleep(0 if added.new else ASK_S)
        raise LaunchError("it names only trials that it has named before")

    async def _put(self, given: Any, known: Known) -> Added:
        values = [(json.dumps(one).encode(), "next") for one in (given if isinstance(given, list) else [given])]

        def put() -> Added:
            with self._run.lock():
                return add_values(self._run.path, values, known)

        while True:
            try:
                added: Added = await self._in_folder(put)
                return added
            except (StorageUnavailable, RunBusy) as error:  # the function has named them, and would not do so again
                log.warning("trials cannot be added, trying again: %s", error)
                await asyncio.sleep(COUNT_S)

    async def _keep_pilots(self, pilots: Lenders) -> None:
        """Have other jobs lend nodes, as many as there are trials for, and end those that have none."""
        assert isinstance(self._cluster, SlurmCluster) and isinstance(self._coordinator, Coordinator)
        size = self._section.engine.nodes  # nodes that are counted below are as many together
        requests, mine, most = self._coordinator.requests, self._config.nodes // size, self._config.size.maximum // size
        kept = mine, 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            if self.stops.planned is not None or self._over.is_set():
                return
            links = list(self._joined.values())
            own = pilots.own(links) // size
            nodes = -(-(requests.total - requests.done) // self._section.replicas_per_node)
            needed = max(mine, min(most, nodes))
            now_s = time.monotonic()
            if needed >= kept[0] or now_s - kept[1] > KEEP_S or self._is_complete:
                kept = needed, now_s
            taken = () if self._shares else expand(self._cluster.job.nodes)
            for link in await pilots.balance_agents(
                links, {*taken, *self._cluster.lost}, self._held,
                needed=needed, wanted=kept[0], own=own, hoped=max(own, mine),
            ):  # fmt: skip
                self._let_go(link)

    async def _part_with(self, link: AgentLink) -> None:
        """Of a job that lends several nodes, each stays until their trial has ended, as long as there is time."""
        until_s = time.monotonic() + LENT_S
        while self._head_of(link.node) != link.node and self._held(link.node) and time.monotonic() < until_s:
            await asyncio.sleep(ASK_S)
        await super()._part_with(link)

    def _held(self, node: int) -> bool:
        assert isinstance(self._coordinator, Coordinator)
        return bool(self._coordinator.requests.held(self._head_of(node)))

    def _head_of(self, node: int) -> int:
        return node if self._gangs is None else self._gangs.head_of(node)

    def _suspect(self, link: AgentLink, report: ReplicaDied) -> None:
        if report.code == EXIT_NODE:  # not the trial's fault, alone as it was
            report = with_values(report, in_flight=(), load=None)
        super()._suspect(link, report)

    async def _wind_down(self) -> None:
        await super()._wind_down()
        is_over = self._output is not None or self.stops.planned is Cause.STOPPED_BY_USER
        if self._pilots is not None and is_over:  # else they wait for the run's next job
            await asyncio.to_thread(end_lenders, self._start)
        if self._asking is not None:
            await end_child(self._asking, END_S)

    def _verdict(self) -> Verdict:
        verdict = super()._verdict()
        if verdict.cause is Cause.FINISHED:
            return replace(verdict, reason=self._told or verdict.reason)
        if self._asking_failed and self.stops.planned is None:  # as it would on any node
            return replace(verdict, cause=Cause.WORKER_ERROR, reason=self._asking_failed, exit_code=EXIT_USAGE)
        return verdict


def _states_in(run_folder: Path) -> Counter[str]:
    return Counter(row["state"] for row in rows(run_folder))


class _RowsOf:
    """What has come of some trials, and then of others; used by one task."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder, self._so_far = run_folder, AnswersSoFar(folder_of(run_folder))

    def __call__(self, numbers: Collection[int]) -> list[dict[str, Any]]:
        return list(rows(self._run_folder, numbers, self._so_far))
