"""One attempt, from the start of its agents to its verdict. What follows from the verdict is ``ending``'s business."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from pathlib import Path
from typing import Any

from slurmft.config import RunConfig
from slurmft.errors import LaunchError, SlurmftError
from slurmft.launch.agents import AgentLink, AgentLost, AgentPool
from slurmft.launch.channel import Message
from slurmft.launch.cluster import Cluster
from slurmft.launch.heartbeat import StopAction
from slurmft.launch.observations import Observations
from slurmft.launch.stopping import agree, describe
from slurmft.policy.grace import cause_of_signal, time_left_s
from slurmft.policy.judge import Circumstances, judge
from slurmft.policy.stop import ByThemselves, NothingToSave
from slurmft.policy.verdict import Cause, Verdict
from slurmft.storage.files import write_json
from slurmft.storage.journal import Journal
from slurmft.storage.run_folder import RunFolder

POLL_S = 0.25
"""How often request files are looked for and progress is written."""

PEER_GRACE_S = 3.0
"""After one rank failed: how long the others may take to fail of it by themselves, and say why, before the kill."""

PING_S = 5.0
ENDED_BY_TERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
WIND_DOWN_S = 10.0
CAUSE_PATIENCE_S = 15.0

log = logging.getLogger(__name__)


class Supervisor:
    """Runs one attempt."""

    def __init__(self, config: RunConfig, cluster: Cluster, run: RunFolder, journal: Journal, generation: int) -> None:
        self._config, self._cluster, self._run, self._journal = config, cluster, run, journal
        self._generation = generation
        self._secret_file = run.new_secret(cluster.attempt)
        self._pool = AgentPool(self._secret_file.read_bytes(), config.nodes)
        self._processes: list[asyncio.subprocess.Process] = []
        self._seen = Observations(run, journal, cluster.attempt, config.world_size)
        self._planned: Cause | None = None
        self._planned_reason = self._launch_error = ""
        self._outside: tuple[Cause, str] | None = None
        self._lost: list[str] = []
        self._over = asyncio.Event()
        self._agreement = asyncio.Lock()
        self._stop_told = asyncio.Event()
        """The journal has the stop, its cause and its deadline."""

        self._tasks: set[asyncio.Task[Any]] = set()
        self._signals = 0
        self._kill_seen = False

    async def run(self) -> Verdict:
        """Run the attempt to its end.

        Raises:
            SlurmftError: nothing could be started.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_own_signal, signal.Signals(number).name)
        try:
            await self._launch()
            await self._over.wait()
            if self._planned is not None:  # a slow Slurm must not cost us the cause
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop_told.wait(), CAUSE_PATIENCE_S)
        except (LaunchError, AgentLost) as error:
            self._launch_error = str(error)
        finally:
            await self._wind_down()
        return self._verdict()

    async def _launch(self) -> None:
        folder = self._run.attempt_folder(self._cluster.attempt)
        port = await self._pool.listen(self._cluster.listen_host)
        write_json(folder / "control.json", {"hosts": self._cluster.control_hosts(), "port": port})
        self._processes = await self._cluster.start_agents(self._config, folder)
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
                hint=f"see srun.err in {self._run.attempts / str(self._cluster.attempt)}",
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
                    generation=self._generation,
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
            self._background(self._kill_peers())
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
            self._outside = self._outside or await asyncio.to_thread(self._cluster.why_ending)
            self._journal.append("agents gone", exit_codes=codes)
            if not self._seen.any_started and self._outside is None:
                last_words = _last_line(self._run.attempts / str(self._cluster.attempt) / "srun.err")
                self._launch_error = f"the agents ended with {codes} before they had started a worker{last_words}"
            self._over.set()

    # Stops

    def _on_own_signal(self, name: str) -> None:
        self._signals += 1
        if self._signals == 1:
            self._background(self._judge_own_signal(name))

    async def _judge_own_signal(self, name: str) -> None:
        """Slurm signals the batch step only when it ends the job; a person may at any time."""
        if not await self._is_ending():
            self._signals = 0
            self._on_signal(name, "the supervisor")

    async def _is_ending(self) -> bool:
        if self._outside is None:
            self._outside = await asyncio.to_thread(self._cluster.why_ending)
            if self._outside is not None:
                self._journal.append("ended from outside", reason=self._outside[1])
        return self._outside is not None

    def _on_signal(self, name: str, where: str) -> None:
        if self._planned is None:
            self._planned = Cause.SIGNALLED  # remembered at once; the second one of a row must find it
            self._background(self._stop_for_signal(name, where, time.time()))

    async def _stop_for_signal(self, name: str, where: str, at: float) -> None:
        # the save must not wait for Slurm's answers: they only say why, and how long there is
        stopping = asyncio.create_task(self._agreed_stop())
        times, ending = await asyncio.gather(asyncio.to_thread(self._cluster.times), self._is_ending())
        section = self._config.preemption
        lead_s = float(section.signal_lead_s)
        if self._cluster.name == "local":
            cause, left_s = Cause.PREEMPTED, section.stop_timeout_s
        elif ending and self._outside is not None:
            cause, left_s = self._outside[0], lead_s  # KillWait decides; what can be saved until then is saved
        else:
            cause = cause_of_signal(times, now=at, lead_s=lead_s)
            hurried = cause in (Cause.TIME_LIMIT, Cause.PREEMPTED)
            left_s = time_left_s(times, now=at, lead_s=lead_s) if hurried else section.stop_timeout_s
        if self._planned is Cause.STOPPED_BY_USER:  # asked for in the meantime
            cause = Cause.STOPPED_BY_USER
        await self._stop(cause, f"{name} at {where}", stopping, at=at, left_s=left_s)

    def _stop_for_request(self, cause: Cause, reason: str) -> None:
        self._planned = cause
        left_s = self._config.preemption.stop_timeout_s
        stopping = asyncio.create_task(self._agreed_stop())
        self._background(self._stop(cause, reason, stopping, at=time.time(), left_s=left_s))

    async def _stop(self, cause: Cause, reason: str, stopping: asyncio.Task[None], *, at: float, left_s: float) -> None:
        """Save at an agreed step and end the workers; by force when the time is up."""
        self._planned = cause
        self._planned_reason = self._planned_reason or reason
        self._journal.append("stop requested", cause=cause.value, reason=reason, signal_at=at, seconds_left=left_s)
        self._stop_told.set()
        try:
            async with asyncio.timeout(left_s):
                await stopping
                await self._over.wait()
        except TimeoutError:
            self._journal.append("stop overdue", seconds=left_s)
            log.error("THE SAVE OF THIS STOP DID NOT FINISH within %.0f s; the newest checkpoint continues", left_s)
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
        while not self._over.is_set():
            await asyncio.sleep(min(PING_S, lease_s / 4))
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
            with contextlib.suppress(OSError):  # a shared filesystem that hiccups; the next look finds the file
                self._look_for_requests()
                self._seen.write_progress()

    def _look_for_requests(self) -> None:
        if not self._kill_seen and (who := self._run.see_request("KILL")) is not None:
            self._kill_seen = True
            if self._planned is None:
                self._stop_for_request(Cause.STOPPED_BY_USER, f"stopped by {who}")
            else:  # the stop is under way already; what changes is what follows
                self._planned, self._planned_reason = Cause.STOPPED_BY_USER, f"stopped by {who}"
                self._journal.append("will not continue", reason=self._planned_reason)
        if (who := self._run.take_request("REQUEUE")) is not None and self._planned is None:
            self._stop_for_request(Cause.REQUEUED_BY_USER, f"requeued by {who}")
        if self._planned is None and self._pool.complete.is_set() and (who := self._run.take_request("SAVE")):
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
        await self._pool.tell_all("shutdown")
        if not self._pool.complete.is_set():
            for process in self._processes:  # agents on their way cannot be told
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
        await self._pool.wait_until_gone(WIND_DOWN_S)  # even without their srun: a requeue must find nobody alive
        waits = [asyncio.create_task(process.wait()) for process in self._processes]
        if waits:
            _, late = await asyncio.wait(waits, timeout=WIND_DOWN_S)
            if late:
                log.warning("%d agent processes did not end within %.0f s; killing them", len(late), WIND_DOWN_S)
            for process in self._processes:
                if process.returncode is None:
                    process.terminate()  # srun kills its step at once when it gets TERM
            await asyncio.wait(waits, timeout=WIND_DOWN_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.close()
        self._secret_file.unlink(missing_ok=True)
        with contextlib.suppress(OSError, SlurmftError):
            self._seen.write_progress()

    def _verdict(self) -> Verdict:
        # a save that still worked does not undo a cancellation
        binding = self._outside is not None and self._outside[0] in (Cause.CANCELLED, Cause.REQUEUED)
        orderly = self._planned is not None and self._seen.all_ended
        outside = self._outside if binding or not orderly else None
        return judge(
            list(self._seen.ends.values()),
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


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f"; srun: {lines[-1][:300]}" if lines else ""
