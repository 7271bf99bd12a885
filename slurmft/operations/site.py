"""Is this site ready: ``slurmft doctor`` and the fire drill of a preemption; and which settings fit it (``advise``)."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import importlib.metadata
import logging
import os
import pwd
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurmft.config.health import HealthConfig
from slurmft.config.run import RunConfig
from slurmft.config.sections import CheckpointConfig, ElasticConfig
from slurmft.errors import ConfigError, LabUnavailable, LaunchError, SlurmError, SlurmUnavailable, StorageError
from slurmft.health.checker import CONFIG_VARIABLE, SYSTEM_CONFIG, load_config, read_results
from slurmft.health.node import Scene, mounts
from slurmft.operations import submit
from slurmft.policy import site as policy
from slurmft.policy import stop as grace_policy
from slurmft.policy.checkpoints import Advice, FailureHistory, Measured, Setting, advise, in_words
from slurmft.policy.container import Container, command_prefix, srun_options, starting
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.stop import Severity
from slurmft.scheduler import own_jobs, slurm, submission
from slurmft.scheduler.own_jobs import preempt_argv, signal_job
from slurmft.scheduler.parsing import parse_time
from slurmft.scheduler.slurm import nodes
from slurmft.storage import history
from slurmft.storage.checkpoint_names import MANIFEST, names_in
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.storage.run_folder import user_name as owner_name
from slurmft.supervisor.cluster import bundle_for
from slurmft.supervisor.observations import history_of
from slurmft.system.files import replace_atomically
from slurmft.system.processes import user_name

# --- A trial of a run's container for ``slurmft doctor``: its image, its mounts, and the Python inside ---

TRIAL_S = 300.0
"""An image may have to be loaded first."""


def look_at_container(config: RunConfig, environment: Mapping[str, str]) -> policy.ContainerFacts | None:
    """What this machine can say of the run's container; None where it has none. Leaves nothing behind."""
    container = config.contained()
    if container is None:
        return None
    starter, has_starter = _starter(container)
    image = _path_of_image(container)
    own = [str(each.source) for each in config.container.mounts]
    facts = policy.ContainerFacts(
        name=container.name, runtime=container.runtime, starter=starter, has_starter=has_starter,
        image="" if image is None else str(image), has_image=image is None or image.exists(),
        missing_mounts=tuple(path for path in own if not Path(path).exists()),
    )  # fmt: skip
    if not facts.has_starter or not facts.has_image or facts.missing_mounts:
        return facts
    # nothing of the run is made yet, and the trial makes nothing
    there = tuple(each for each in container.mounts if Path(each.source).exists())
    workdir = container.workdir if config.container.workdir or Path(container.workdir).is_dir() else "/"
    trial = replace(container, mounts=there, workdir=workdir)
    look = starting(trial, version=importlib.metadata.version("slurmft"), arguments=())
    if not container.is_started_by_srun:
        return _container_tried(facts, [*command_prefix(trial), *look], environment)
    if "SLURM_JOB_ID" not in environment:
        return replace(facts, to_try=slurm.TRY_ON_A_NODE)
    return _tried_by_srun(facts, config, trial, look)


def _starter(container: Container) -> tuple[str, bool]:
    if container.is_started_by_srun:
        option = "--container-image" if container.runtime == "pyxis" else "--container"
        try:
            return option, slurm.srun_knows(option)
        except SlurmError:
            return option, False
    program = command_prefix(container)[0]
    return program, shutil.which(program) is not None


def _path_of_image(container: Container) -> Path | None:
    """Where the image is a file or a folder; None where it is an address, or anything that a command makes of it."""
    if container.runtime == "oci":
        return Path(container.image) / "config.json"
    is_path = container.image.startswith(("/", "./", "../", "~"))
    return Path(container.image).expanduser() if is_path else None


def _tried_by_srun(
    facts: policy.ContainerFacts, config: RunConfig, trial: Container, look: Sequence[str]
) -> policy.ContainerFacts:
    there = next(each for each in config.run_folder.parents if each.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".slurmft-doctor-", dir=there) as folder:
            bundle = str(bundle_for(trial, Path(folder))) if trial.runtime == "oci" else ""
            options = [*config.slurm.srun_args, *srun_options(trial, bundle=bundle)]
            return _judged(facts, 0, slurm.run_inside(options, look, timeout_s=TRIAL_S), "")
    except (SlurmError, LaunchError) as error:
        return _judged(facts, 1, "", error.what.replace(" slurmft: container ", "\nslurmft: container "))
    except OSError as error:
        return replace(facts, error=f"container {facts.name}: no bundle can be made in {there}: {error.strerror}")


