"""What follows a verdict: journal the decision, then act on it. A requeue ends the very process that asks for it."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurmft.config import RunConfig
from slurmft.errors import SlurmError, StorageError
from slurmft.launch.budget import budget_of
from slurmft.launch.cluster import Cluster, LocalCluster, SlurmCluster
from slurmft.launch.logs import BackgroundLog
from slurmft.launch.start import Start
from slurmft.policy.decide import decide
from slurmft.policy.verdict import EXIT_TEMPORARY, PLANNED, Action, Cause, Decision, Verdict
from slurmft.scheduler import slurm, successor
from slurmft.scheduler.command import ignoring_signals
from slurmft.storage.patience import patiently

OTHERS_END_S = 4
"""Added to the begin time when the step did not end in order: its slurmstepds still look for an srun that is gone
(2.5 s were seen), and a begin time that has passed before they end falls back to Slurm's 121 s."""

FLUSH_S = 5.0
"""How long an action waits for the run folder to take the decision it follows."""

DONE_PATIENCE_S = 300.0
"""How long a complete run waits for a run folder that cannot take the mark of it."""

SLURM_PATIENCE_S = 600.0
"""How long a silent Slurm is asked again where no end of the job presses."""

log = logging.getLogger(__name__)


class Ending:
    """Decides and acts on the end of one attempt.

    Args:
        ends_at_s: monotonic time at which Slurm will have ended the job; None when nobody knows of an end.
    """

    def __init__(self, config: RunConfig, start: Start, ends_at_s: float | None, log_file: BackgroundLog) -> None:
        self.config, self.start, self.ends_at_s, self.log_file = config, start, ends_at_s, log_file
        self.cluster: Cluster = start.cluster
        self.run, self.journal = start.run, start.journal

    def act_on(self, verdict: Verdict) -> int:
        """Decide, journal, act; returns the supervisor's exit code. Main thread only."""
        facts = {key: value for key, value in asdict(verdict).items() if value is not None}
        self.journal.append("verdict", **facts)
        if verdict.cause in PLANNED and verdict.unsaved_steps:
            lost = verdict.unsaved_steps
            log.error("NOTHING WAS SAVED at this stop; up to %d steps will be done again", lost)
            self.journal.append("stop without a save", steps_at_risk=lost)
        # a supervisor in whose place we act may have judged this attempt already: it is one end all the same
        earlier = [event for event in self.start.history if event.attempt != str(self.cluster.attempt)]
        decision = decide(verdict, budget_of(earlier, verdict, self.config), self.config.exit_actions)
        self.journal.append(
            "decision", action=decision.action.value, reason=decision.reason, exit_code=decision.exit_code
        )
        log.info("verdict: %s; decision: %s; %s", verdict.cause.value, decision.action.value, decision.reason)
        self._flush()
        code = self.carry_out(verdict, decision)
        if not self._flush():
            for event in self.journal.unwritten():
                log.error("not in the journal: %s %s %s", event.at.isoformat(), event.event, event.details)
        return code

    def carry_out(self, verdict: Verdict, decision: Decision) -> int:
        """Act on a decision that is in the journal; returns the supervisor's exit code. Main thread only."""
        if decision.action is Action.CONTINUE:
            return self._continue(verdict, decision)
        # only now: a stop must outlive an attempt that could not finish it
        self._in_folder(lambda: self.run.take_request("KILL"))
        if decision.action is Action.STOP:
            return decision.exit_code
        done = {"step": verdict.last_step or None, "job": self.cluster.attempt.job, "reason": decision.reason}
        patiently(
            lambda: self.start.thread.call(lambda: self.run.mark_done(**done), timeout_s=DONE_PATIENCE_S),
            patience_s=DONE_PATIENCE_S,
        )
        return 0

    def _continue(self, verdict: Verdict, decision: Decision) -> int:
        claim = self.run.ending(self.cluster.attempt)
        # a run folder that cannot tell stops nobody: requeueing twice is as good as once
        if self._in_folder(lambda: claim.take(f"supervisor on {os.uname().nodename}")) is False:
            reason = "somebody else has already acted on the end of this attempt"
            self.journal.append("not continued", reason=reason)
            return decision.exit_code
        if self.config.preemption.continue_by == "nothing":
            self.journal.append("not continued", reason="preemption.continue_by is nothing")
            log.warning("to continue the run: %s", self._by_hand())
            return decision.exit_code
        if isinstance(self.cluster, LocalCluster):
            self.journal.append("starting anew", restart=self.cluster.attempt.restart + 1)
            self._flush()  # the claim stays ours: the next start is this process, and may be killed before it begins
            from slurmft.scheduler.submission import RunSupervisor  # brings submitit, which only this branch needs

            self.log_file.close()
            self.cluster.start_anew(RunSupervisor(self.run.config).argv())
        if not isinstance(self.cluster, SlurmCluster):
            raise TypeError(f"no way to continue on {self.cluster.name}")
        with ignoring_signals():
            outcome = self._continue_in_slurm(self.cluster, verdict)
            self._in_folder((lambda: claim.settle(outcome)) if outcome else claim.give_back)
        if outcome:
            return decision.exit_code
        command = self._by_hand()
        self.journal.append("not continued", reason="neither requeue nor resubmit worked", command=command)
        log.error("THE RUN IS SAVED BUT WILL NOT CONTINUE BY ITSELF. To continue it: %s", command)
        return EXIT_TEMPORARY

    def _continue_in_slurm(self, cluster: SlurmCluster, verdict: Verdict) -> str:
        """How the run continues; empty when it does not."""
        how = self.config.preemption.continue_by
        outside = cluster.why_ending()
        if outside is not None and outside[0] in (Cause.REQUEUED, Cause.CANCELLED):
            # somebody was faster: a second requeue would be one too many, and a cancelled run must stay cancelled
            self.journal.append("left to slurm", reason=outside[1])
            if outside[0] is Cause.REQUEUED:
                self._begin_soon(cluster.job.job_id)
            return outside[0].value
        if how == "auto" and self._began_to_resubmit():
            how = "resubmit"
        if how == "auto" and verdict.cause is Cause.PREEMPTED and _preemption_cancels(cluster):
            reason = f"partition {cluster.job.partition} cancels what it preempts"
            self.journal.append("requeue skipped", reason=reason)
            how = "resubmit"
        if how in ("auto", "requeue") and (done := self._requeue(cluster, verdict)):
            return done
        if how in ("auto", "resubmit") and self._resubmit(cluster):
            return "resubmitted"
        return ""

    def _began_to_resubmit(self) -> bool:
        """Whether a supervisor in whose place we act was killed in the middle of it: a requeue would come on top."""
        mine = str(self.cluster.attempt)
        return any(event.event == "resubmitting" and event.attempt == mine for event in self.start.history)

    def _requeue(self, cluster: SlurmCluster, verdict: Verdict) -> str:
        job_id, delay_s = cluster.job.job_id, self.config.preemption.requeue_delay_s
        if verdict.cause not in PLANNED:
            delay_s += OTHERS_END_S
        self.journal.append("requeueing", job=job_id, delay_s=delay_s)
        self._flush()
        try:
            restart = cluster.attempt.restart
            on_time = slurm.requeue(job_id, restart=restart, delay_s=delay_s, patience_s=self._patience_s())
        except slurm.JobCancelled as error:
            self.journal.append("not continued", reason=error.what)
            return "cancelled"
        except SlurmError as error:
            self.journal.append("requeue failed", reason=error.what)
            log.warning("the job could not be requeued: %s", error.what)
            return ""
        self.journal.append("requeued", job=job_id, delay_s=delay_s if on_time else "Slurm's own, about 121")
        return "requeued"

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
                script.write_text(successor.batch_script(job_id), encoding="utf-8")
                signal_option = f"--signal={self.config.preemption.signal}@{self.config.preemption.signal_lead_s}"
                options += ["--requeue", "--open-mode=append", signal_option, *successor.inherited_options(os.environ)]
            command = successor.successor_command(script, after=job_id, options=options)
            self.journal.append("resubmitting", command=shlex.join(command))
            self._flush()
            next_job = successor.submit_successor(
                script, after=job_id, options=options, environment=os.environ, patience_s=self._patience_s(),
                tried=self._began_to_resubmit(),
            )  # fmt: skip
        except (SlurmError, OSError) as error:
            self.journal.append("resubmit failed", reason=str(error))
            log.warning("no successor could be submitted: %s", error)
            return False
        self.journal.append("resubmitted", job=next_job, after=job_id)
        self._in_folder(lambda: self._note_successor(next_job))
        return True

    def _note_successor(self, job_id: str) -> None:
        with self.run.lock():
            self.run.add_job(job_id)

    def _patience_s(self) -> float:
        """How long Slurm may be silent: until the job's time is up, where that is known."""
        if self.ends_at_s is None:
            return SLURM_PATIENCE_S
        return max(slurm.PATIENCE_S, self.ends_at_s - time.monotonic())

    def _flush(self) -> bool:
        return self.journal.flush(FLUSH_S)

    def _in_folder(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns; None when the run folder does not let it, which must not keep us from acting."""
        try:
            return self.start.thread.call(work, timeout_s=FLUSH_S)
        except (StorageError, OSError) as error:
            log.warning("%s", error)
            return None

    def _by_hand(self) -> str:
        return shlex.join(["slurmft", "submit", str(self.run.config)])


def _preemption_cancels(cluster: SlurmCluster) -> bool:
    try:
        return slurm.preempt_mode(cluster.job.partition) == "CANCEL"
    except SlurmError:
        return False
