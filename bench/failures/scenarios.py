"""The failures of the book: how each is injected into a run on the lab, and when it is over."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from observed import Fault, clock_of, facts_of, is_noticed, is_over, shown

from slurm.conftest import Run, eventually, preempt
from slurm.small_disk import SmallDisk, mounted_disk
from slurmft.storage.journal import EventName

TRAINER = Path(__file__).with_name("trainer.py")
STEPS_BEFORE = 60
STEPS_AFTER = 30
PATIENCE_S = 300.0
AWAY_S = 20.0
GONE = (EventName.AGENT_LOST, EventName.AGENTS_GONE, EventName.WORKER_FAILED)
LIMITS = {"rank_section_timeouts": {"step": 5}, "rank_out_of_section_timeout": 60, "rank_heartbeat_timeout": 60}


@dataclass(frozen=True)
class Story:
    """One chapter."""

    name: str
    """Its key in chapters.CHAPTERS."""

    inject: Callable[[Run], Iterator[Fault]]
    """Yields a fault when it has been injected, and undoes it when it is asked for the next one."""

    config: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Of the trainer."""

    disk_mib: int = 0
    """Size of a disk of its own for the checkpoints; 0 for none."""


def submit(run: Run, story: Story) -> None:
    # a first try that was broken off has left its clock
    Path(f"{run.path}.clock").unlink(missing_ok=True)
    command = [sys.executable, str(TRAINER), f"{run.path}.clock", *story.options]
    run.configure(command=command, **story.config)
    run.submit()


def play(run: Run, story: Story) -> dict[str, Any]:
    """Submit the run, injure it, wait until it has got over it; what was seen."""
    faults, at_once = [], ""
    with _disk(run, story):
        submit(run, story)
        for fault in story.inject(run):
            faults.append(fault)
            eventually(
                lambda: is_noticed(run, faults[-1]), PATIENCE_S, lambda: f"{faults[-1].label} noticed\n{run.story()}"
            )
            at_once = at_once or shown(run, "status")
            fault.mend()
            eventually(lambda: is_over(run, faults[-1]), PATIENCE_S, lambda: f"{faults[-1].label} over\n{run.story()}")
        reached = max((step for step, at in clock_of(run) if at <= faults[-1].at_s), default=0)
        eventually(lambda: clock_of(run)[-1][0] >= reached + STEPS_AFTER, PATIENCE_S, run.story)
        told = facts_of(run, faults)
        told["seen"] = {"status at once": at_once, "status": shown(run, "status"), "explain": shown(run, "explain")}
        run.slurmft("stop", str(run.path), "--timeout", "60", check=False)
    return told


@contextlib.contextmanager
def _disk(run: Run, story: Story) -> Iterator[None]:
    if not story.disk_mib:
        yield
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        mounted_disk(run.lab, Path(folder) / "disk.img", story.disk_mib) as disk,
    ):
        run.configure(checkpoint={"directory": str(disk.path / "checkpoints")})
        run.disk = disk  # type: ignore[attr-defined]
        yield


def _hosts(run: Run) -> list[str]:
    return list(run.events("agents ready")[-1].details["hosts"])


def _kill_worker(run: Run) -> Iterator[Fault]:
    run.wait_for_step(STEPS_BEFORE)
    fault = Fault(label="kill -9 of rank 2", noticed=[EventName.WORKER_FAILED])
    run.kill(_hosts(run)[1], 2)
    yield fault


def _kill_node(run: Run) -> Iterator[Fault]:
    run.wait_for_step(STEPS_BEFORE)
    lost = _hosts(run)[1]
    fault = Fault(label=f"power of {lost} off", noticed=GONE)
    run.lab.kill_node(lost)
    try:
        yield fault
    finally:
        run.lab.start_node(lost)


def _partition(run: Run) -> Iterator[Fault]:
    run.wait_for_step(STEPS_BEFORE)
    lost = _hosts(run)[1]
    fault = Fault(label=f"{lost} cut off the network", noticed=GONE)
    run.lab.partition(lost)
    try:
        yield fault
    finally:
        run.lab.heal(lost)