def _container_tried(
    facts: policy.ContainerFacts, argv: Sequence[str], environment: Mapping[str, str]
) -> policy.ContainerFacts:
    kept = {name: value for name, value in environment.items() if name != "PYTHONHOME"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=TRIAL_S, check=False,
                              stdin=subprocess.DEVNULL, env=kept)  # fmt: skip
    except subprocess.TimeoutExpired:
        return replace(facts, error=f"container {facts.name}: its Python has not ended within {TRIAL_S:.0f} s")
    except OSError as error:
        return replace(facts, error=f"container {facts.name}: {argv[0]} cannot be started: {error.strerror}")
    return _judged(facts, done.returncode, done.stdout, done.stderr)


def _judged(facts: policy.ContainerFacts, code: int, output: str, errors: str) -> policy.ContainerFacts:
    """By what the look at Python (``policy.container``) has said, and else by the runtime's last words."""
    if code == 0 and (said := [line for line in output.splitlines() if line.startswith("Python ")]):
        return replace(facts, tried=said[-1])
    lines = [line for line in errors.splitlines() if line.strip()]
    own = [line.removeprefix("slurmft: ") for line in lines if line.startswith("slurmft: container ")]
    words = lines[-1] if lines else f"exit code {code}"
    return replace(facts, error=(own[0] if own else f"container {facts.name}: {words}")[:600])


# --- ``slurmft doctor``: collects the site's settings and tries the filesystem; ``policy.site`` judges them ---

