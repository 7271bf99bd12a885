"""What follows a verdict: journal the decision, then act on it. A requeue ends the very process that asks for it."""

from __future__ import annotations

import logging
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from slurmft.config import RunConfig
from slurmft.errors import SlurmError
from slurmft.launch.cluster import Cluster, LocalCluster, SlurmCluster
from slurmft.policy.decide import Budget, decide
from slurmft.policy.verdict import EXIT_TEMPORARY, PLANNED, Action, Cause, Decision, Verdict
from slurmft.scheduler import slurm
from slurmft.scheduler.command import ignoring_signals
from slurmft.storage.journal import Event, Journal
from slurmft.storage.run_folder import RunFolder

OTHERS_END_S = 4
"""Added to the begin time when the step did not end in order: its slurmstepds still look for an srun that is gone
(2.5 s were seen), and a begin time that has passed before they end falls back to Slurm's 121 s."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """Decides and acts on the end of one attempt."""

    config: RunConfig
    cluster: Cluster
    run: RunFolder
    journal: Journal

    def act_on(self, verdict: Verdict) -> int:
        """Decide, journal, act; returns the supervisor's exit code. Main thread only."""
        history = self.journal.read()
        facts = {key: value for key, value in asdict(verdict).items() if value is not None}
        self.journal.append("verdict", **facts)
        if verdict.cause in PLANNED and verdict.saved_step is None and verdict.last_step > verdict.first_step:
            lost = verdict.last_step - verdict.first_step
            log.error("NOTHING WAS SAVED at this stop; up to %d steps will be done again", lost)
            self.journal.append("stop without a save", steps_at_risk=lost)
        decision = decide(verdict, budget_of(history, verdict, self.config), self.config.exit_actions)
        self.journal.append(
            "decision", action=decision.action.value, reason=decision.reason, exit_code=decision.exit_code
        )
        log.info("verdict: %s; decision: %s; %s", verdict.cause.value, decision.action.value, decision.reason)
        if decision.action is not Action.CONTINUE:
            self.run.take_request("KILL")  # only now: a stop must outlive an attempt that could not finish it
        if decision.action is Action.FINISH:
            self.run.mark_done(step=verdict.last_step or None, job=self.cluster.attempt.job, reason=decision.reason)
            return 0
        if decision.action is Action.STOP:
            return decision.exit_code
        return self._continue(verdict, decision)

    def _continue(self, verdict: Verdict, decision: Decision) -> int:
        attempt = self.cluster.attempt
        if not self.run.claim_ending(attempt, f"supervisor on {os.uname().nodename}"):
            reason = "somebody else has already acted on the end of this attempt"
            self.journal.append("not continued", reason=reason)
            return decision.exit_code
        if self.config.preemption.continue_by == "nothing":
            self.journal.append("not continued", reason="preemption.continue_by is nothing")
            log.warning("to continue the run: %s", self._by_hand())
            return decision.exit_code
        if isinstance(self.cluster, LocalCluster):
            self.journal.append("starting anew", restart=attempt.restart + 1)
            from slurmft.scheduler.submission import RunSupervisor  # brings submitit, which only this branch needs

            self.cluster.start_anew(RunSupervisor(self.run.config).argv())
        if not isinstance(self.cluster, SlurmCluster):
            raise TypeError(f"no way to continue on {self.cluster.name}")
        with ignoring_signals():
            return self._continue_in_slurm(self.cluster, verdict, decision)

    def _continue_in_slurm(self, cluster: SlurmCluster, verdict: Verdict, decision: Decision) -> int:
        how = self.config.preemption.continue_by
        outside = cluster.why_ending()
        if outside is not None and outside[0] in (Cause.REQUEUED, Cause.CANCELLED):
            # somebody was faster: a second requeue would be one too many, and a cancelled run must stay cancelled
            self.journal.append("left to slurm", reason=outside[1])
            if outside[0] is Cause.REQUEUED:
                self._begin_soon(cluster.job.job_id)
            return decision.exit_code
        if how == "auto" and verdict.cause is Cause.PREEMPTED and _preemption_cancels(cluster):
            reason = f"partition {cluster.job.partition} cancels what it preempts"
            self.journal.append("requeue skipped", reason=reason)
            how = "resubmit"
        if how in ("auto", "requeue") and self._requeue(cluster, verdict):
            return decision.exit_code
        if how in ("auto", "resubmit") and self._resubmit(cluster):
            return decision.exit_code
        command = self._by_hand()
        self.journal.append("not continued", reason="neither requeue nor resubmit worked", command=command)
        log.error("THE RUN IS SAVED BUT WILL NOT CONTINUE BY ITSELF. To continue it: %s", command)
        return EXIT_TEMPORARY

    def _requeue(self, cluster: SlurmCluster, verdict: Verdict) -> bool:
        job_id, delay_s = cluster.job.job_id, self.config.preemption.requeue_delay_s
        if verdict.cause not in PLANNED:
            delay_s += OTHERS_END_S
        self.journal.append("requeueing", job=job_id, delay_s=delay_s)
        try:
            on_time = slurm.requeue(job_id, delay_s=delay_s)
        except SlurmError as error:
            self.journal.append("requeue failed", reason=error.what)
            log.warning("the job could not be requeued: %s", error.what)
            return False
        self.journal.append("requeued", job=job_id, delay_s=delay_s if on_time else "Slurm's own, about 121")
        return True

    def _begin_soon(self, job_id: str) -> None:
        """Spare a job that Slurm requeues its two minutes; other nodes' processes need a moment more to be gone."""
        delay_s = self.config.preemption.requeue_delay_s + OTHERS_END_S
        try:
            slurm.begin_in(job_id, delay_s)
        except SlurmError as error:
            self.journal.append("begin time not set", reason=error.what)
        else:
            self.journal.append("begin time set", job=job_id, delay_s=delay_s)

    def _resubmit(self, cluster: SlurmCluster) -> bool:
        job_id, script = cluster.job.job_id, self.run.script
        try:
            options = [f"--chdir={Path.cwd()}"]
            if not script.is_file():  # submitted with plain sbatch: Slurm has the script, the environment its options
                script.write_text(slurm.batch_script(job_id), encoding="utf-8")
                signal_option = f"--signal={self.config.preemption.signal}@{self.config.preemption.signal_lead_s}"
                options += ["--requeue", "--open-mode=append", signal_option, *slurm.inherited_options(os.environ)]
            command = slurm.successor_command(script, after=job_id, options=options)
            self.journal.append("resubmitting", command=shlex.join(command))
            successor = slurm.submit_successor(script, after=job_id, options=options, environment=os.environ)
        except (SlurmError, OSError) as error:
            self.journal.append("resubmit failed", reason=str(error))
            log.warning("no successor could be submitted: %s", error)
            return False
        with self.run.lock():
            self.run.add_job(successor)
        self.journal.append("resubmitted", job=successor, after=job_id)
        return True

    def _by_hand(self) -> str:
        return shlex.join(["slurmft", "submit", str(self.run.config)])


def budget_of(history: list[Event], verdict: Verdict, config: RunConfig) -> Budget:
    """What the run had spent before ``verdict``: unplanned ends since its newest progress, time limits without any."""
    failures = idle_limits = 0
    for event in history:
        if event.event != "verdict":
            continue
        facts = event.details
        if facts.get("saved_step", -1) > facts.get("first_step", 0):
            failures = idle_limits = 0
        if facts.get("cause") == Cause.TIME_LIMIT:
            idle_limits += 1
        elif facts.get("cause") not in {Cause.RERUN_ELSEWHERE.value, *(cause.value for cause in PLANNED)}:
            failures += 1
    if verdict.progressed:
        failures = idle_limits = 0
    section = config.fault_tolerance
    return Budget(
        failures_so_far=failures,
        max_failures=section.num_job_retries_on_failure,
        stops_without_progress=idle_limits,
        max_no_progress_cycles=section.max_no_progress_cycles,
    )


def _preemption_cancels(cluster: SlurmCluster) -> bool:
    try:
        return slurm.preempt_mode(cluster.job.partition) == "CANCEL"
    except SlurmError:
        return False
