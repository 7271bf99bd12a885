"""A run's whole life without a cluster: starts of its jobs, cron, people and a Slurm of memory, over the real code.

A start is the supervisor of one start of a job: it takes the run over, gives signs of life, and acts on the ends of its
attempts, with the code that does so on a cluster. What it trains is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import ALIVE, WAITING, FakeSlurm, Job

from slurmft.config.run import RunConfig, validate
from slurmft.errors import Fenced, RunBusy, SlurmftError
from slurmft.operations import control, rescue
from slurmft.policy.verdict import Cause, Verdict
from slurmft.scheduler import own_jobs, slurm, submission
from slurmft.scheduler.parsing import Asked, current_job
from slurmft.storage import run_folder
from slurmft.storage.checkpoint_names import GENERATION_VARIABLE, RUN_FOLDER_VARIABLE, check_fence
from slurmft.storage.patience import FolderThread
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import guardian
from slurmft.supervisor import run as run_module
from slurmft.supervisor.act import AttemptEnd
from slurmft.supervisor.cluster import SlurmCluster
from slurmft.system import processes

FAILED, REFUSED = 1, 2


class StartOfAJob:
    """One process that runs ``slurmft run`` in the batch step."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job_id, self.restart, self.host = world, job.job_id, job.restarts, job.batch_host
        self.submitted = job.submitted
        self.me = processes.Process(self.host, next(world.pids), f"born {next(world.pids)}")
        self.thread, self.held, self.start = FolderThread(), None, None
        self.is_alive, self.is_frozen, self.step = True, False, 0
        world.alive.add(self.me)
        self.environment = {
            "SLURM_JOB_ID": job.job_id, "SLURM_RESTART_COUNT": str(job.restarts), "SLURM_CLUSTER_NAME": "here",
            "SLURMD_NODENAME": self.host, "SLURM_JOB_NODELIST": self.host, "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_PARTITION": "low", "SLURM_JOB_NAME": job.name,
        }  # fmt: skip
        its_job = current_job(self.environment)
        assert its_job is not None
        self.cluster = SlurmCluster(its_job)

    @property
    def is_current(self) -> bool:
        """Slurm runs this very start."""
        job = self.world.slurm.state.jobs.get(self.job_id)
        return (
            job is not None and job.state == "RUNNING" and not self.world.is_foreign(job)
            and (job.restarts, job.batch_host, job.submitted) == (self.restart, self.host, self.submitted)
        )  # fmt: skip

    @property
    def can_commit(self) -> bool:
        """What its workers save becomes a checkpoint of the run."""
        if not self.is_alive or self.held is None:
            return False
        try:
            check_fence({RUN_FOLDER_VARIABLE: str(self.world.run.path), GENERATION_VARIABLE: str(self.held)})
        except Fenced:
            return False
        return True

    def begin(self) -> None:
        """Take the run over and train, or end."""
        world, before = self.world, self.world.owner()
        with world.acting_as(self):
            try:
                if self.held is None:
                    self.cluster.identify()
                bringing = run_module._Claim(self.environment, secret=None, held=self.held)
                start = run_module._begin(world.config, self.cluster, world.run, self.thread, bringing)
            except (RunBusy, Fenced) as error:
                self.exit(error.exit_code)
                return
        if start is None:
            self.exit(0)
            return
        start.journal.flush(5.0)
        world.check_succession(before, self)
        self.start, self.held = start, start.generation

    def beat(self) -> None:
        """What the supervisor does every second."""
        if not self.is_training:
            return
        with self.world.acting_as(self):
            if self.can_commit:
                run_module.run_folder.touch(self.world.run, self.cluster.attempt)
            if self.can_commit and self.world.run.see_request("KILL") is None:
                return
        self.end(Cause.STOPPED_BY_USER)

    @property
    def is_training(self) -> bool:
        return self.is_alive and not self.is_frozen and self.start is not None

    def end(self, cause: Cause, *, progressed: bool = True) -> None:
        """Its attempt ends like that."""
        assert self.start is not None
        first, self.step = self.step, self.step + 10 * progressed
        code = 1 if cause is Cause.WORKER_ERROR else 0
        verdict = Verdict(cause=cause, reason="x", exit_code=code, first_step=first, last_step=self.step,
                          saved_step=self.step)  # fmt: skip
        sender = SimpleNamespace(finish=lambda *_, **__: None, add=lambda *_: None)
        with self.world.acting_as(self):
            ending = AttemptEnd(
                self.world.config, self.start, sender, SimpleNamespace(close=lambda: None),  # type: ignore[arg-type]
                dismiss=lambda: None, has_nodes=lambda: True,
            )  # fmt: skip
            left = ending.act_on(verdict)
            self.start.journal.flush(5.0)
        if left is None:
            self.start = None
            self.begin()
        else:
            self.exit(left)

    def exit(self, code: int) -> None:
        """The batch script ends; its job with it, unless Slurm has another start of it by now."""
        was_current = self.is_current
        self.die()
        if was_current:
            job = self.world.slurm.state.jobs[self.job_id]
            self.world.slurm.end(job, "FAILED" if code else "COMPLETED")

    def die(self) -> None:
        self.is_alive, self.is_frozen = False, False
        self.world.alive.discard(self.me)


