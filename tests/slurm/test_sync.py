"""A script that cannot be changed and saves on its node's own disk goes on elsewhere: ``sync``."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from slurm.conftest import Run, eventually
from slurm.test_local import LocalRun
from slurmft.lab.cluster import Lab
from slurmft.sync.folder import newest
from slurmft.sync.stores import open_store

pytestmark = pytest.mark.timeout(400)
PAGE = Path(__file__).parents[2] / "docs/how-to/scripts-that-cannot-change.md"
TRAINER = Path(__file__).parent / "trainers" / "snapshot.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same script under torchrun alone."""
    folder = tmp_path_factory.mktemp("snapshot")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TRAINER)]
    result = subprocess.run(
        [*command, f"--snapshot_path={folder}/models/snapshot.pth"],
        capture_output=True, text=True, timeout=200, cwd=folder, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = re.findall(r"final weights sha256: (\w+)", result.stdout)
    assert len(found) == 1, result.stdout + result.stderr
    return found[0]


@pytest.mark.long
@pytest.mark.slurm
def test_the_rescheduling_tutorial(lab: Lab, new_run: Callable[..., Run], undisturbed: str) -> None:
    """Its rank meets an error, asks to be scheduled again, and goes on from the snapshot on another node."""
    name = "rescheduled"
    script, go = lab.home / "snapshot.py", lab.home / f"{name}-go"
    script.write_text(TRAINER.read_text())
    script.chmod(0o644)
    go.unlink(missing_ok=True)
    errors = lab.home / "runs" / "training_errors.log"
    page = yaml.safe_load(PAGE.read_text().partition("```yaml\n")[2].partition("```")[0])
    (folder,) = page["sync"]
    kept = {**folder, "path": "/dev/shm/models", "url": f"file://{lab.home}/kept", "frequency": "2s"}
    run = new_run(
        name,
        command=["python", str(script), "--snapshot_path=/dev/shm/models/snapshot.pth", "--fail_at=9", f"--go={go}",
                 f"--error_log={errors}"],
        nodes=1, launcher=page["launcher"], exit_actions=page["exit_actions"], sync=[kept],
    )  # fmt: skip
    run.submit()
    first = run.wait_for("folder uploaded").details
    (node,) = run.wait_for("agents ready").details["hosts"]
    assert first["node"] == node
    lab.run_as_admin(["scontrol", "update", f"nodename={node}", "state=drain", "reason=test"])
    try:
        go.touch()
        run.wait_until_done()
    finally:
        lab.run_as_admin(["scontrol", "update", f"nodename={node}", "state=resume"])
    assert run.digest() == undisturbed, run.story()
    hosts = [event.details["hosts"] for event in run.events("agents ready")]
    assert len(hosts) == 2
    assert hosts[0] != hosts[1], run.story()
    (restored,) = run.events("folder restored")
    assert restored.details["node"] == hosts[1][0]
    assert "Resuming training from snapshot at Epoch 8 on" in run.output(), run.story()
    assert "NCCL communicator was aborted" in errors.with_name("training_errors.log.rank_1").read_text()
    assert run.events("sync failed") == [], run.story()
    assert "slurmft" not in script.read_text()
    for folder in ("/dev/shm/models", "/dev/shm/.models.slurmft"):
        for host in {hosts[0][0], hosts[1][0]}:
            lab.run_on_as_admin(host, ["rm", "-rf", folder], check=False)


SLOW = """
import os, sys, time
path, steps, every, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
step = int(open(path).read(20).split()[0]) if os.path.exists(path) else 0
print("began at", step, flush=True)
while step < steps:
    time.sleep(0.1)
    step += 1
    if step % every == 0:
        with open(path, "w") as file:
            file.write(f"{step} " + str(step)[-1] * size)
        while step == every and not os.path.exists(sys.argv[5]):
            time.sleep(0.05)
print("ended at", step, flush=True)
"""


def local_run(folder: Path, url: str, *, steps: int, every: int, size: int = 1000, **sync: object) -> LocalRun:
    """It saves every so many steps, and goes on behind the first save when there is a file ``go`` in the folder."""
    script = folder / "train.py"
    script.write_text(SLOW)
    models = folder / "models"
    return LocalRun(
        folder / "run", command=["python", str(script), str(models / "snapshot"), str(steps), str(every), str(size),
                                   str(folder / "go")],
        nodes=1, nproc_per_node=1, checkpoint={},
        sync=[{"path": str(models), "url": url, "frequency": "1s", **sync}],
    )  # fmt: skip


def events(run: LocalRun, name: str) -> list[dict[str, object]]:
    return [dict(event.details) for event in run.folder.journal().read() if event.event == name]


def output(run: LocalRun) -> str:
    return "".join(path.read_text() for path in sorted(run.folder.attempts.glob("*/rank-0.log")))


def is_stored(folder: Path) -> bool:
    """The newest version is what the script saved last."""
    (identity,) = (path.name for path in (folder / "kept").iterdir())
    found = newest(open_store(f"file://{folder}/kept", f"{identity}/lead"), identity)
    saved = hashlib.sha256((folder / "models" / "snapshot").read_bytes()).hexdigest()
    return found is not None and [each.sha256 for each in found.files] == [saved]


def keepers(run: LocalRun) -> list[psutil.Process]:
    """The processes that keep folders for this run."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if "slurmft.sync.folder" in (process.info["cmdline"] or []):
            with contextlib.suppress(psutil.Error):
                agent = process.parent()
                if agent is not None and any(str(run.folder.path) in word for word in agent.cmdline()):
                    found.append(process)
    return found


@pytest.mark.long
def test_the_agent_is_killed_in_the_middle_of_an_upload(tmp_path: Path) -> None:
    """What was being sent is not there; the next attempt sends it, and nothing is lost."""
    run = local_run(tmp_path, f"file://{tmp_path}/kept", steps=20, every=10, size=3 << 20, bandwidth_mb_s=1)
    run.submit()
    kept = tmp_path / "kept"

    def in_the_middle() -> bool:
        return any(part.stat().st_size for part in kept.glob("*/lead/data/.part-*"))

    eventually(in_the_middle, 200, run.story)
    assert not [*kept.glob("*/lead/versions/*.json")]
    (keeper,) = keepers(run)
    agent = keeper.parent()
    assert agent is not None
    os.kill(agent.pid, signal.SIGKILL)
    eventually(lambda: not keeper.is_running() or keeper.status() == psutil.STATUS_ZOMBIE, 10, run.story)
    (tmp_path / "go").touch()
    run.wait_until_done()
    assert output(run).count("began at 10") == 1, run.story() + output(run)  # its own newer files, not sent yet
    assert "ended at 20" in output(run)
    assert not [*kept.glob("*/lead/data/.part-*")]
    assert is_stored(tmp_path), run.story()


def test_the_process_that_keeps_folders_is_killed_and_comes_back(tmp_path: Path) -> None:
    run = local_run(tmp_path, f"file://{tmp_path}/kept", steps=20, every=10)
    run.submit()
    eventually(lambda: events(run, "folder uploaded"), 200, run.story)
    (keeper,) = keepers(run)
    keeper.kill()
    eventually(lambda: events(run, "sync failed"), 60, run.story)
    (tmp_path / "go").touch()
    run.wait_until_done()
    assert "has ended with -9" in str(events(run, "sync failed")[0]["reason"])
    assert output(run).count("began at") == 1, run.story()
    assert is_stored(tmp_path), run.story()


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem that can be frozen: whoever writes there waits, and cannot be killed, as on a server that hangs."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=False).returncode:
        pytest.skip("only root can mount a disk")
    place.chmod(0o700)
    yield place
    subprocess.run(["fsfreeze", "--unfreeze", str(place)], check=False, capture_output=True)
    eventually(lambda: subprocess.run(["umount", str(place)], check=False, capture_output=True).returncode == 0,
               60, "unmounted")  # fmt: skip


@pytest.mark.soak
def test_a_store_that_hangs_holds_up_neither_training_nor_a_stop(tmp_path: Path, frozen_disk: Path) -> None:
    run = local_run(tmp_path, f"file://{frozen_disk}/kept", steps=100_000, every=200, upload_timeout_s=20)
    (tmp_path / "go").touch()
    run.submit()
    eventually(lambda: events(run, "folder uploaded"), 200, run.story)
    subprocess.run(["fsfreeze", "--freeze", str(frozen_disk)], check=True, timeout=60)
    then = saved_step(tmp_path)
    failed = eventually(lambda: events(run, "sync failed"), 300, run.story)
    assert "has not answered for" in str(failed[0]["reason"])
    assert saved_step(tmp_path) > then, "the script went on"
    began_s = time.monotonic()
    run.slurmft("stop", str(run.folder.path), "--timeout", "90")
    assert time.monotonic() - began_s < 80, run.story()
    assert "was not done in time" in str(events(run, "sync failed")[-1]["reason"]), run.story()


def saved_step(folder: Path) -> int:
    """The script opens its snapshot anew for each save, so that it may be empty for a moment."""
    words: list[str] = eventually(lambda: (folder / "models" / "snapshot").read_text().split(), 10, "a snapshot")
    return int(words[0])


SHARDS = """
import os, sys, time
path, go, place = sys.argv[1], sys.argv[2], os.environ["GROUP_RANK"]
step, of = open(path).read().split() if os.path.exists(path) else ("0", "nobody")
print("began at", step, "of", of, flush=True)
with open(path, "w") as file:
    file.write(f"{int(step) + 1} {place}")
while not os.path.exists(go):
    time.sleep(0.1)
"""


@pytest.mark.long
@pytest.mark.slurm
def test_each_node_gets_back_what_the_node_in_its_place_had(lab: Lab, new_run: Callable[..., Run]) -> None:
    script, go = lab.home / "shards.py", lab.home / "shards-go"
    script.write_text(SHARDS)
    script.chmod(0o644)
    go.unlink(missing_ok=True)
    run = new_run(
        "each-node", command=["python", str(script), "/dev/shm/shards/mine", str(go)], nodes=2, nproc_per_node=1,
        sync=[{"path": "/dev/shm/shards", "url": f"file://{lab.home}/kept", "frequency": "2s", "each_node": True}],
    )  # fmt: skip
    hosts: list[str] = []
    for attempt in (1, 2):
        job = run.submit()
        hosts = run.wait_for("agents ready", attempt).details["hosts"]
        run.wait_for("folder uploaded", 2 * attempt)  # the first of each attempt and node; a stop has nothing new
        if attempt == 1:
            run.slurmft("stop", str(run.path), "--timeout", "60")
            run.wait_until_out_of_queue(job)
            for host in hosts:  # the nodes have lost everything
                lab.run_on_as_admin(host, ["rm", "-rf", "/dev/shm/shards", "/dev/shm/.shards.slurmft"])
    go.touch()
    run.wait_until_done()
    for rank in (0, 1):
        assert re.findall(r"began at (\d) of (\w+)", run.output(rank)) == [("0", "nobody"), ("1", str(rank))]
    assert len(run.events("folder restored")) == 2, run.story()
    assert run.events("sync failed") == [], run.story()
    for host in hosts:
        lab.run_on_as_admin(host, ["rm", "-rf", "/dev/shm/shards", "/dev/shm/.shards.slurmft"], check=False)