EXIT_NO_SLURM = LabUnavailable.exit_code
EXIT_SILENT = SlurmUnavailable.exit_code
AS_OF = "as of"
_MOST_LINKS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All findings, and how the command ends."""

    findings: tuple[policy.Finding, ...]
    exit_code: int


def diagnose(config: RunConfig | None, environment: Mapping[str, str], *, here: Path) -> Diagnosis:
    """Look at the site around us, for this run or for any; ``here`` stands for its folder where there is no run."""
    folder = try_folder(here if config is None else config.run_folder)
    found = [*policy.judge_folder(folder)]
    command = None if config is None else submit.command_finding(config, environment)
    found += [] if command is None else [command]
    container = None if config is None else look_at_container(config, environment)
    found += [] if container is None else policy.judge_container(container)
    offsets = {} if folder.error else {"the run folder's filesystem": folder.clock_offset_s}
    code = 0
    if not slurm.available():
        found.append(_missing("there is no Slurm on this machine: no client commands, or no configuration for them",
                              "runs with --cluster local work here; log in to a node of a cluster"))  # fmt: skip
        code = EXIT_NO_SLURM
    else:
        try:
            found += _of_slurm(config, environment, offsets)
        except SlurmError as error:
            found.append(_missing(f"Slurm did not answer: {error.what}", "try again, or see scontrol ping"))
            code = EXIT_SILENT
    found += policy.judge_clocks(offsets)
    found += policy.judge_site(_site(environment))
    found += [] if config is None else policy.judge_room(_room(config))
    return Diagnosis(findings=tuple(found), exit_code=code or policy.exit_code(found))


def _missing(text: str, remedy: str) -> policy.Finding:
    return policy.Finding(check="Slurm", level=policy.Level.PROBLEM, text=text, remedy=remedy)


def _of_slurm(
    config: RunConfig | None, environment: Mapping[str, str], offsets: dict[str, float]
) -> list[policy.Finding]:
    before = time.time()
    conf = slurm.configuration()
    if (clock := parse_time(conf.get(AS_OF, ""))) is not None:
        offsets["Slurm's controller"] = round(clock + 0.5 - (before + time.time()) / 2, 1)
    partitions = slurm.partitions(timeout_s=10.0)
    wishes = _wishes(config, environment)
    known = {each.name: policy.PartitionFacts(name=each.name, preempt_mode=each.preempt_mode, grace_s=each.grace_s)
             for each in partitions}  # fmt: skip
    name, version = conf.get("ClusterName", "unknown"), conf.get("SLURM_VERSION", "unknown")
    return [
        policy.Finding(check="Slurm", level=policy.Level.OK, text=f"cluster {name}, version {version}"),
        *policy.judge_cluster(conf, wishes),
        *policy.judge_partitions(conf, known, [each.name for each in partitions if each.is_default], wishes),
        *policy.judge_federation(slurm.federation()),
        *_of_options(config),
        *_of_grace(config, environment),
        policy.judge_permissions(_permissions(conf)),
    ]


def _of_options(config: RunConfig | None) -> Iterator[policy.Finding]:
    if config is None:
        return
    try:
        submission.try_options(config, RunFolder(config.run_folder))
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        yield policy.Finding(check="options", level=policy.Level.PROBLEM, text=error.what,
                      remedy=error.hint or "correct the section slurm")  # fmt: skip
    else:
        yield policy.Finding(check="options", level=policy.Level.OK, text="sbatch takes the run's options")


def _wishes(config: RunConfig | None, environment: Mapping[str, str]) -> policy.Wishes:
    if config is None:
        return policy.Wishes()
    named = environment.get("SBATCH_PARTITION") or config.slurm.partition or ""
    return policy.Wishes(
        partitions=tuple(filter(None, named.split(","))),
        requeue=config.slurm.requeue,
        continue_by=config.preemption.continue_by,
        requeue_delay_s=config.preemption.requeue_delay_s,
        survives_nodes=config.survives_nodes,
    )


def _of_grace(config: RunConfig | None, environment: Mapping[str, str]) -> list[policy.Finding]:
    """The grace budget, from what earlier runs of the same workload have measured."""
    if config is None:
        return []
    levels = {Severity.WARNING: policy.Level.WARNING, Severity.NOTE: policy.Level.NOTE}
    return [
        policy.Finding(check="grace budget", level=levels[each.severity], text=each.text)
        for each in submit.check_grace(config, {}, environment)
    ]


def _permissions(conf: Mapping[str, str]) -> policy.AdminFacts:
    user = user_name()
    if os.getuid() == 0 or conf.get("SlurmUser", "").startswith(f"{user}("):
        return policy.AdminFacts(may_drain=True, why=f"{user} is Slurm's administrator")
    if not policy.has_accounting(conf):
        return policy.AdminFacts(may_drain=None, why="without accounting only Slurm's own user surely may")
    try:
        level = slurm.admin_level(user)
    except SlurmError as error:
        return policy.AdminFacts(may_drain=None, why=f"the accounting did not answer: {error.what}")
    why = f"admin level {level} in the accounting" if level else f"the accounting does not know the user {user}"
    return policy.AdminFacts(may_drain=level in ("Administrator", "Operator"), why=why)


def as_lines(findings: Sequence[policy.Finding]) -> list[str]:
    """For people: findings that need action come last, where a terminal shows them."""
    order = list(policy.Level)
    lines = []
    for each in sorted(findings, key=lambda finding: order.index(finding.level)):
        lines.append(f"{each.level.upper():8} {each.check}: {each.text}")
        if each.remedy:
            lines.append(f"         -> {each.remedy}")
    return lines


def try_folder(path: Path) -> policy.FolderFacts:
    """What works where ``path`` is or will be: in its nearest folder that exists. Leaves nothing behind."""
    there = next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))
    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix=".slurmft-doctor-", dir=there) as name:
            return _folder_tried(there, Path(name), began_s)
    except OSError as error:
        return policy.FolderFacts(path=str(there), error=error.strerror or str(error))


def _folder_tried(there: Path, folder: Path, began_s: float) -> policy.FolderFacts:
    one = folder / "one"
    descriptor = os.open(one, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.close(descriptor)
    try:
        os.close(os.open(one, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        exclusive = False
    except FileExistsError:
        exclusive = True
    before = time.time()
    replace_atomically(one, "new")
    at = one.stat().st_mtime
    return policy.FolderFacts(
        path=str(there), exclusive=exclusive, renames=one.read_text(encoding="utf-8") == "new", flock=_flock(one),
        clock_offset_s=0.0 if before - 1 <= at <= time.time() + 1 else at - before, took_s=time.monotonic() - began_s,
    )  # fmt: skip


def _flock(path: Path) -> str:
    """Whether a lock keeps a second opening of the same file out."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(path.open("r+", encoding="utf-8"))
        second = stack.enter_context(path.open("r+", encoding="utf-8"))
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.strerror or str(error)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "works"
        except OSError as error:
            return error.strerror or str(error)
        return "two hold it at once"