class World:
    """One run, its starts, and everybody who has a say in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="slurmft-life-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        )
        self.run = RunFolder(self.folder / "run")
        self.config = _config(self.folder)
        self.run.create()
        self.run.config.write_text(self.config.as_yaml())
        self.run.script.write_text("#!/bin/sh\n")
        self.slurm = FakeSlurm(self.run.path.stat().st_uid)
        self.pids, self.alive = itertools.count(1000), set[processes.Process]()
        self.person = processes.Process("login", 1, "always")
        self.alive.add(self.person)
        self.asking = self.person
        self.starts: list[StartOfAJob] = []
        self.violations = self.slurm.violations
        self.is_stopped = False
        self.may_end = False
        """It was stopped, and Slurm has forgotten that: both are right, that it goes on and that it ends."""

        self.given_up = False
        self._patch(monkeypatch)

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        clock = SimpleNamespace(
            time=lambda: float(self.slurm.now), monotonic=lambda: self.elapsed_s, sleep=self.advance
        )
        self.elapsed_s = 0.0
        for module in (run_folder, rescue, guardian, own_jobs, slurm):
            patch.setattr(module, "time", clock)
        patch.setattr(slurm, "subprocess", SimpleNamespace(
            run=self.slurm.subprocess_run, DEVNULL=-3, TimeoutExpired=TimeoutError))  # fmt: skip
        waits = {"clock": clock.monotonic, "sleep": clock.sleep}
        patch.setattr(slurm.run_patiently, "__kwdefaults__", {**slurm.run_patiently.__kwdefaults__, **waits})
        patch.setattr(slurm, "ignoring_signals", contextlib.nullcontext)
        patch.setattr("slurmft.supervisor.act.ignoring_signals", contextlib.nullcontext)
        patch.setattr(own_jobs, "keep_ahead", lambda *_: None)
        patch.setattr(processes, "me", lambda: self.asking)
        patch.setattr(
            processes, "lives", lambda pid, birth: processes.Process(self.asking.host, pid, birth) in self.alive
        )
        patch.setattr(own_jobs, "_local_cluster", lambda _: "here")
        patch.setattr(RunFolder, "refuse_replaceable", lambda _: None)
        for name in [name for name in os.environ if name.startswith(("SLURM", "SQUEUE", "SBATCH"))]:
            patch.delenv(name)

    def close(self) -> None:
        shutil.rmtree(self.folder)

    @contextlib.contextmanager
    def acting_as(self, start: StartOfAJob) -> Iterator[None]:
        before, self.asking = self.asking, start.me
        os.environ["SLURMD_NODENAME"] = start.host
        try:
            yield
        finally:
            self.asking = before
            del os.environ["SLURMD_NODENAME"]

    def advance(self, seconds: float) -> None:
        """Time passes, for Slurm and for the file server; those who train give signs of life."""
        self.slurm.now += round(max(1.0, seconds))
        self.elapsed_s += max(1.0, seconds)
        for path in self.run.path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))
        for start in self.starts:
            if start.is_training and start.can_commit:
                run_module.run_folder.touch(self.run, start.cluster.attempt)

    # Who is who

    def is_foreign(self, job: Job) -> bool:
        return id(job) in self.slurm.foreign

    def jobs(self, *states: str) -> list[Job]:
        """The run's jobs in Slurm."""
        return [
            job for job in self.slurm.state.jobs.values()
            if not self.is_foreign(job) and (not states or job.state in states)
        ]  # fmt: skip

    def owner(self) -> StartOfAJob | None:
        owner = self.run.owner()
        if owner is None:
            return None
        return next((start for start in self.starts if start.held == owner.generation), None)

    def training(self) -> list[StartOfAJob]:
        return [start for start in self.starts if start.is_training]

    def check_succession(self, before: StartOfAJob | None, after: StartOfAJob) -> None:
        if before is None or before is after:
            return
        if before.is_training and before.is_current:
            self.violations.append(f"{after.job_id}.{after.restart} took the run from a healthy owner")
        if not after.is_current and self.slurm.mood_lasts <= 0:
            self.violations.append(f"{after.job_id}.{after.restart} is stale, and took the run over")

    def check(self) -> None:
        """What holds at every moment."""
        assert not self.violations, f"{self.violations}\n{self.story()}"
        able = [start for start in self.starts if start.can_commit]
        assert len(able) <= 1, f"two that can commit\n{self.story()}"

    def story(self) -> str:
        lines = [f"{event.attempt} {event.event} {event.details}" for event in self.run.journal().read()]
        jobs = [f"{job.job_id} {job.state} {job.reason} {job.restarts}" for job in self.slurm.state.jobs.values()]
        return "\n".join([*lines, *jobs, f"owner {self.run.owner()}"])

    # What people, cron and Slurm do

    def attempt(self, act: Any) -> Any:
        """A caller tries something, which may be refused with slurmft's own words."""
        try:
            return act()
        except SlurmftError as error:
            return error

    def submit(self) -> Any:
        from slurmft.operations import submit as operations_submit

        def act() -> None:
            with self.run.lock():
                operations_submit._refuse_if_finished_or_busy(self.run, "slurm")
                self.run.take_request("KILL")
                self.run.journal().append("submitting", cluster="slurm", who="me")
                script = self.run.submissions / f"submission_file_{next(self.pids)}.sh"
                script.write_text("#!/bin/sh\n")
                job = self.slurm.submit(str(script))
                self.run.add_job(job.job_id, submission.look_at_submitted(job.job_id, "", Asked("", "")))
                self.run.journal().append("submitted", job=job.job_id)
            self.is_stopped = self.given_up = self.may_end = False

        return self.attempt(act)

    def submit_another_run(self) -> None:
        job = self.slurm.submit("/another/run/job.sh", foreign=True)
        job.begin += 10**9

    def begin(self, job: Job, *, frozen: bool = False) -> StartOfAJob:
        """Slurm starts a job of the run."""
        self.slurm.start(job)
        start = StartOfAJob(self, job)
        self.starts.append(start)
        start.is_frozen = frozen
        if not frozen:
            start.begin()
        return start

    def stop(self) -> Any:
        said = self.attempt(lambda: control.stop(self.run, "me"))
        self.is_stopped = not isinstance(said, Exception)
        return said

    def scancel(self) -> None:
        """A person ends all of the run's jobs; no process gets to say a word."""
        for job in self.jobs(*ALIVE, *WAITING):
            self.slurm.cancel(job, self.slurm.user)
            self.kill_starts_of(job)
            self.is_stopped = True

    def kill_starts_of(self, job: Job) -> None:
        for start in self.starts:
            if start.job_id == job.job_id and start.is_alive and not start.is_frozen:
                start.die()

    def cron(self) -> Any:
        return self.attempt(lambda: rescue.rescue([self.run], "cron"))

    def settle(self) -> None:
        """Everything that was going on comes to its end, and cron looks again and again."""
        self.slurm.mood_lasts = 0
        for start in self.starts:
            if start.is_alive and start.is_frozen:
                start.is_frozen = False
                (start.begin if start.start is None else start.beat)()
        for _ in range(12):
            for start in self.training():
                start.beat()
                if start.is_alive and not start.is_current:
                    start.die()  # slurmd ends what its controller does not know
            for job in self.jobs("RUNNING"):
                if not any(start.is_alive and start.is_current and start.job_id == job.job_id for start in self.starts):
                    self.slurm.end(job, "NODE_FAIL")
            for job in self.jobs(*WAITING):
                if self.slurm.can_start(job):
                    self.begin(job)
            self.check()
            said = self.cron()
            self.given_up = self.given_up or "without a verdict and without progress" in str(said)
            self.advance(130)
        self.check()

    def check_settled(self) -> None:
        """Exactly one continuation, or none where the run is to end."""
        busy, training = self.jobs(*ALIVE, *WAITING), [start for start in self.training() if start.can_commit]
        last = [event for event in self.run.journal().read() if event.event == "decision"][-1:]
        has_ended = bool(last) and last[0].details["action"] in ("stop", "finish")
        if self.is_stopped or self.run.done() is not None:
            assert not busy and not training, f"it was stopped, and goes on\n{self.story()}"
        elif self.run.owner() is not None and not self.given_up and not has_ended:
            held = [job for job in busy if job.is_held]
            if self.may_end and not busy and not training:
                return
            assert len(busy) == 1, f"{len(busy)} continuations\n{self.story()}"
            assert held or (len(training) == 1 and training[0].is_current), f"no supervisor trains\n{self.story()}"


def _config(folder: Path) -> RunConfig:
    return validate(
        {
            "command": ["true"], "run_folder": str(folder / "run"), "nodes": 1, "slurm": {"partition": "low"},
            "exclusions": {"path": str(folder / "exclusions.json")},
            "fault_tolerance": {"num_in_job_restarts": 1, "num_job_retries_on_failure": 50,
                                "max_no_progress_cycles": 50, "retry_delay_s": 0},
        },
        source="run.yaml",
    )  # fmt: skip
