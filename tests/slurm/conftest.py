"""Real runs on a real cluster: a lab of these tests' own, and a run as a tester sees it."""

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import SLOWEST, slowness

from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import RunFolder

PATIENCE_S = 150.0
"""Longer than Slurm's own 121 s, which a job on a busy machine may fall back to."""

STEPS = 60
TRAINER = ["python", "-m", "slurmft.examples.byte_gpt", "--channels", "32", "--layers", "1", "--window", "32",
           "--batch-size", "2", "--eval-every", "15", "--eval-batches", "3", "--limit-bytes", "200000"]  # fmt: skip


def eventually(condition: Callable[[], Any], within_s: float, what: str | Callable[[], str]) -> Any:
    """The condition's first true value; ``what`` is asked when it has not come, and not before."""
    began = time.monotonic()
    while not (value := condition()):
        if time.monotonic() > began + within_s * slowness():
            pytest.fail(f"not within {within_s:.0f} s: {what() if callable(what) else what}", pytrace=True)
        time.sleep(0.1)
    return value


@dataclass
class Run:
    """One run on the lab."""

    lab: Lab
    path: Path
    written_at: Path | None = None
    """Its configuration, where that does not lie beside the run folder."""

    @property
    def config(self) -> Path:
        return self.written_at or self.path.with_suffix(".yaml")

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    def slurmft(self, *arguments: str, check: bool = True) -> str:
        return self.lab.run(["slurmft", *arguments], check=check, timeout=90 * SLOWEST).stdout

    def submit(self, *options: str) -> str:
        """Submit it; returns the job id."""
        output = self.slurmft("submit", str(self.config), *options)
        return output.split(" as job ")[1].split()[0]

    def reach(self, step: int, within_s: float = PATIENCE_S) -> str:
        """Submit it; returns the job id when it has done so many steps."""
        job = self.submit()
        self.wait_for_step(step, within_s)
        return job

    def events(self, name: str | None = None) -> list[Event]:
        return [event for event in self.folder.journal().read() if name in (None, event.event)]

    def wait_for(self, name: str, count: int = 1, within_s: float = PATIENCE_S) -> Event:
        """The ``count``-th event of that name."""
        eventually(lambda: len(self.events(name)) >= count, within_s, lambda: f"{count} x {name!r}\n{self.story()}")
        return self.events(name)[count - 1]

    def wait_for_step(self, step: int, within_s: float = PATIENCE_S) -> None:
        eventually(
            lambda: ((self.folder.progress() or {}).get("step") or 0) >= step,
            within_s,
            lambda: f"step {step}\n{self.story()}",
        )

    def wait_for_saved(self, step: int, within_s: float = PATIENCE_S) -> None:
        """Durable, which is some steps after it was complete."""
        eventually(
            lambda: ((self.folder.progress() or {}).get("saved") or 0) >= step,
            within_s,
            lambda: f"a checkpoint of step {step}\n{self.story()}",
        )

    def wait_until_done(self, within_s: float = 2 * PATIENCE_S) -> None:
        eventually(lambda: self.folder.done() is not None, within_s, lambda: f"done\n{self.story()}")

    def wait_until_out_of_queue(self, job: str, within_s: float = PATIENCE_S) -> None:
        def gone() -> bool:
            states = self.lab.run(["squeue", "-h", "-j", job, "-o", "%T"], check=False).stdout.split()
            return not states

        eventually(gone, within_s, lambda: f"job {job} out of the queue\n{self.story()}")

    def story(self) -> str:
        """For the message of a test that fails."""
        logs = "".join(path.read_text() for path in sorted(self.folder.logs.glob("*.log")))
        ranks = "".join(
            f"{path.parent.name}/{path.name}: ...{path.read_text(errors='replace')[-400:]}\n"
            for path in sorted(self.folder.attempts.glob("*/rank-*.log"))
        )
        progress = f"{self.folder.progress()}\n"
        story = "".join(f"{e.at:%H:%M:%S} {e.attempt} {e.event} {e.details}\n" for e in self.events())
        jobs = self.lab.run(["squeue", "-a", "-o", "%i %T %r now %N begins %S"], check=False).stdout
        return f"{time.strftime('%T')}\n{story}{progress}{ranks}{logs}{jobs}"

    def pids(self, node: str) -> dict[int, str]:
        """Process ids of the run's living workers on a node, by rank: each one's output goes to its own log."""
        script = 'for p in $(pgrep -f "[s]lurmft.agent.zygote"); do echo $p $(readlink /proc/$p/fd/1); done'
        lines = self.lab.run_on_as_admin(node, ["bash", "-c", script], check=False).stdout.split("\n")
        found = (re.fullmatch(rf"(\d+) {re.escape(str(self.path))}/.*/rank-(\d+)\.log", line) for line in lines)
        return {int(match[2]): match[1] for match in found if match}

    def kill(self, node: str, *ranks: int, signal: str = "KILL") -> None:
        """Send a signal to living workers on a node: to these ranks, or to all that are there."""
        pids = self.pids(node)
        chosen = [pids[rank] for rank in ranks or pids]
        self.lab.run_on_as_admin(node, ["kill", f"-{signal}", *chosen])

    def kill_between_steps(self, node: str, *ranks: int, signal: str = "KILL") -> None:
        """Kill these ranks, or ``STOP`` them, while they wait for their next batch.

        What they had for themselves is noted then, and sent to the node's peers.

        A rank that dies after a step's last collective and before its end takes with it what it would have noted.
        """
        script = """
            asleep() { read -r call _ < /proc/$1/syscall && [[ $call == "$SLEEPING" ]]; }
            for try in $(seq 400); do
                waiting=0
                for pid in "$@"; do
                    asleep $pid && ! grep -qs '^State:.R' /proc/$pid/task/*/status && waiting=$((waiting + 1))
                done
                if [[ $waiting == $# ]]; then
                    kill -STOP "$@"; waiting=0
                    for pid in "$@"; do
                        until grep -q '^State:.T' /proc/$pid/status; do :; done
                        asleep $pid && waiting=$((waiting + 1))
                    done
                    [[ $waiting == $# ]] && exec kill -$SIGNAL "$@"
                    kill -CONT "$@"
                fi
                sleep 0.01
            done
            exit 1"""
        sleeping = {"x86_64": "230", "aarch64": "115"}[platform.machine()]  # clock_nanosleep, of time.sleep
        pids = self.pids(node)
        variables = [f"SLEEPING={sleeping}", f"SIGNAL={signal}"]
        command = ["env", *variables, "bash", "-c", script, "kill", *(pids[rank] for rank in ranks or pids)]
        self.lab.run_on_as_admin(node, command)

    def output(self, rank: int = 0) -> str:
        """All output of one rank, over all attempts."""
        paths = sorted(self.folder.attempts.glob(f"*/rank-{rank}.log"), key=lambda path: path.stat().st_mtime)
        return "".join(path.read_text() for path in paths)

    def digest(self) -> str:
        lines = [line for line in self.output().splitlines() if line.startswith("final weights sha256: ")]
        assert len(lines) == 1, f"{len(lines)} digests\n{self.story()}\n{self.output()}"
        return lines[0].split()[-1]

    def job_states(self) -> dict[str, str]:
        """State of each of the run's jobs in the accounting, newest row."""
        jobs = ",".join(self.folder.jobs())
        rows = self.lab.run(["sacct", "-X", "-P", "-n", "-o", "JobID,State", "-j", jobs]).stdout.split("\n")
        return dict(row.split("|", 1) for row in rows if row)

    def configure(self, **changes: Any) -> None:
        """Merge ``changes`` into the configuration."""
        path = self.config
        config = yaml.safe_load(path.read_text())
        for key, value in changes.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        path.write_text(yaml.safe_dump(config))


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    reason = Lab.availability(accounting=True)
    if reason is not None:
        pytest.skip(reason)
    folder = Path(f"/var/lib/slurmft-lab-runs-{os.getpid()}")
    try:
        yield Lab.up(
            LabSettings(folder=folder, nodes=4, accounting=True, kill_wait_s=5, grace_s=15, slurmd_timeout_s=8)
        )
    finally:
        cluster.purge(folder)