def _site(environment: Mapping[str, str]) -> policy.SiteFacts:
    """What the administrator has set up for all runs; empty where Slurm does not answer."""
    conf: Mapping[str, str] = {}
    names: tuple[str, ...] = ()
    with contextlib.suppress(SlurmError):
        if slurm.available():
            conf = slurm.configuration()
            names = tuple(sorted({each.node for each in nodes() if each.usable}))
    named = Path(environment.get(CONFIG_VARIABLE) or SYSTEM_CONFIG)
    settings, error = HealthConfig(), ""
    if named.exists():
        try:
            settings = load_config(named, environment)
        except ConfigError as problem:
            error = str(problem)
    folder = settings.results_folder
    programs = {key: Path(conf.get(key, "").split(",")[0]) for key in policy.HOOKS}
    return policy.SiteFacts(
        installation=place(Path(sys.prefix)),
        conf=conf,
        nodes=names,
        programs={key: place(path) for key, path in programs.items() if path.is_absolute()},
        health=place(named),
        health_error=error,
        results=None if folder is None else place(folder),
        looked_at={} if folder is None else _ages(folder),
    )


def _ages(folder: Path) -> dict[str, float]:
    now = time.time()
    try:
        found = read_results(folder).checkups
    except StorageError:
        return {}
    return {node: now - max(each.at for each in looks) for node, looks in found.items() if looks}


def _room(config: RunConfig) -> policy.RoomFacts:
    there = _nearest(config.run_folder)
    kinds = [each for each in mounts(Scene(node="", now=time.time())) if there.is_relative_to(each.point)]
    try:
        free = shutil.disk_usage(_nearest(config.checkpoint_dir)).free
    except OSError:
        free = None
    return policy.RoomFacts(
        folder=place(there),
        kind=max(kinds, key=lambda each: len(each.point.parts)).kind if kinds else "",
        nodes=config.nodes,
        free_bytes=free,
        checkpoint_bytes=newest_size(config.checkpoint_dir),
        kept=config.checkpoint.keep_last_n,
    )


def newest_size(folder: Path) -> int:
    """Bytes of the newest committed checkpoint's files; 0 where there is none."""
    with contextlib.suppress(OSError):
        for one in names_in(folder).believed:
            path = folder / one.folder_name
            if (path / MANIFEST).is_file():
                return sum(each.lstat().st_size for each in path.iterdir())
    return 0


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists, without links."""
    return next((each for each in (path, *path.parents) if each.exists()), Path("/")).resolve()


def place(path: Path) -> policy.TrustedPath:
    """Who may change what lies there: itself, what its links lead to, and by the folders above."""
    if not path.exists():
        return policy.TrustedPath(path=str(path), exists=False)
    owner = path.stat().st_uid
    found = sorted({who for each in _rooms(path) for who in _changers(each, beside=owner)})
    return policy.TrustedPath(path=str(path), owner=owner_name(owner), changeable_by=", ".join(found))


def _rooms(path: Path) -> Iterator[Path]:
    """The path, its folders, and those of what its links name."""
    for _ in range(_MOST_LINKS):
        yield from (path, *path.parents)
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    real = path.resolve()
    yield from (real, *real.parents)


def _changers(path: Path, *, beside: int) -> Iterator[str]:
    facts = path.lstat()
    if stat.S_ISLNK(facts.st_mode):
        return
    if facts.st_uid not in (0, os.geteuid(), beside):
        yield owner_name(facts.st_uid)
    is_sticky = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
    if facts.st_mode & stat.S_IWOTH and not is_sticky:
        yield "every user"
    elif facts.st_mode & stat.S_IWGRP and not is_sticky and not _is_alone(facts.st_uid, facts.st_gid):
        yield f"group {facts.st_gid}"


def _is_alone(uid: int, gid: int) -> bool:
    """Whether a group holds root, or this user, and no other: many sites give each user one."""
    try:
        return gid == 0 or (pwd.getpwuid(uid).pw_gid == gid and not grp.getgrgid(gid).gr_mem)
    except KeyError:
        return False


# --- A preemption fire drill: a small job with the user's own options, the real signal, and the results ---

LOOK_S = 0.5
STEPS_FIRST = 5
"""Steps it has done before it is disturbed."""

END_S = 45.0
MOST_NODES, MOST_RANKS = 2, 2
MINUTES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """One drill, prepared; nothing has been done yet."""

    settings: RunConfig
    user: RunConfig
    environment: Mapping[str, str]
    preempt_with: str = ""
    """A partition whose jobs preempt this one's; empty: the signal alone."""

    limit_s: float = 300.0

    @property
    def folder(self) -> Path:
        """All that it writes; removed at its end."""
        return self.settings.run_folder.parent

    @property
    def submission(self) -> list[str]:
        """What submits it."""
        return [sys.executable, "-P", "-m", "slurmft", "submit", str(self.folder / "drill.yaml"), "--cluster", "slurm"]


