"""The attempts of one start of a job, one after the other, with one crew of agents."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from slurmft.config.config import RunConfig
from slurmft.ipc.calls import Ping
from slurmft.policy.timing.fleet import ping_interval_s
from slurmft.policy.verdicts.final_ends import End
from slurmft.policy.verdicts.verdict import EXIT_TEMPORARY
from slurmft.storage.events import EventName
from slurmft.supervisor.attempt import AttemptRunner
from slurmft.supervisor.fleet.crew import Crew
from slurmft.supervisor.fleet.outliving import Outlived
from slurmft.supervisor.inference.handover import call_off_for_good
from slurmft.supervisor.recovery.act import Ending
from slurmft.supervisor.recovery.exclusions import Accuser
from slurmft.supervisor.recovery.node_choice import settle
from slurmft.supervisor.signals import log_signal
from slurmft.supervisor.start import LeaseHolder, Start
from slurmft.system.logs import BackgroundLog

if TYPE_CHECKING:
    from slurmft.supervisor.inference.attempt import InferenceAttempt
    from slurmft.supervisor.inference.serving import ServingAttempt

Result = TypeVar("Result")

log = logging.getLogger(__name__)


def _runner_of(config: RunConfig) -> type[AttemptRunner | InferenceAttempt]:
    """Imported when it is needed: with numpy, inference would take a third of the time that a supervisor starts in."""
    if config.launcher == "ray" and config.inference is None:
        from slurmft.supervisor.ray import RayAttempt

        return RayAttempt
    if config.inference is None:
        return AttemptRunner
    from slurmft.supervisor.inference.attempt import InferenceAttempt
    from slurmft.supervisor.inference.serving import ServingAttempt

    return InferenceAttempt if config.inference.serving is None else ServingAttempt


class Attempts:
    """Runs attempts until one of them ends the job; a context manager that leaves no agent behind.

    Args:
        outlived: agents of the supervisor before this one, in the same start of the job.
        dismiss_others: ends what else this job's supervisor has started on other nodes; False where that has taken
            the run over meanwhile.
    """

    def __init__(
        self, config: RunConfig, log_file: BackgroundLog, outlived: Outlived | None = None, *,
        dismiss_others: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self._dismiss_others = dismiss_others
        self._config, self._log_file, self._outlived = config, log_file, outlived
        self._runner = asyncio.Runner()  # one loop for all of them: the agents' connections live in it
        self._crew: Crew | None = None
        self._lost = False
        self._lease: LeaseHolder | None = None
        self._between = contextlib.ExitStack()
        self.generation: int | None = None
        """As which this process owned the run in the last attempt; None while it has never."""

    @property
    def secret(self) -> bytes | None:
        """The control channel's secret, where agents exist already."""
        if self._crew is None:
            return None if self._outlived is None else self._outlived.secret
        return self._crew.secret

    def run(self, start: Start) -> int | None:
        """One attempt and what follows it: the exit code, or None when the next begins at once in this allocation.

        Raises:
            SlurmftError: nothing could be started.
        """
        accuser, self._lease = Accuser(self._config, start), start.lease
        ending = Ending(self._config, start, accuser, self._log_file, dismiss=self.dismiss, has_nodes=self._has_nodes,
                        abandon=self.abandon)  # fmt: skip
        if (escape := settle(self._config, start)) is not None:
            if start.candidate:
                return self._leave(ending, escape[0].reason, called_off=False)
            return ending.follow(*escape, may_stay=False)
        attempt = start.cluster.attempt
        where = start.run.attempts / str(attempt)
        log.info("run %s, attempt %s; workers write to %s", self._config.name, attempt, where)
        log_signal("Signal handler installed for %d", self._config.preemption.signal)
        if self._crew is None:
            self._crew, self._outlived = Crew(self._config, start, self._outlived), None
        supervisor = _runner_of(self._config)(self._config, start, accuser, self._crew)
        verdict = self._run_in_loop(supervisor.run())
        self._lost = bool(start.cluster.lost)
        serves = self._config.inference is not None and self._config.inference.serving is not None
        if serves:
            endpoint = cast("ServingAttempt", supervisor)
            if endpoint.start.candidate:
                return self._leave(ending, verdict.reason, called_off=endpoint.is_called_off)
            if endpoint.is_handed_over:
                return ending.leave(End.HANDED_ON, 0)
            start = endpoint.start  # a candidate owns the run by now
            ending = Ending(self._config, start, accuser, self._log_file, dismiss=self.dismiss,
                            has_nodes=self._has_nodes)  # fmt: skip
        self.generation = start.generation
        ending.ends_at_s = supervisor.stops.ends_at_s
        code = ending.act_on(verdict)
        if serves and ending.has_stopped:
            call_off_for_good(start.run, start.cluster, start.journal, verdict.reason)
        return code

    def _run_in_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run ``work``; until the next one, agents hear of this supervisor by a thread: decisions and waits may take
        longer than its lease."""
        self._between.close()
        try:
            return self._runner.run(work)
        finally:
            over = threading.Event()
            pings = threading.Thread(target=self._ping, args=[over], daemon=True, name="pings")
            pings.start()
            self._between.callback(pings.join)
            self._between.callback(over.set)

    def _ping(self, over: threading.Event) -> None:
        crew, lease_s = self._crew, self._config.fault_tolerance.ping_lease_s
        while crew is not None and not over.wait(ping_interval_s(len(crew.pool.links), lease_s=lease_s)):
            if self._lease is None or not self._lease.is_lost:
                crew.pool.ping(Ping())

    def _leave(self, ending: Ending, reason: str, *, called_off: bool) -> int:
        """End a candidate, which decides nothing for the run."""
        log.warning("this job does not take the run over: %s", reason)
        ending.journal.append(EventName.CANDIDATE_LEFT, reason=reason)
        return ending.leave(End.HANDED_ON if called_off else End.OPEN, 0 if called_off else EXIT_TEMPORARY)

    def _has_nodes(self) -> bool:
        return self._crew is not None and self._crew.roster.can_go_on()

    def dismiss(self) -> None:
        """End the agents. The next attempt, if there is one, starts new ones."""
        if not self._dismiss_others():
            self.abandon()
            return
        if self._crew is not None:
            crew, self._crew = self._crew, None
            self._run_in_loop(crew.dismiss(node_lost=self._lost))
        if self._outlived is not None:  # nothing came to the point of taking them over
            self._outlived.end()
            self._outlived = None

    def abandon(self) -> None:
        """Leave the agents to a supervisor that has taken the run over; those out of its reach end by themselves."""
        if self._crew is not None:
            crew, self._crew = self._crew, None
            self._run_in_loop(crew.abandon())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.dismiss()
        self._between.close()
        self._runner.close()
