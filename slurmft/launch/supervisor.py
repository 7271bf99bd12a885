"""One attempt, from the start of its agents to its verdict. What follows from the verdict is ``ending``'s business."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from typing import Any

from slurmft.config import RunConfig
from slurmft.errors import LaunchError, StorageError
from slurmft.launch.agents import AgentLink, AgentLost, AgentPool
from slurmft.launch.attempt_folder import AttemptFolder
from slurmft.launch.channel import Message
from slurmft.launch.cluster import Cluster
from slurmft.launch.evidence import HURRIED_READ_S, READ_S, testimony_of
from slurmft.launch.grace import workload_of
from slurmft.launch.guardian import hold_signals, release_signals
from slurmft.launch.heartbeat import StopAction
from slurmft.launch.observations import Observations
from slurmft.launch.sleeping import overslept_s
from slurmft.launch.slurms_word import SlurmsWord
from slurmft.launch.start import Start
from slurmft.launch.stopping import agree, describe
from slurmft.launch.winding_down import end_agents
from slurmft.policy.exit_actions import ExitAction, codes_of
from slurmft.policy.grace import REQUEUE_COST_S, cause_of_signal, seconds_for_stop
from slurmft.policy.judge import Circumstances, judge
from slurmft.policy.stop import ByThemselves, NothingToSave
from slurmft.policy.verdict import Cause, Verdict

POLL_S = 0.25
"""How often request files are looked for."""

PEER_GRACE_S = 3.0
"""After one rank failed: how long the others may take to fail of it by themselves, and say why, before the kill."""

PING_S = 5.0
ENDED_BY_TERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
CAUSE_PATIENCE_S = 15.0

log = logging.getLogger(__name__)


class Supervisor:
    """Runs one attempt."""

    def __init__(self, config: RunConfig, start: Start) -> None:
        self._config, self._start = config, start
        self._cluster: Cluster = start.cluster
        self._run, self._journal = start.run, start.journal
        self._folder = AttemptFolder(start)
        self._pool = AgentPool(start.secret, config.nodes)
        self._processes: list[asyncio.subprocess.Process] = []
        self._seen = Observations(
            self._run, self._journal, self._cluster.attempt, config.world_size,
            workload=workload_of(config), history=start.history,
        )  # fmt: skip
        self._slurm = SlurmsWord(self._cluster, start.journal)
        self._slurm.on_ending = self._hurry
        self._stop_timer: asyncio.Timeout | None = None
        self.ends_at_s: float | None = None
        """Monotonic time at which Slurm will have ended the job, where a stop has told it."""

        self._planned: Cause | None = None
        self._planned_reason = self._launch_error = ""
        self._lost: list[str] = []
        self._over = asyncio.Event()
        self._agreement = asyncio.Lock()
        self._stop_told = asyncio.Event()
        """The journal has the stop, its cause and its deadline."""

        self._tasks: set[asyncio.Task[Any]] = set()
        self._signals = 0
        self._failed = False

    async def run(self) -> Verdict:
        """Run the attempt to its end.

        Raises:
            SlurmftError: nothing could be started.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_own_signal, signal.Signals(number).name)
        release_signals()
        try:
            await self._launch()
            await self._over.wait()
            if self._planned is not None:  # a slow Slurm must not cost us the cause
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop_told.wait(), CAUSE_PATIENCE_S)
        except (LaunchError, AgentLost, StorageError, OSError) as error:
            self._launch_error = str(error)
        finally:
            await self._wind_down()
            hold_signals()  # the handlers go with the loop; what follows must not be cut short
        return self._verdict()

    async def _launch(self) -> None:
        port = await self._pool.listen(self._cluster.listen_host)
        await self._folder.tell_agents({"hosts": self._cluster.control_hosts(), "port": port})
        self._processes = await self._cluster.start_agents(self._config, self._folder.path)
        self._background(self._slurm.read_terms())
        self._background(self._watch_processes())
        self._background(self._watch_requests())
        self._background(self._handle_events())
        self._background(self._watch_agents())
        await self._wait_for_agents()
        if self._over.is_set():
            return
        await self._start_workers()

    async def _wait_for_agents(self) -> None:
        timeout_s = self._config.fault_tolerance.launch_timeout_s
        waits = [asyncio.create_task(self._pool.complete.wait()), asyncio.create_task(self._over.wait())]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not self._pool.complete.is_set() and not self._over.is_set():
            missing = self._config.nodes - len(self._pool.links)
            raise LaunchError(
                f"{missing} of {self._config.nodes} agents did not report within {timeout_s:.0f} s "
                "(fault_tolerance.launch_timeout_s)",
                hint=f"see srun.err in {self._folder.path}",
            )

    async def _start_workers(self) -> None:
        lead = self._pool.links[0]
        port = (await lead.call("port"))["port"]
        self._journal.append("agents ready", hosts=[link.host for _, link in sorted(self._pool.links.items())])
        await asyncio.gather(
            *(
                link.call(
                    "start",
                    first_rank=node * self._config.nproc_per_node,
                    generation=self._start.generation,
                    master_addr=lead.host,
                    master_port=port,
                )
                for node, link in self._pool.links.items()
            )
        )
        self._journal.append("workers started", world_size=self._config.world_size)

    # What is reported to us

    async def _handle_events(self) -> None:
        while True:
            link, message = await self._pool.events.get()
            match message["kind"]:
                case "exited":
                    self._on_exit(link, message)
                case "progress":
                    self._seen.note_progress(message["ranks"])
                case "signal":
                    self._on_signal(message["name"], link.host)
                case "disconnected":
                    self._background(self._on_disconnect(link))

    def _on_exit(self, link: AgentLink, message: Message) -> None:
        end = self._seen.note_exit(link.host, message)
        # a script that knows only the signal dies of it; its peers may still be saving, and have until the deadline
        obeyed = self._planned is not None and end.code in ENDED_BY_TERM
        if end.code != 0 and not end.stopped and not end.killed and not obeyed:
            self._journal.append("worker failed", rank=end.rank, node=link.host, code=end.code, error=end.error)
            if not self._failed:
                self._background(self._kill_peers())
            self._failed = True
        if self._seen.all_ended:
            self._over.set()

    async def _kill_peers(self) -> None:
        await asyncio.sleep(PEER_GRACE_S)
        if not self._over.is_set():
            await self._kill_workers("a rank has failed; the others cannot go on without it")

    async def _on_disconnect(self, link: AgentLink) -> None:
        """Give a connection that broke the time to come back; an agent that is gone takes its workers with it."""
        await asyncio.sleep(PEER_GRACE_S)
        if self._over.is_set() or self._pool.links.get(link.node) is not link:
            return
        self._lost.append(link.host)
        self._journal.append("agent lost", node=link.host)
        await self._kill_workers(f"the agent on {link.host} is gone")
        await asyncio.sleep(PEER_GRACE_S)
        self._over.set()

    async def _watch_processes(self) -> None:
        codes = await asyncio.gather(*(process.wait() for process in self._processes))
        if not self._over.is_set():
            await asyncio.sleep(POLL_S)  # reports that are on their way
        if not self._over.is_set():
            await self._slurm.is_ending()
            self._journal.append("agents gone", exit_codes=codes)
            if not self._seen.any_started and self._slurm.outside is None:
                if set(codes) & set(ENDED_BY_TERM):
                    # agents that were still starting obey a TERM like any process; it was not their failure
                    self._on_signal("SIGTERM", "agents that were still starting")
                    return
                last_words = self._folder.last_words()
                self._launch_error = f"the agents ended with {codes} before they had started a worker{last_words}"
            self._over.set()

    # Stops

    def _on_own_signal(self, name: str) -> None:
        self._signals += 1
        if self._signals == 1:
            self._background(self._judge_own_signal(name))

    async def _judge_own_signal(self, name: str) -> None:
        """Slurm signals the batch step only when it ends the job; a person may at any time."""
        if self._cluster.name == "local" and name == "SIGINT" and self._planned is None:
            self._stop_for_request(Cause.STOPPED_BY_USER, "stopped with Ctrl-C")
        elif not await self._slurm.is_ending():
            self._signals = 0
            self._on_signal(name, "the supervisor")

    def _hurry(self) -> None:
        if self._stop_timer is not None and (self._stop_timer.when() or 0.0) > self._slurm.kill_at_s:
            with contextlib.suppress(RuntimeError):  # its time was up meanwhile
                self._stop_timer.reschedule(self._slurm.kill_at_s)

    def _on_signal(self, name: str, where: str) -> None:
        if self._planned is None:
            self._planned = Cause.SIGNALLED  # remembered at once; the second one of a row must find it
            self._background(self._stop_for_signal(name, where, time.monotonic()))

    async def _stop_for_signal(self, name: str, where: str, at_s: float) -> None:
        # the save must not wait for Slurm's answers: they only say why, and how long there is
        stopping = asyncio.create_task(self._agreed_stop())
        times, ending = await asyncio.gather(self._slurm.times(), self._slurm.is_ending())
        section = self._config.preemption
        lead_s = float(section.signal_lead_s)
        if self._cluster.name == "local":
            cause, left_s = Cause.PREEMPTED, section.stop_timeout_s
        elif ending and self._slurm.outside is not None:
            cause, left_s = self._slurm.outside[0], max(1.0, self._slurm.kill_at_s - at_s)
        else:
            now = self._slurm.terms.clock.at(at_s)
            cause = cause_of_signal(times, now=now, lead_s=lead_s)
            left_s = seconds_for_stop(times, cause=cause, now=now, lead_s=lead_s, timeout_s=section.stop_timeout_s)
            if not ending:
                self._background(self._slurm.look_again())
        if self._planned is Cause.STOPPED_BY_USER:  # asked for in the meantime
            cause = Cause.STOPPED_BY_USER
        if cause in (Cause.PREEMPTED, Cause.TIME_LIMIT):
            self.ends_at_s = at_s + left_s + REQUEUE_COST_S
        await self._stop(cause, f"{name} at {where}", stopping, at_s=at_s, left_s=left_s)

    def _stop_for_request(self, cause: Cause, reason: str) -> None:
        self._planned = cause
        left_s = self._config.preemption.stop_timeout_s
        stopping = asyncio.create_task(self._agreed_stop())
        self._background(self._stop(cause, reason, stopping, at_s=time.monotonic(), left_s=left_s))

    async def _stop(
        self, cause: Cause, reason: str, stopping: asyncio.Task[None], *, at_s: float, left_s: float
    ) -> None:
        """Save at an agreed step and end the workers; by force when the time is up, which runs from ``at_s`` on."""
        at = time.time() - (time.monotonic() - at_s)
        self._planned = cause
        self._planned_reason = self._planned_reason or reason
        self._journal.append("stop requested", cause=cause.value, reason=reason, signal_at=at,
                             seconds_left=round(left_s, 3))  # fmt: skip
        self._stop_told.set()
        try:
            async with asyncio.timeout_at(min(at_s + left_s, self._slurm.kill_at_s)) as self._stop_timer:
                await stopping
                await self._over.wait()
            left_s = min(left_s, self._slurm.kill_at_s - at_s)
            if (facts := self._seen.save_of_stop(since_s=at_s, left_s=left_s)) is not None:
                self._journal.append("stop saved", **facts)
        except TimeoutError:
            took_s = time.monotonic() - at_s
            self._journal.append("stop overdue", seconds=round(took_s, 3), **self._seen.unsaved_at_stop())
            log.error("THE SAVE OF THIS STOP DID NOT FINISH within %.0f s; the newest checkpoint continues", took_s)
            await self._kill_workers("the time of the stop is up")
            await asyncio.sleep(PEER_GRACE_S)
            self._over.set()  # a node that is cut off cannot tell that its workers are gone

    async def _agreed_stop(self) -> None:
        if not self._pool.complete.is_set() or (not self._seen.any_started and not await self._workers_run()):
            self._over.set()  # nothing runs yet
            return
        told = False
        while not self._over.is_set():
            async with self._agreement:
                try:
                    plan = await agree(self._pool, StopAction.SAVE_AND_STOP)
                except AgentLost as error:
                    log.warning("no agreement: %s", error)
                    return
            if isinstance(plan, NothingToSave):
                await self._kill_workers("no rank has begun a step, so there is nothing to save")
            elif isinstance(plan, ByThemselves) and not told:
                # none of them uses a session, or none of them yet: the signal is all they understand
                await self._pool.tell_all("signal")
            if not told:
                await self._stop_told.wait()
                self._journal.append("stop agreed", **describe(plan))
            told = True
            if not isinstance(plan, ByThemselves):
                return
            await asyncio.sleep(POLL_S)

    async def _workers_run(self) -> bool:
        with contextlib.suppress(AgentLost):
            return any(reply["looks"] for reply in await self._pool.call_all("look"))
        return False

    async def _watch_agents(self) -> None:
        """Agents stop their workers when they hear nothing for the lease; so ping them, and expect the same of them."""
        lease_s = self._config.fault_tolerance.supervisor_lease_s
        pause_s = min(PING_S, lease_s / 4)
        while not self._over.is_set():
            if asleep_s := await overslept_s(pause_s):
                self._journal.append("was suspended", seconds=round(asleep_s, 1))
                for link in self._pool.links.values():
                    link.last_heard += asleep_s  # nobody can be heard by somebody who is stopped himself
            await self._pool.tell_all("ping")
            for host, silent_s in self._pool.silent_since(time.monotonic()).items():
                if silent_s > lease_s and not self._over.is_set() and host not in self._lost:
                    self._lost.append(host)
                    self._journal.append("agent lost", node=host, silent_s=silent_s)
                    await self._kill_workers(f"nothing was heard from {host} for {silent_s:.0f} s")
                    self._over.set()

    async def _watch_requests(self) -> None:
        while not self._over.is_set():
            await asyncio.sleep(POLL_S)
            ready = self._planned is None and self._pool.complete.is_set()
            await self._folder.tell_progress(self._seen)
            for kind, who in (await self._folder.requests(ready=ready)).items():
                self._on_request(kind, who)

    def _on_request(self, kind: str, who: str) -> None:
        if kind == "KILL" and self._planned is not None:  # a stop is under way; what changes is what follows
            self._planned, self._planned_reason = Cause.STOPPED_BY_USER, f"stopped by {who}"
            self._journal.append("will not continue", reason=self._planned_reason)
        elif self._planned is not None:
            return
        elif kind == "KILL":
            self._stop_for_request(Cause.STOPPED_BY_USER, f"stopped by {who}")
        elif kind == "REQUEUE":
            self._stop_for_request(Cause.REQUEUED_BY_USER, f"requeued by {who}")
        else:
            self._background(self._save_now(who))

    async def _save_now(self, who: str) -> None:
        async with self._agreement:
            try:
                plan = await agree(self._pool, StopAction.SAVE)
                self._journal.append("save requested", who=who, **describe(plan))
                tick = getattr(plan, "tick", None)  # there is none where nobody uses a session: nothing is saved
                while tick is not None and not self._over.is_set():
                    if self._seen.all_answered(tick):
                        break
                    await asyncio.sleep(POLL_S)
                await self._pool.call_all("withdraw")
            except AgentLost as error:
                log.warning("the save could not be agreed on: %s", error)

    async def _kill_workers(self, reason: str) -> None:
        self._journal.append("killing workers", reason=reason)
        await self._pool.tell_all("kill")

    # The end

    async def _wind_down(self) -> None:
        self._over.set()
        await end_agents(self._pool, self._processes)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.close()
        self._folder.leave(self._seen)

    def _verdict(self) -> Verdict:
        # a save that still worked does not undo a cancellation
        binding = self._slurm.outside is not None and self._slurm.outside[0] in (Cause.CANCELLED, Cause.REQUEUED)
        orderly = self._planned is not None and self._seen.all_ended
        outside = self._slurm.outside if binding or not orderly else None
        ends, places = list(self._seen.ends.values()), self._pool.places(self._config.nproc_per_node)
        within_s = READ_S if self._planned is None and self._slurm.outside is None else HURRIED_READ_S
        return judge(
            ends,
            world_size=self._config.world_size,
            seen=Circumstances(
                reached=self._seen.reached(),
                saved=self._seen.saved(),
                planned=self._planned,
                planned_reason=self._planned_reason,
                lost_nodes=tuple(self._lost),
                launch_error=self._launch_error,
                outside=outside[0] if outside else None,
                outside_reason=outside[1] if outside else "",
                heard=testimony_of(self._start, ends, places, within_s=within_s),
                complete_codes=codes_of(ExitAction.COMPLETE, self._config.exit_actions),
                only_lead=self._config.ignore_nonlead_status,
            ),
        )

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done_in_background)

    def _done_in_background(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("internal error: %r", error, exc_info=error)
            self._launch_error = self._launch_error or f"internal error: {error!r}"
            self._over.set()