def prepared(user: RunConfig, environment: Mapping[str, str], *, preempt_with: str, limit_s: float) -> Drill:
    """A small run with the user's own options, beside the user's run folder."""
    folder = user.run_folder.parent / f".slurmft-drill-{secrets.token_hex(4)}"
    command = (sys.executable, "-P", "-m", "slurmft.examples.drill", "--marks", str(folder))
    settings = user.model_copy(
        update={
            "command": command, "run_folder": folder / "drill", "nodes": min(user.nodes, MOST_NODES),
            "nproc_per_node": min(user.nproc_per_node, MOST_RANKS), "spare_nodes": 0, "elastic": ElasticConfig(),
            "checkpoint": CheckpointConfig(interval_steps=20), "exit_actions": {},
            "slurm": user.slurm.model_copy(update={"time": str(MINUTES), "output": None, "job_name": "slurmft-drill"}),
        }
    )  # fmt: skip
    return Drill(settings=settings, user=user, environment=environment, preempt_with=preempt_with, limit_s=limit_s)


def carry_out(drill: Drill, tell: Callable[[str], None]) -> list[policy.Row]:
    """Run the drill, and clean up in any case; ``tell`` gets a line about each wait.

    Raises:
        LaunchError: it did not start to train in time.
        SlurmError: Slurm refused, or did not answer.
        StorageError: there is no place for its folder.
    """
    deadline = time.monotonic() + drill.limit_s
    run = RunFolder(drill.settings.run_folder)
    try:
        drill.folder.mkdir(mode=0o700)
        (drill.folder / "drill.yaml").write_text(drill.settings.as_yaml(), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {drill.folder}: {error.strerror or error}") from error
    try:
        tell(_submit(drill))
        _wait_for_training(run, deadline)
        job = run.own_jobs()[-1]
        tell(f"job {job} trains; now the signal")
        how = _disturb(drill, job, tell)
        events = _wait_for_return(run, deadline)
        return policy.rows(_with_site(_facts(drill, events, how), run))
    finally:
        _clean_up(run, drill.folder, tell)


def _submit(drill: Drill) -> str:
    done = subprocess.run(
        drill.submission, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        env=dict(drill.environment), check=False,
    )  # fmt: skip
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip()).removeprefix("slurmft: ")
        raise LaunchError(f"the drill could not be submitted: {words[-1000:]}")
    return done.stdout.strip()


def _wait_for_training(run: RunFolder, deadline: float) -> None:
    while ((run.progress() or {}).get("step") or 0) < STEPS_FIRST:
        if time.monotonic() > deadline:
            raise LaunchError("the drill's job did not train in time", hint="the queue may be long: see --limit")
        time.sleep(LOOK_S)


def _disturb(drill: Drill, job: OwnJob, tell: Callable[[str], None]) -> str:
    if not drill.preempt_with:
        signal_job(job)
        return "scancel --signal=TERM"
    record = own_jobs.find_one(job)
    if record is None or not record.nodes:
        raise LaunchError(f"job {job} of the drill is gone")
    other = slurm.submit(preempt_argv(record.nodes, drill.preempt_with))
    tell(f"job {other} in partition {drill.preempt_with} preempts it")
    return f"preemption by a job in partition {drill.preempt_with}"


