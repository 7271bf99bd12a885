"""One attempt of a job that has several roles: each is a run of its own, on its own nodes, with its own supervisor.

What fails in a role is that role's: its supervisor restarts it in place while the others go on. What concerns the job
is done here, for all of them: places, the order of starts, stops, the end, and the way through the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from slurmft.config.run import Role, RunConfig, roles_of
from slurmft.errors import SlurmftError, StorageError, UsageError
from slurmft.inference.endpoint import HighAvailabilityCluster, ca_file, headers_file
from slurmft.policy import life
from slurmft.policy.decide import MAX_BEGUN_AGAIN, BegunAgain, RoleEnd, role_begins_again
from slurmft.policy.verdict import EXIT_TEMPORARY, EXIT_USAGE, Action, Cause, Verdict
from slurmft.scheduler.parsing import PART_VARIABLE
from slurmft.storage.journal import Event, EventName
from slurmft.storage.patience import writing
from slurmft.storage.queue import QUEUES_VARIABLE, stop_taking
from slurmft.storage.run_folder import RunFolder, progress_of
from slurmft.supervisor.act import retry_delay_s
from slurmft.supervisor.agents import Orphan
from slurmft.supervisor.cluster import LocalCluster, Start
from slurmft.supervisor.crew import AttemptFolder, Crew
from slurmft.supervisor.guardian import CLEAN_UP_S, end_left_behind, guardians
from slurmft.supervisor.placement import EvidenceSender
from slurmft.supervisor.stops import Life, SlurmNotices
from slurmft.system.background import Background
from slurmft.system.files import appending, replace_atomically
from slurmft.system.processes import adopt_orphans, was_given, words_of

LOOK_S = 0.25
GRACE_S = 10.0
"""A role has so long beyond the time of a stop, then it is killed."""

_OWN_VARIABLES = re.compile(r"SLURMFT_(GUARD|LOCAL_).*")
"""Of this supervisor and its guardian, and nothing for another one."""

_ROLE_VARIABLE = "SLURMFT_ROLE"
"""Tells a role's processes on this host from those of others."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """A role in this attempt."""

    role: Role
    run: RunFolder
    hosts: tuple[str, ...]
    process: asyncio.subprocess.Process | Orphan | None = None
    began: datetime | None = None
    code: int | None = None
    """Of its supervisor, once that has ended."""

    has_left: bool = False
    """Whether agents elsewhere may have outlived it."""

    told: set[str] = field(default_factory=set)
    begun_again: BegunAgain = field(default_factory=BegunAgain)
    not_before_s: float = 0.0
    """Monotonic time before which it does not begin again."""

    @property
    def is_over(self) -> bool:
        return self.code is not None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and not self.is_over

    @property
    def has_steps(self) -> bool:
        """Whether it is a trainer, as far as it has shown."""
        return bool((self.run.progress() or {}).get("step"))

    @property
    def is_ready(self) -> bool:
        """Whether those that need it may begin: an endpoint has routers, where requests wait for a replica."""
        if self.process is None:
            return self.is_over
        return not self.role.is_endpoint or self.code == 0 or HighAvailabilityCluster.read(self.run.path).available


