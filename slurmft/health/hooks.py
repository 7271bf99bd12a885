"""The work of Slurm's hooks on a node, and the lines of slurm.conf that call them.

Slurm drains a node whose prolog or epilog fails, so the scripts in ``bin/`` end with 0 on any error of ours; the one
exit code that they pass on is REFUSED, of a prolog that is allowed to refuse.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import slurmft.errors
from slurmft.errors import SlurmError
from slurmft.health.checker import keep, load_config, look, scene_here
from slurmft.health.node import Process, Scene, orphaned_memory, process, processes, running_jobs, step_of, text_of
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.node_health import Checkup, Status, drain_reason
from slurmft.scheduler import slurm
from slurmft.scheduler.jobs import SOONEST_S, begin_in
from slurmft.scheduler.parsing import JobRecord
from slurmft.system.private_folder import remove_tree

# --- cleaning ---
# The epilog's work: end the processes that a job has left on its node, and remove its shared memory. Of no other job.
#
# A process is ended when its cgroup, or else the environment that it began with, names this very job, its user is the
# job's, it began before the epilog did, and none of its ancestors is the step daemon of another job. Shared memory is
# removed as ``health.node`` proves it. Root's processes are never touched. A cleaner that was stuck for longer than its
# limit does nothing any more when it wakes up: the same job may run here again by then.

PASSES = 3
"""A process may fork while we look."""

GONE_S = 1.0
MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """Left-overs that were removed."""

    processes: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    skipped: str = ""
    """Why nothing was done; empty when something may have been."""

    def __str__(self) -> str:
        if self.skipped:
            return f"nothing cleaned: {self.skipped}"
        return f"ended {len(self.processes)} processes, removed {len(self.paths)} shared-memory objects"


def clean(
    scene: Scene, job: str, uid: int, *, limit_s: float = 8.0, clock: Callable[[], float] = time.monotonic
) -> Cleaned:
    """Clean up after an ended job; anything that cannot be proven to be its own stays."""
    if not job.isdecimal() or uid <= 0:
        return Cleaned(skipped=f"job {job[:20]!r} of user {uid} is none that is cleaned up after")
    deadline, born_before = clock() + limit_s, _ticks_now(scene)
    running = running_jobs(scene)
    if running is None or job in running:
        return Cleaned(skipped=f"job {job} still has a step here, or one is starting")
    ended: list[str] = []
    for _ in range(PASSES):
        left = [each for each in processes(scene) if is_left_over(scene, each, job, uid, born_before)]
        if not left:
            break
        for each in left:
            if clock() < deadline and _end(scene, each):
                ended.append(f"{each.pid} {each.name}")
        _wait_until_gone(scene, left, min(deadline, clock() + GONE_S), clock)
    removed = []
    for path, _ in orphaned_memory(scene, uid=uid):
        if clock() < deadline and _remove(path, uid):
            removed.append(str(path))
    return Cleaned(processes=tuple(ended), paths=tuple(removed))


def is_left_over(scene: Scene, each: Process, job: str, uid: int, born_before: int) -> bool:
    """Whether a process is proven to be the ended job's."""
    if each.uid != uid or each.job != job or each.started > born_before or each.pid == os.getpid():
        return False
    return not _belongs_to_another_step(scene, each.pid, job)


def _belongs_to_another_step(scene: Scene, pid: int, job: str) -> bool:
    for _ in range(MAX_DEPTH):
        fields = text_of(scene.path(f"proc/{pid}/stat")).rpartition(")")[2].split()
        if len(fields) < 2 or not fields[1].isdecimal():
            return False
        pid = int(fields[1])
        if pid <= 1:
            return False
        step = step_of(text_of(scene.path(f"proc/{pid}/cmdline")))
        if step is not None:
            return step != job
    return True


def _end(scene: Scene, each: Process) -> bool:
    """SIGKILL, to this process and not to a later one of its number."""
    try:
        handle = os.pidfd_open(each.pid)
    except OSError:
        return False
    try:
        if process(scene.path(f"proc/{each.pid}")) != each:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _wait_until_gone(scene: Scene, left: list[Process], until: float, clock: Callable[[], float]) -> None:
    while clock() < until and any(process(scene.path(f"proc/{each.pid}")) == each for each in left):
        time.sleep(0.01)


def _remove(path: Path, uid: int) -> bool:
    """A link is never followed, and files of other users stay."""
    with contextlib.suppress(OSError):
        if path.lstat().st_uid != uid:
            return False
        if path.is_dir() and not path.is_symlink():
            remove_tree(path, owner=uid)
        else:
            path.unlink()
        return True
    return False


def _ticks_now(scene: Scene) -> int:
    """Ticks since boot, as /proc/PID/stat counts them."""
    try:
        up_s = float(scene.text("proc/uptime").split()[0])
    except (IndexError, ValueError):
        return 0  # nothing began before that, so nothing is ended
    return int(up_s * os.sysconf("SC_CLK_TCK"))


# --- requeued ---
# After a requeue Slurm makes a job wait for ``cred_expire`` + 1 s, 121 by default. On the controller, as SlurmUser,
# that wait can be cut short for the jobs of all users, as ``bin/slurmft-epilog-slurmctld`` does.
#
# The job is COMPLETING as long as EpilogSlurmctld runs, so the follower is a process that outlives it.

SLURMS_WAIT_S = 130.0
"""A begin time that is further away was requested."""

FOLLOW_S = 180.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0


def follow_in_background(job: str) -> None:
    """Start the follower in a session of its own: slurmctld ends the group of the script that started it."""
    argv = [sys.executable, "-P", "-m", "slurmft", "hooks", "run", "follow-requeue", job]
    subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                     start_new_session=True, close_fds=True)  # fmt: skip