def _wait_for_return(run: RunFolder, deadline: float) -> list[Event]:
    """The journal, when the run has come back, or will not, or the time is up."""
    while True:
        events = run.journal().read()
        names = [event.event for event in events]
        if names.count(EventName.FIRST_STEP) > 1 or time.monotonic() > deadline or EventName.NOT_CONTINUED in names:
            return events
        time.sleep(LOOK_S)


_REFUSALS = (EventName.REQUEUE_FAILED, EventName.REQUEUE_SKIPPED, EventName.NOT_CONTINUED)


def _facts(drill: Drill, events: Sequence[Event], how: str) -> policy.DrillFacts:
    found = {event.event: event for event in reversed(events)}  # the first of each name
    stop, saved = found.get(EventName.STOP_REQUESTED), found.get(EventName.STOP_SAVED)
    firsts = [event for event in events if event.event == EventName.FIRST_STEP]
    started = [event for event in events if event.event == EventName.ATTEMPT_STARTED]
    again = next((e for e in (EventName.REQUEUED, EventName.RESUBMITTED) if e in found), "")
    before = [found[again]] if again else []
    if not again and len(started) > 1:  # Slurm did it by itself
        before = [event for event in events if event.seconds() < started[1].seconds()]
    waited_s = started[1].seconds() - before[-1].seconds() if before and len(started) > 1 else None
    agreed = found[EventName.STOP_AGREED].details.get("step") if EventName.STOP_AGREED in found else None
    resumed = firsts[1].details.get("resumed_from") if len(firsts) > 1 else None
    same_job = len(started) > 1 and started[0].attempt.split(".")[0] == started[1].attempt.split(".")[0]
    # a run that resumes from the agreed step has saved it, even if no process was left to report that
    unsaid = resumed if resumed is not None and resumed == agreed else None
    refused = [found[name].details.get("reason", "") for name in _REFUSALS if name in found]
    need = submit.grace_need(drill.user)
    return policy.DrillFacts(
        how=how,
        stop_reason=None if stop is None else str(stop.details.get("reason")),
        stop_cause="" if stop is None else str(stop.details.get("cause")),
        world_size=drill.settings.world_size,
        marked=len(list(drill.folder.glob("term.rank-*"))),
        saved_step=unsaid if saved is None else saved.details.get("step"),
        save_s=None if saved is None else saved.details.get("seconds"),
        requeued=EventName.REQUEUED in found or same_job,
        resubmitted=EventName.RESUBMITTED in found,
        why_not=str(refused[0]) if refused else "",
        waited_s=waited_s,
        resumed_from=resumed,
        workload_needs_s=need.total_s if need.known else None,
    )


def _with_site(facts: policy.DrillFacts, run: RunFolder) -> policy.DrillFacts:
    """``facts`` with the preemption settings of the drill's partition, where Slurm reports them."""
    with contextlib.suppress(SlurmError):
        jobs = run.own_jobs()
        job = own_jobs.find_one(jobs[0]) or own_jobs.find_one(jobs[-1])
        site, partitions = slurm.site(), slurm.partitions()
        tiers = [each.priority_tier for each in partitions if each.priority_tier is not None]
        for each in partitions:
            if job is not None and each.name == job.partition:
                kind = grace_policy.preempts(
                    kind=site.preempt_type, mode=each.preempt_mode, tier=each.priority_tier, tiers=tiers
                )  # fmt: skip
                return replace(
                    facts, partition=each.name, preempts=kind, preempt_mode=each.preempt_mode, grace_s=each.grace_s,
                    kill_wait_s=site.kill_wait_s,
                )  # fmt: skip
    return facts