class RolesAttempt:
    """Runs the supervisors of all roles until the run ends, or has to leave this allocation."""

    def __init__(self, config: RunConfig, start: Start, sender: EvidenceSender, crew: Crew) -> None:
        self._config, self._start, self._run, self._journal = config, start, start.run, start.journal
        self._outlived = crew.outlived_roles
        self._slurm = SlurmNotices(start.cluster, start.journal)
        self._background = Background(self._on_error)
        self.stops = Life(config, start, self._slurm, self._background, {life.BeginStop: self._begin_stop})
        self._folder = AttemptFolder(start)
        self._roles: dict[str, _Live] = {}
        self._blamed: _Live | None = None
        """The role that cannot go on here."""

    async def run(self) -> Verdict:
        """Run the attempt to its end, and say why it has ended."""
        stop_taking(self._run.path / "queues", over=True)
        adopt_orphans()  # the supervisor of a role whose guardian is killed
        try:
            self._roles = {each.role.name: each for each in self._placed()}
            self._take_over()
            self._background.start(self._slurm.read_terms())
            await self._watch()
            await self.stops.cause_is_known()
        except (SlurmftError, OSError) as error:
            self.stops.feed(life.LaunchFailed(str(error)))
        finally:
            await self._end_all()
            await self._background.cancel_all()
        return self._verdict()

    def _placed(self) -> Iterator[_Live]:
        """The roles, each on the next nodes of the job; those without nodes of their own are on its first one."""
        hosts = self._start.cluster.agent_hosts(self._config)
        at = 0
        for role in roles_of(self._config):
            mine = tuple(hosts[at : at + role.nodes]) or (hosts[0],)
            if len(mine) < role.nodes:
                raise UsageError(f"role {role.name} has {role.nodes} nodes, and this job {len(hosts)} for all roles")
            at += role.nodes
            yield _Live(role, RunFolder(role.config.run_folder), mine)

    def _take_over(self) -> None:
        """Roles that go on without the supervisor before this one go on with this one; those that are done stay so."""
        began = {event.details.get("role"): event.at for event in self._start.history
                 if event.event == EventName.ROLE_STARTED}  # fmt: skip
        for name, live in self._roles.items():
            words = ("run", str(live.run.config))
            live.process = next((one for one in self._outlived if words in itertools.pairwise(words_of(one.pid))), None)
            if live.process is not None:
                live.began = began.get(name)
                log.info("role %s goes on", name)
        for live in self._roles.values():
            if live.process is None and live.run.done() is not None:
                live.began = began.get(live.role.name)
                self._ended(live, 0)

    # --- the loop ---

    async def _watch(self) -> None:
        while not self.stops.over.is_set():
            await self._look_at_requests()
            if self._folder.is_due() and await self._folder.tell(self._write_progress) is not None:
                self.stops.feed(life.Ended())
            for each in self._roles.values():
                if each.process is not None and each.code is None and each.process.returncode is not None:
                    each.has_left = not await asyncio.to_thread(_end_left_behind, each.role.name, CLEAN_UP_S)
                    self._ended(each, each.process.returncode)
            if self.stops.planned is None:
                await self._begin_those_that_may()
            else:
                if all(each.is_over for each in self._roles.values() if each.process is not None):
                    return
                self._end_in_order()
                if time.monotonic() > self.stops.state.up_at_s + GRACE_S:
                    return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stops.over.wait(), LOOK_S)

    async def _begin_those_that_may(self) -> None:
        for each in self._roles.values():
            if each.process is not None or each.is_over or time.monotonic() < each.not_before_s:
                continue
            if not (missing := [name for name in each.role.needs if not self._roles[name].is_ready]):
                await self._begin(each)
            elif "waits" not in each.told:
                each.told.add("waits")
                log.info("role %s begins when %s is ready", each.role.name, ", ".join(missing))

    async def _begin(self, live: _Live) -> None:
        run, role = live.run, live.role
        run.create()
        with writing(run.config):
            replace_atomically(run.config, role.config.as_yaml())
        if role.is_endpoint:  # the routers of a start before are gone: nobody that needs it may begin with those
            HighAvailabilityCluster().write(run.path)
        environment = {name: value for name, value in os.environ.items() if not _OWN_VARIABLES.fullmatch(name)}
        environment |= {
            **self._addresses(), QUEUES_VARIABLE: str(self._run.path / "queues"), _ROLE_VARIABLE: role.name
        }  # fmt: skip
        if not isinstance(self._start.cluster, LocalCluster):
            environment[PART_VARIABLE] = ",".join(live.hosts)
        argv = [sys.executable, "-P", "-u", "-m", "slurmft", "run", str(run.config)]
        path = run.logs / f"{self._start.cluster.attempt.job}.log"
        with writing(path), appending(path) as output:
            live.process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                cwd=role.config.working_directory,
            )  # fmt: skip
        live.begun_again = live.begun_again.at(progress_of(run).saved_step or 0)
        event = self._journal.append(
            EventName.ROLE_STARTED, role=role.name, nodes=list(live.hosts), folder=str(run.path)
        )
        live.began = event.at

    def _addresses(self) -> dict[str, str]:
        """Where the endpoints of roles are, for roles that begin now, and for their workers."""
        found: dict[str, str] = {}
        for each in self._roles.values():
            if each.role.is_endpoint and each.process is not None:
                urls = [
                    url for router in HighAvailabilityCluster.read(each.run.path).routers for url in router.urls[:1]
                ]
                prefix = f"SLURMFT_ENDPOINT_{re.sub(r'[^A-Z0-9]', '_', each.role.name.upper())}"
                found |= {prefix: urls[0] if urls else "", f"{prefix}_ALL": ",".join(urls),
                          f"{prefix}_FILE": str(each.run.path / "endpoints.json"),
                          f"{prefix}_HEADERS": str(headers_file(each.run.path)),
                          f"{prefix}_CA": str(ca_file(each.run.path))}  # fmt: skip
        return found

    def _ended(self, live: _Live, code: int) -> None:
        is_done = live.run.done() is not None
        if isinstance(live.process, Orphan):  # another one's child: its decision says how it has ended
            code = next((int(each.details.get("exit_code", code)) for each in reversed(_events(live))
                         if each.event == EventName.DECISION), code)  # fmt: skip
        live.code = 0 if is_done else code if code >= 0 else 128 - code
        begins_again = self.stops.planned is None and not is_done and self._may_begin_again(live)
        again = {"begins_again": f"{live.begun_again.times} of {MAX_BEGUN_AGAIN}"} if begins_again else {}
        self._journal.append(EventName.ROLE_ENDED, role=live.role.name, code=live.code, done=is_done, **again)
        if self.stops.planned is not None:
            return
        if begins_again:
            log.warning("role %s has ended with %d and begins again alone", live.role.name, live.code)
            live.process, live.code, live.told = None, None, set()
        elif not is_done:
            last = _last_verdict(live)
            why = last.get("reason") or f"its supervisor ended with {live.code}"
            self._blamed = live
            self.stops.stop_for(Cause.UNKNOWN, f"role {live.role.name}: {why}")
        elif live.role.ends_run and all(each.is_over for each in self._roles.values() if each.role.ends_run):
            self.stops.stop_for(Cause.FINISHED, f"role {live.role.name} has finished")

    def _may_begin_again(self, live: _Live) -> bool:
        """Whether a role that has ended begins again alone; it is counted then."""
        live.begun_again = live.begun_again.at(progress_of(live.run).saved_step or 0)
        end = _end_of(live)
        if not role_begins_again(end, live.begun_again):
            return False
        wait_s = retry_delay_s(live.role.config, live.begun_again.times)
        if live.has_left and not end.action and not self._is_here(live):
            # its agents elsewhere end when they have not heard it for so long
            wait_s = max(wait_s, live.role.config.fault_tolerance.supervisor_lease_s)
        live.begun_again, live.not_before_s = live.begun_again.once_more(), time.monotonic() + wait_s
        return True

    def _is_here(self, live: _Live) -> bool:
        """Whether all of the role's processes are on this host, where what it leaves behind has been ended."""
        return isinstance(self._start.cluster, LocalCluster) or set(live.hosts) == {os.environ.get("SLURMD_NODENAME")}

    # --- stops ---

    async def _look_at_requests(self) -> None:
        for kind, who in (await self._folder.requests(ready=self.stops.planned is None)).items():
            if self.stops.on_request(kind, who):
                continue
            for each in self._roles.values():
                if not each.is_over and not each.role.is_endpoint:
                    each.run.request(kind, who)

    def _begin_stop(self, begin: life.BeginStop) -> None:
        self._journal.append(EventName.STOP_REQUESTED, cause=begin.stop.cause.value, reason=begin.stop.reason,
                             seconds_left=round(begin.left_s, 3))  # fmt: skip
        self._end_in_order()

    def _end_in_order(self) -> None:
        """Trainers save first, while those that feed them go on; then the others, and endpoints when nobody is left to
        ask. All at once when time is short."""
        stages: tuple[list[_Live], list[_Live], list[_Live]] = ([], [], [])
        for each in self._roles.values():
            stages[2 if each.role.is_endpoint else 1 - each.has_steps].append(each)
        is_late = time.monotonic() > self.stops.state.up_at_s - GRACE_S
        # none that trains, or none that could feed it: what waits for items, also before its first step, may end
        if is_late or not all(any(each.is_alive for each in stage) for stage in stages[:2]):
            stop_taking(self._run.path / "queues")
        for stage in stages:
            for each in stage:
                self._tell_to_end(each)
            if any(each.is_alive for each in stage) and not is_late:
                return

    def _tell_to_end(self, live: _Live) -> None:
        """A role saves and ends. One that Slurm signals as well has begun with that by itself."""
        if live.process is None or live.is_over or "end" in live.told:
            return
        live.told.add("end")
        with contextlib.suppress(ProcessLookupError):
            live.process.terminate()

    async def _end_all(self) -> None:
        """Kill what has not ended, with all that it has started."""
        for each in self._roles.values():
            if each.process is not None and each.process.returncode is None:
                log.error("role %s did not end in time and is killed", each.role.name)
                with contextlib.suppress(ProcessLookupError):
                    each.process.kill()
                await each.process.wait()
                await asyncio.to_thread(_end_left_behind, each.role.name, 0.0)

    # --- what is known of it from outside, and in the end ---

    def _write_progress(self) -> None:
        """The trainer's progress, for those who look at the run."""
        trains = [each.run for each in self._roles.values() if not each.role.is_endpoint]
        facts = next((found for run in trains if (found := run.progress()) and found.get("step")), None)
        if facts is not None:
            self._run.write_progress(**{**facts, "attempt": str(self._folder.attempt)})

    def _on_error(self, error: BaseException) -> None:
        self.stops.feed(life.Ended(f"{type(error).__name__}: {error}"))

    def _verdict(self) -> Verdict:
        steps, planned, reason = self._steps(), self.stops.planned, self.stops.reason
        if (blamed := self._blamed) is not None and planned is not Cause.STOPPED_BY_USER:
            last = _last_verdict(blamed)
            cause = Cause(last["cause"]) if last.get("cause") in set(Cause) else Cause.WORKER_ERROR
            code = 0 if blamed.code in (None, EXIT_TEMPORARY) else blamed.code
            return Verdict(cause=cause, reason=reason, exit_code=code, node=str(last.get("node", "")), **steps)
        if problem := self.stops.state.problem:
            return Verdict(cause=Cause.LAUNCH_FAILURE, reason=problem, exit_code=EXIT_USAGE, **steps)
        return Verdict(cause=planned or Cause.FINISHED, reason=reason or "all roles have finished", **steps)

    def _steps(self) -> dict[str, Any]:
        trains = [each for each in self._roles.values() if not each.role.is_endpoint]
        found = [last for each in trains if (last := _last_verdict(each)).get("last_step")]
        names = ("first_step", "last_step", "saved_step")
        return {name: found[0][name] for name in names if found and found[0].get(name) is not None}