def _out_of_memory(run: Run) -> Iterator[Fault]:
    path = Path(f"{run.path}.clock.fault")
    path.unlink(missing_ok=True)
    eventually(path.exists, PATIENCE_S, run.story)
    at_s = float(eventually(lambda: path.read_text(encoding="utf-8").split(), 5, run.story)[0])
    yield Fault(label="the batch does not fit any more", noticed=[EventName.WORKER_FAILED], at_s=at_s)


def _hang(run: Run) -> Iterator[Fault]:
    run.wait_for_step(STEPS_BEFORE)
    fault = Fault(label="SIGSTOP of rank 1", noticed=[EventName.WORKER_HUNG])
    run.kill(_hosts(run)[0], 1, signal="STOP")
    yield fault


def _full_disk(run: Run) -> Iterator[Fault]:
    run.wait_for_saved(STEPS_BEFORE // 2)
    disk: SmallDisk = run.disk  # type: ignore[attr-defined]
    fault = Fault(label="the disk is full", noticed=[EventName.SAVES_KEEP_FAILING], over=EventName.SAVES_WORK_AGAIN,
                  mend=disk.free)  # fmt: skip
    disk.fill()
    try:
        yield fault
    finally:
        disk.free()


def _no_controller(run: Run) -> Iterator[Fault]:
    run.wait_for_step(STEPS_BEFORE)

    def come_back() -> None:
        eventually(lambda: time.time() > fault.at_s + AWAY_S, AWAY_S + 10, "time")
        run.lab.start_controller()

    run.lab.crash_controller()
    fault = Fault(label="slurmctld killed, then rank 2", noticed=[EventName.WORKER_FAILED], mend=come_back)
    try:
        run.kill(_hosts(run)[1], 2)
        yield fault
    finally:
        run.lab.start_controller()


def _preemption(run: Run) -> Iterator[Fault]:
    run.wait_for_step(STEPS_BEFORE)
    fault = Fault(label="a job of a higher partition takes the nodes", noticed=[EventName.STOP_REQUESTED])
    preempt(run.lab, seconds=2)
    yield fault


def _elastic(run: Run) -> Iterator[Fault]:
    run.wait_for_step(STEPS_BEFORE)
    lost = _hosts(run)[3]
    fault = Fault(label=f"4 to 3: power of {lost} off", noticed=GONE)
    run.lab.kill_node(lost)
    try:
        yield fault
        run.wait_for("node given back", within_s=60)
    finally:
        run.lab.start_node(lost)
    eventually(lambda: clock_of(run)[-1][1] > time.time() - 1, 30, run.story)
    fault = Fault(label="3 to 5: slurmft join of two nodes", noticed=[EventName.JOINING, EventName.WILL_GROW])
    lender = run.slurmft("join", str(run.path), "--nodes", "2", "--", "--time=5").split("job ")[1].split(",")[0]
    yield fault
    run.lab.run(["scancel", lender], check=False)


IN_JOB = {"fault_tolerance": {"num_in_job_restarts": 5}}

STORIES = (
    Story("worker", _kill_worker, IN_JOB),
    Story("node", _kill_node, IN_JOB),
    Story("partition", _partition, IN_JOB),
    Story("oom", _out_of_memory, {**IN_JOB, "oom": {"action": "reduce_batch"}}, ("--tight-from", "60", "--fits", "4")),
    Story("hang", _hang, {"fault_tolerance": {"num_in_job_restarts": 5, **LIMITS}}),
    Story("disk", _full_disk, {**IN_JOB, "checkpoint": {"interval_steps": 10, "max_failed_saves": 2}}, disk_mib=24),
    Story("controller", _no_controller, {"fault_tolerance": {"num_in_job_restarts": 0}}),
    Story("preemption", _preemption, IN_JOB),
    Story(
        "elastic",
        _elastic,
        {
            "nodes": 4,
            "nproc_per_node": 1,
            "elastic": {"min_nodes": 1, "max_nodes": 5},
            "fault_tolerance": {"num_in_job_restarts": 3, "supervisor_lease_s": 8},
        },
    ),
)