def follow(
    job: str,
    *,
    look: Callable[[str], JobRecord | None] = slurm.job,
    begin: Callable[[OwnJob, int], None] = begin_in,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the job is in the queue again, and let it begin at once; False where it was not requeued, was put off
    on purpose, is held, or does not come within three minutes.

    Raises:
        SlurmError: Slurm refused or did not answer; the job begins after Slurm's own wait.
    """
    deadline, pause = now() + FOLLOW_S, FIRST_PAUSE_S
    while now() < deadline:
        record = look(job)
        if record is None:
            return False
        if waits_for_slurm(record, now()):
            begin(OwnJob(job, record.identity), SOONEST_S)
            return True
        # right after COMPLETING it is PENDING for a moment for no reason
        if record.state != "COMPLETING" and (record.state, record.reason) != ("PENDING", "None"):
            return False
        sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return False


def waits_for_slurm(record: JobRecord, now: float) -> bool:
    """Whether it waits only for the time after a requeue, and for longer than it must."""
    if record.state != "PENDING" or record.reason != "BeginTime" or record.start is None:
        return False
    return SOONEST_S + 1 < record.start - now <= SLURMS_WAIT_S


def follow_quietly(job: str) -> str:
    """``follow``, with its result in words."""
    try:
        return f"job {job} may begin now" if follow(job) else f"job {job} is left alone"
    except SlurmError as error:
        return f"job {job} begins after Slurm's own wait: {error.what}"


# --- The work of Slurm's hooks on a node, and the lines of slurm.conf that call them ---

REFUSED = 40
"""Exit code of a prolog that refuses the node; not one of ours, of the shell, or of Python."""

SCRIPTS = ("slurmft-healthcheck", "slurmft-prolog", "slurmft-epilog", "slurmft-epilog-slurmctld")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a hook."""

    words: str
    exit_code: int = 0


def prolog(environment: Mapping[str, str]) -> Outcome:
    """The fast probes before a job; they refuse the node only where the configuration lets them.

    Raises:
        SlurmftError: the configuration cannot be used.
    """
    found, problems, refuses = _checked(environment, "prolog")
    failed = [result for result in found.results if result.status is Status.CRITICAL]
    if failed and refuses:
        reason = drain_reason(failed[0].problem, failed[0].name, failed[0].detail)
        return Outcome(words=reason, exit_code=REFUSED)
    return Outcome(words="; ".join([f"{found.node} is {found.status.name}", *problems]))


def healthcheck(environment: Mapping[str, str]) -> Outcome:
    """The fast probes, patiently, for the sweep; nothing is drained here.

    Raises:
        SlurmftError: the configuration cannot be used.
    """
    found, problems, _ = _checked(environment, "healthcheck")
    return Outcome(words="; ".join([f"{found.node} is {found.status.name}", *problems]))


def epilog(environment: Mapping[str, str]) -> Outcome:
    """Clean up after the job that has ended.

    Raises:
        SlurmftError: the configuration cannot be used.
    """
    config = load_config(None, environment)
    if not config.hooks.clean:
        return Outcome(words="hooks.clean is off")
    job, uid = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_UID", "")
    scene = scene_here(config, environment, context="epilog", level=1)
    return Outcome(words=str(clean(scene, job, int(uid) if uid.isdecimal() else -1)))


def epilog_slurmctld(environment: Mapping[str, str]) -> Outcome:
    """See whether the job goes back into the queue, and let it begin at once; returns before that."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        return Outcome(words="there is no SLURM_JOB_ID: nothing to do")
    if environment.get("SLURM_JOB_RESTART_COUNT") == "0":  # a requeue has counted already when we are called
        return Outcome(words=f"job {job} has never been requeued")
    follow_in_background(job)
    return Outcome(words=f"following job {job}")


HOOKS: Mapping[str, Callable[[Mapping[str, str]], Outcome]] = {
    "prolog": prolog, "epilog": epilog, "healthcheck": healthcheck, "epilog-slurmctld": epilog_slurmctld,
}  # fmt: skip


def slurm_conf_lines(scripts: Path) -> str:
    """The lines for slurm.conf, with what each one does.

    Raises:
        UsageError: the scripts are not there.
    """
    missing = [name for name in SCRIPTS if not (scripts / name).is_file()]
    if missing:
        raise slurmft.errors.UsageError(
            f"there is no {scripts / missing[0]}",
            hint="pip installs the hooks beside slurmft: install it again, into an environment of its own",
        )
    return f"""\
# slurmft's hooks; each line may be left out. They end with 0 on any fault of their own, and run no Slurm command but
# the last. Settings: /etc/slurmft/health.yaml (slurmft examples health.yaml shows all of them).

# Probes every five minutes, on all nodes; results go to results_folder, where slurmft sweep reads them.
HealthCheckProgram={scripts}/slurmft-healthcheck
HealthCheckInterval=300
HealthCheckNodeState=ANY,CYCLE

# Probes before each job, under two seconds; refuses nothing unless hooks.prolog_refuses is on.
Prolog={scripts}/slurmft-prolog

# Ends what the job has left: its processes, and its shared memory.
Epilog={scripts}/slurmft-epilog
PrologEpilogTimeout=60

# On the controller, optional: requeued jobs begin at once instead of after 121 s. One squeue per job that ends, a few
# where it is requeued. A slurmctld that had no EpilogSlurmctld must be restarted to take it; reconfigure is not enough.
EpilogSlurmctld={scripts}/slurmft-epilog-slurmctld
"""


def _checked(environment: Mapping[str, str], context: str) -> tuple[Checkup, list[str], bool]:
    scene = scene_here(load_config(None, environment), environment, context=context, level=1)
    found, problems = keep(look(scene), scene.config)
    return found, problems, scene.config.hooks.prolog_refuses
