"""The disk is full, or does not answer: training goes on, the old checkpoint stays, and what failed is done later.

A small disk of its own (an image behind a loop device, mounted on every node) is really filled and really frozen.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.conftest import Run, eventually, preempt, submit_with
from slurm.small_disk import SmallDisk, mounted_disk
from slurmft.checkpoint.catalog import Catalog
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
SIZE_MIB = 24


Fault = Callable[[SmallDisk], None]


@pytest.fixture
def disk(lab: Lab, tmp_path: Path) -> Iterator[SmallDisk]:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4 to make a small disk with (e2fsprogs)")
    with mounted_disk(lab, tmp_path / "disk.img", SIZE_MIB) as small:
        yield small


FAULTS = [
    pytest.param(SmallDisk.fill, SmallDisk.free, errno.ENOSPC, id="full"),
    pytest.param(SmallDisk.forbid, SmallDisk.allow, errno.EROFS, id="read-only", marks=pytest.mark.soak),
]


@pytest.mark.long
@pytest.mark.parametrize(("breaks", "mends", "number"), FAULTS)
def test_a_disk_that_takes_nothing_at_a_periodic_save(
    new_run: NewRun, undisturbed: str, disk: SmallDisk, breaks: Fault, mends: Fault, number: int
) -> None:
    section = {"directory": str(disk.path / "checkpoints"), "interval_steps": 10, "max_failed_saves": 2}
    run = new_run(delay=0.3, checkpoint=section)
    run.submit()
    eventually(lambda: Catalog(disk.path / "checkpoints").committed(), 60, run.story)
    breaks(disk)
    failed = run.wait_for("save failed")
    assert failed.details["reason"] == os.strerror(number)
    assert Catalog(disk.path / "checkpoints").committed()[0].step < failed.details["step"]
    assert os.strerror(number) in run.wait_for("saves keep failing").details["reason"]
    mends(disk)
    run.wait_for("saves work again")
    run.wait_until_done()
    assert len(run.events("attempt started")) == 1, "training went on"
    assert Catalog(disk.path / "checkpoints").scan().uncommitted == []
    assert run.digest() == undisturbed


@pytest.mark.long
def test_a_full_run_folder_at_a_stop_and_at_the_next_start(
    lab: Lab, new_run: NewRun, undisturbed: str, disk: SmallDisk
) -> None:
    """Journal, logs and checkpoints lie on it; nothing can be written from before the stop until after the start."""
    run = new_run()
    run = Run(lab, disk.path / "run", written_at=run.config)
    run.configure(run_folder=str(run.path))
    job = run.submit()
    run.wait_for_saved(25)
    disk.fill()
    preempt(lab)  # its grace of 15 s passes, and nothing can be saved
    look = ["squeue", "-h", "-j", job, "-O", "RestartCnt,State"]
    eventually(lambda: lab.run(look).stdout.split() == ["1", "RUNNING"], 60, "the next start")
    time.sleep(3)  # into the wait of the new start
    disk.free()
    run.wait_until_done()
    assert run.folder.jobs() == [job]
    assert run.events("first step")[-1].details["resumed_from"] == 25
    assert run.digest() == undisturbed


@pytest.mark.long
def test_a_run_folder_that_stalls_for_longer_than_the_lease(
    lab: Lab, new_run: NewRun, undisturbed: str, disk: SmallDisk
) -> None:
    run = new_run(fault_tolerance={"supervisor_lease_s": 4})
    run = Run(lab, disk.path / "run", written_at=run.config)
    run.configure(run_folder=str(run.path))
    job = run.reach(10)
    disk.freeze()
    time.sleep(10)  # the time itself is what is tested
    lab.run(["scancel", "--signal=TERM", job])
    time.sleep(3)
    disk.thaw()
    run.wait_until_done()
    assert [event.details["cause"] for event in run.events("stop requested")] == ["signalled"]
    assert len(run.events("attempt started")) == 2
    assert run.events("verdict")[0].details["saved_step"] == run.events("verdict")[0].details["last_step"]
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_a_run_folder_that_stalls_after_the_requeue_does_not_cost_slurms_two_minutes(
    lab: Lab, new_run: NewRun, undisturbed: str, disk: SmallDisk, moody: Path
) -> None:
    """The begin time is set, and over before the supervisor has written what it did."""
    placed, frozen = moody / "placed", moody / "frozen"
    wrapper = (moody / "scontrol").read_text()
    wait = f"*:scontrol:update) touch {placed}; while [ ! -e {frozen} ]; do sleep 0.02; done ;;\nrefuse:scontrol:"
    (moody / "scontrol").write_text(wrapper.replace("refuse:scontrol:", wait, 1))
    run = new_run()
    run = Run(lab, disk.path / "run", written_at=run.config)
    run.configure(run_folder=str(run.path))
    job = submit_with(run, moody)
    run.wait_for_step(10)
    lab.run(["scancel", "--signal=TERM", job])
    eventually(placed.exists, 60, run.story)
    disk.freeze()
    lab.run(["touch", str(frozen)])
    time.sleep(4)  # longer than the delay; the time itself is what is tested
    disk.thaw()
    run.wait_until_done()
    [_, second] = run.events("first step")
    assert second.details["seconds_since_stop_request"] < 60, run.story()
    assert run.digest() == undisturbed