def _end_left_behind(role: str, gentle_s: float) -> bool:
    """End what a role whose guardian has ended has left on this host, so that its next start is alone. Blocking.

    Returns:
        Whether its agents elsewhere have ended as well, as far as Slurm knows.
    """
    parents = (os.getpid(), *guardians())
    return end_left_behind(lambda pid: not was_given(pid, _ROLE_VARIABLE, role), parents=parents, gentle_s=gentle_s) > 0


def _last_verdict(live: _Live) -> Mapping[str, Any]:
    """The newest verdict on a role in this attempt; empty where it has none: an earlier one says nothing of its end."""
    verdicts = [event.details for event in _events(live) if event.event == EventName.VERDICT]
    return verdicts[-1] if verdicts else {}


def _end_of(live: _Live) -> RoleEnd:
    """How a role's supervisor has ended; a verdict and a decision that another attempt followed are not of its end."""
    code = live.code or 0
    found: dict[str, Mapping[str, Any]] = {}
    for event in _events(live):
        if event.event == EventName.ATTEMPT_STARTED:
            found = {}
        elif event.event in (EventName.VERDICT, EventName.DECISION):
            found[event.event] = event.details
    verdict, decision = found.get(EventName.VERDICT, {}), found.get(EventName.DECISION, {})
    if decision.get("action") in (None, Action.RESTART.value):
        return RoleEnd(code=code)
    return RoleEnd(code=code, cause=str(verdict.get("cause", "")), action=str(decision["action"]),
                   avoid=tuple(map(str, decision.get("avoid", ()))))  # fmt: skip


def _events(live: _Live) -> list[Event]:
    """The role's journal since it began last; empty where it has not, or that cannot be read."""
    if (since := live.began) is not None:
        with contextlib.suppress(StorageError, OSError):
            return [event for event in live.run.journal().read_past() if event.at >= since]
    return []