@pytest.fixture
def left_idle(lab: Lab) -> Iterator[None]:
    """Ends whatever a test has left in the queue: its processes must not be taken for those of the next test."""
    yield
    lab.run_as_admin(["scancel", "--user", lab.user], check=False)
    lab.wait_until_idle(PATIENCE_S)


@pytest.fixture
def new_run(lab: Lab, left_idle: None, request: pytest.FixtureRequest) -> Callable[..., Run]:
    """Makes runs of 2 nodes x 2 ranks."""

    def make(name: str = "", *, delay: float = 0.1, steps: int = STEPS, command: list[str] | None = None,
             **changes: Any) -> Run:  # fmt: skip
        name = name or request.node.name.replace("[", "-").replace("]", "")
        if getattr(request.node, "execution_count", 1) > 1:
            name += "-again"  # what the first try has left is not to be taken over
        path = lab.home / "runs" / name
        run = Run(lab, path)
        run.path.parent.mkdir(exist_ok=True)
        os.chown(run.path.parent, lab.uid, lab.gid)
        config = {
            "command": command or [*TRAINER, "--steps", str(steps), "--step-delay", str(delay)],
            "run_folder": str(run.path),
            "nodes": 2,
            "nproc_per_node": 2,
            "checkpoint": {"interval_steps": 25},
            "slurm": {"partition": "low", "time": "10"},
            # most tests are about what goes through the queue
            "fault_tolerance": {"num_in_job_restarts": 0},
            # a list of its own: a node that one test kills must not be kept from another
            "exclusions": {"path": str(path.with_suffix(".exclusions"))},
        }
        run.path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
        run.configure(**changes)
        return run

    return make