def _clean_up(run: RunFolder, folder: Path, tell: Callable[[str], None]) -> None:
    """End its jobs, and remove its folder once no process writes there any more."""
    try:
        jobs = run.own_jobs()
        if run.exists():
            run.request("KILL", "drill")  # a successor that starts meanwhile ends by itself
        for job in jobs:
            own_jobs.cancel(job)
        until = time.monotonic() + END_S
        while jobs and any(each.alive or each.waiting for each in own_jobs.find(jobs).values()):
            if time.monotonic() > until:
                tell(f"jobs {', '.join(map(str, jobs))} of the drill are still ending; remove {folder} afterwards")
                return
            time.sleep(LOOK_S)
    except (SlurmError, StorageError, OSError) as error:
        tell(f"the drill could not be cleaned up: {error}; look for its jobs, and remove {folder}")
        return
    shutil.rmtree(folder, ignore_errors=True)


# --- ``slurmft advise``: what was measured of a workload, and the settings that follow ---

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counsel:
    """The advice for one configuration, and what Slurm's own settings have to do with it."""

    config: RunConfig
    advice: Advice
    findings: tuple[grace_policy.Finding, ...]
    """About the grace that Slurm leaves; empty where there is no Slurm to ask."""

    def lines(self) -> list[tuple[str, str]]:
        """Names and sentences."""
        words = in_words(self.advice, lead_s=self.config.preemption.signal_lead_s, setting=_setting(self.config))
        return [*words, *((finding.severity.value, finding.text) for finding in self.findings)]

    def as_json(self) -> dict[str, Any]:
        """For scripts; the format only grows. Unknown values are null."""
        advice, measured = self.advice, self.advice.measured
        section = self.config.checkpoint
        return {
            "format": 1,
            "run_folder": str(self.config.run_folder),
            "measured": {
                "attempts": measured.attempts, "of_this_run": measured.is_own, "step_s": measured.need.step_s,
                "longest_step_s": measured.need.longest_step_s, "p99_save_s": measured.need.save_s,
                "save_was_cut_off": measured.need.cut_off, "saves_s": list(measured.saves_s),
                "costs_s": list(measured.costs_s),
            },
            "failures": {**asdict(measured.history), "nodes": advice.nodes, "expected_mtbf_s": round(advice.mtbf_s, 1)},
            "signal_lead_s": {"least": advice.lead_s, "configured": self.config.preemption.signal_lead_s},
            "interval": {
                "configured": {"interval": section.interval, "interval_steps": section.interval_steps,
                               "interval_seconds": section.interval_seconds},
                "steps": advice.steps,
                "cost_was_measured": advice.is_cost_known,
                "recommended": _plan(advice.plan),
                "now": _plan(advice.now),
            },
            "words": [list(line) for line in self.lines()],
        }  # fmt: skip


def counsel(config: RunConfig, environment: Mapping[str, str]) -> Counsel:
    """Look at what earlier attempts measured, and at Slurm where it is there; nothing is changed."""
    measured = _measured_before(config)
    return Counsel(
        config=config,
        advice=advise(measured, nodes=config.nodes, setting=_setting(config)),
        findings=tuple(submit.check_grace(config, {}, environment, measured.need)) if slurm.available() else (),
    )


def _measured_before(config: RunConfig) -> Measured:
    workload = history.fingerprint(config.workload)
    own = list(history.read(config.run_folder, workload).values())  # once: it warns of a file that is damaged
    earlier = own or history.beside(config.run_folder, workload)
    return Measured(
        need=submit.grace_need_from(config, earlier),
        saves_s=tuple(seconds for one in earlier for seconds in one.saves_s),
        costs_s=tuple(seconds for one in earlier for seconds in one.costs_s),
        history=_history(config),
        attempts=len(earlier),
        is_own=bool(own),
    )


def _history(config: RunConfig) -> FailureHistory:
    try:
        return history_of(RunFolder(config.run_folder).journal().read(), config.nproc_per_node)
    except StorageError as error:
        log.warning("the run's journal is left out: %s", error.what)
        return FailureHistory()


def _setting(config: RunConfig) -> Setting:
    section = config.checkpoint
    return Setting(interval=section.interval, steps=section.interval_steps, seconds=section.interval_seconds)


def _plan(plan: Any) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {"interval_s": round(plan.interval_s, 3), "cost_s": round(plan.cost_s, 4),
            "durable_s": round(plan.durable_s, 3), "overhead_fraction": plan.overhead_fraction,
            "lost_s": round(plan.lost_s, 3), "lost_fraction": plan.lost_fraction,
            "limited_by": plan.limited_by}  # fmt: skip