@pytest.fixture
def new_endpoint(lab: Lab, left_idle: None, request: pytest.FixtureRequest) -> Any:
    """Makes endpoints, see ``endpoints.py``."""
    from slurm.endpoints import maker

    return maker(lab, request)


@pytest.fixture(scope="session")
def undisturbed(lab: Lab) -> str:
    """The digest of the weights after the same training, left alone."""
    return calm_digest(lab, STEPS)


def calm_digest(lab: Lab, steps: int) -> str:
    """The digest of the weights after a training of so many steps that nothing disturbs."""
    path = lab.home / f"undisturbed-{steps}"
    run = Run(lab, path)
    config = {
        "command": [*TRAINER, "--steps", str(steps)],
        "run_folder": str(run.path),
        "nodes": 2,
        "nproc_per_node": 2,
        "checkpoint": {"interval_steps": 25},
    }
    run.path.with_suffix(".yaml").write_text(json.dumps(config))
    run.submit()
    run.wait_until_done()
    return run.digest()


def preempt(lab: Lab, seconds: int = 1) -> str:
    """Submit a job to ``high`` that takes every node for a moment; returns its id."""
    options = ["--parsable", "-p", "high", "-N", "4", "--exclusive", "-t", "1", "-o", "/dev/null"]
    return lab.run(["sbatch", *options, "--wrap", f"srun sleep {seconds}"], cwd=lab.home).stdout.strip()


WRAPPER = """#!/bin/bash
# {name}, which does what the file beside it says: fail, late, refuse, orphan, die, or nothing
read -r mode 2> /dev/null < {folder}/mode
echo "$mode {name} $*" >> {folder}/calls
case $mode:{name}:$1 in
fail:*) echo "{name}: error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
late:scontrol:requeue|late:sbatch:*) {real} "$@" > /dev/null
    echo "{name}: error: Socket timed out on send/recv operation" >&2; exit 1 ;;
orphan:scontrol:update) echo none > {folder}/mode; kill -KILL $PPID; exit 1 ;;
die:scontrol:update) pkill -KILL -f '[s]lurmft run '; exit 1 ;;
refuse:scontrol:requeue|refuse:scontrol:update) echo "Requested operation is presently disabled for job" >&2; exit 1 ;;
esac
exec {real} "$@"
"""


@pytest.fixture
def moody(lab: Lab) -> Iterator[Path]:
    """A folder of wrappers; the word in its file ``mode`` is how they behave."""
    folder = lab.home / "moody"
    folder.mkdir(exist_ok=True)
    for name in ("scontrol", "sbatch"):
        path = folder / name
        path.write_text(WRAPPER.format(name=name, folder=folder, real=f"/usr/bin/{name}"))
        path.chmod(0o755)
    (folder / "mode").write_text("none\n")
    (folder / "calls").write_text("")
    for path in (folder, *folder.iterdir()):
        os.chown(path, lab.uid, lab.gid)
    yield folder
    (folder / "mode").write_text("none\n")


def submit_with(run: Run, moody: Path) -> str:
    """Submit it with the wrappers first on its PATH; returns the job id."""
    path = run.lab.run(["printenv", "PATH"]).stdout.strip()
    argv = ["env", f"PATH={moody}:{path}", "slurmft", "submit", str(run.config)]
    return run.lab.run(argv).stdout.split(" as job ")[1].split()[0]
