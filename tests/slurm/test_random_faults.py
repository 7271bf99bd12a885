"""Random faults at random moments, one upon the other, on a cluster with a spare: the weights know nothing of them.

Every choice comes from the seed in the test's name; what was done and when is printed, and is in the message of a test
that fails. ``SLURMFT_FAULT_SEEDS=7,8`` or ``=100-130`` runs those seeds instead of the few of ``make soak``;
``SLURMFT_FAULTS_OUTPUT=FILE`` appends one line of JSON per run that ended. ``make soak-faults`` goes on where it ended.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slurm.cluster_faults import CLUSTER_KINDS, cut_off, kill_one, kill_supervisor
from slurm.conftest import Run, calm_digest
from slurm.small_disk import SmallDisk, mounted_disk
from slurm.storm import Kind, Storm, errors_in_logs, seeds
from slurmft.checkpoint.catalog import Catalog, Entry, decide
from slurmft.errors import StorageError
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(1800)]

MAX_FAULTS = 60
KEPT = 3
SETUP_S, STEP_S = 45.0, 10.0
"""Limits after which a rank counts as hung."""

STORM_STEPS = 150

SIGNALS = ("KILL", "SEGV", "ABRT")

MATRIX: Mapping[str, tuple[Any, ...]] = {
    "spare_nodes": (0, 1, 1),
    "spares": ("import", "rehearse"),
    "launcher": ("agent", "agent", "torchrun"),
    "checkpoint.interval": ("steps", "seconds", "auto"),
    "checkpoint.async_save": (True, True, False),
    "checkpoint.just_in_time": (True, False),
    "checkpoint.peer_copies": (0, 1, 1),
    "checkpoint.peer_interval": (0, 1, 3),
    "digests.interval_steps": (0, 5),
    "fault_tolerance.preload": (True, False),
    "fault_tolerance.calc_ft_timeouts": (False, True),
}
"""Settings of which each run draws one value each, by its seed; a value that stands twice is as likely again."""


def drawn(seed: int) -> dict[str, Any]:
    """The settings of a run, by their dotted names."""
    chance = random.Random(f"settings of {seed}")
    settings = {name: chance.choice(values) for name, values in MATRIX.items()}
    if settings["checkpoint.interval"] == "seconds":
        settings["checkpoint.interval_seconds"] = 2.0
    if settings["launcher"] != "agent" or settings["spare_nodes"] == 0:
        settings["spares"] = "import"  # no spare to rehearse, or a trainer that the agent does not start
    return settings


def lost(before: Mapping[Path, Entry], there: Mapping[Path, Entry]) -> list[str]:
    """What is gone of the committed checkpoints although retention, given those that are there now, keeps it."""
    newest_first = sorted({**before, **there}.values(), key=lambda one: (one.commit, one.generation), reverse=True)
    removable = {entry.path for entry in decide(newest_first, keep_last_n=KEPT).remove}
    gone = before.keys() - there.keys() - removable
    return [f"{path.name} is gone, of {sorted(one.name for one in there)}" for path in sorted(gone)]


class TrainingStorm(Storm):
    name = "training"

    def __init__(self, run: Run, seed: int, disk: SmallDisk) -> None:
        super().__init__(run, seed, disk)
        self._seen: dict[Path, Entry] = {}
        """Committed checkpoints."""
        self.flipped: set[Path] = set()
        self.lost: list[str] = []

    def hosts(self) -> list[str]:
        ready = self.last("agents ready")
        return [] if ready is None else ready.details["hosts"]

    def more_failures(self) -> list[str]:
        """For more that must hold at the end."""
        return []

    def at_new_step(self) -> None:
        """No committed checkpoint is gone that retention would not have removed."""
        try:
            there = {entry.path: entry for entry in Catalog(self.run.path / "checkpoints").committed()}
        except (StorageError, OSError):
            return
        self.lost += lost(self._seen, there)
        self._seen = there

    def flip_a_bit(self, *, newest: bool = False) -> str | None:
        """In a committed checkpoint, where an intact one is left to go back to."""
        good = [path for path in self._seen if path not in self.flipped and path.exists()]
        if len(good) < 2:
            return None
        good.sort(key=lambda path: self._seen[path].commit)
        images = sorted(image for path in (good[-1:] if newest else good) for image in path.glob("*.distcp"))
        image = self.chance.choice(images)
        place, bit = self.chance.randrange(image.stat().st_size), self.chance.randrange(8)
        with image.open("r+b") as stream:
            stream.seek(place)
            [byte] = stream.read(1)
            stream.seek(place)
            stream.write(bytes([byte ^ 1 << bit]))
        self.flipped.add(image.parent)
        return f"bit {bit} of byte {place} of {image.parent.name}/{image.name}"

    def flip_and_end(self) -> str | None:
        """Without a supervisor nothing is saved at the end, so the next start reads the newest checkpoint."""
        if (flipped := self.flip_a_bit(newest=True)) is None:
            return None
        return f"{flipped}; guardian and supervisor {kill_supervisor(self, also_guardian=True)}"

    def signal_ranks(self, *, whole_node: bool = False, first: bool = False, signal: str = "") -> str | None:
        if not (hosts := self.hosts()):
            return None
        host = hosts[0] if first else self.chance.choice(hosts)
        rank = 0 if first else self.chance.randrange(2)
        return self._signal(signal or self.chance.choice(SIGNALS), host, None if whole_node else rank)

    def signal_all_ranks(self) -> str | None:
        signal = self.chance.choice(SIGNALS)
        return "; ".join(said for host in self.hosts() if (said := self._signal(signal, host, None))) or None

    def _signal(self, signal: str, host: str, only: int | None) -> str | None:
        """``only``: the first or second rank of the node."""
        pids = sorted(self.run.pids(host).items())
        chosen = pids if only is None else pids[only : only + 1]
        if not chosen:
            return None
        argv = ["kill", f"-{signal}", *(pid for _, pid in chosen)]
        sent = self.lab.run_on_as_admin(host, argv, check=False)
        return f"{signal} to {[rank for rank, _ in chosen]} on {host}" if sent.returncode == 0 else None

    def kill_helper(self, module: str) -> str | None:
        hosts = self.hosts()
        return kill_one(self, self.chance.choice(hosts), f"[s]lurmft.checkpoint.{module}") if hosts else None

    def silence(self) -> str | None:
        """A node's packets are dropped for longer than agents are waited for; all of its processes live on."""
        others = [host for host in self.hosts() if host != self.batch_host()]
        return cut_off(self, self.chance.choice(others), self.chance.uniform(13.0, 30.0)) if others else None

    kinds: ClassVar = {
        "one rank": Kind(24, lambda storm: storm.signal_ranks()),
        "rank 0": Kind(10, lambda storm: storm.signal_ranks(first=True)),
        "all ranks of a node": Kind(10, lambda storm: storm.signal_ranks(whole_node=True)),
        "all ranks of rank 0's node": Kind(10, lambda storm: storm.signal_ranks(whole_node=True, first=True)),
        "all ranks": Kind(10, signal_all_ranks),
        "one rank stopped": Kind(6, lambda storm: storm.signal_ranks(signal="STOP"), SETUP_S + 5),
        "all ranks of a node stopped": Kind(
            4, lambda storm: storm.signal_ranks(whole_node=True, signal="STOP"), SETUP_S + 5
        ),
        "silent node": Kind(8, silence, 40, clear=True, undone="heard again after 13 to 30 s"),
        "writer": Kind(12, lambda storm: storm.kill_helper("writer")),
        "keeper": Kind(12, lambda storm: storm.kill_helper("replicas.keeper")),
        "bit flip in a checkpoint": Kind(10, flip_a_bit),
        "bit flip in the newest checkpoint, then guardian and supervisor": Kind(3, flip_and_end, 20, ends=True),
        **CLUSTER_KINDS,
    }  # fmt: skip


@pytest.fixture
def disk(lab: Lab, tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted_disk(lab, tmp_path / "disk.img", 128) as small:
        yield small


@pytest.fixture(scope="session")
def calm(lab: Lab) -> str:
    """The digest of the weights after the same training, left alone."""
    return calm_digest(lab, STORM_STEPS)


def weather(
    kind: type[TrainingStorm], new_run: Callable[..., Run], calm: str, disk: SmallDisk, seed: int,
    settings: Mapping[str, Any],
) -> None:  # fmt: skip
    """One run in one storm, to its end.

    Args:
        settings: more of the configuration, by dotted names.
    """
    config: dict[str, Any] = {
        "spare_nodes": 1,
        "checkpoint": {"interval_steps": 5, "peer_copies": 1, "keep_last_n": KEPT},
        "digests": {},
        "fault_tolerance": {
            "num_in_job_restarts": 100, "num_job_retries_on_failure": 100, "max_no_progress_cycles": 100,
            "rank_section_timeouts": {"step": STEP_S, "checkpointing": 20, "setup": SETUP_S},
            "num_warmup_iterations": 1,
            "initial_rank_heartbeat_timeout": SETUP_S, "max_retry_delay_s": 1, "retry_delay_s": 0,
            "supervisor_lease_s": 8,
        },
        # what chance puts on one node is no evidence against it
        "exclusions": {"threshold": 1000, "probation": 999},
    }  # fmt: skip
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        (config[section] if section else config)[key] = value
    written = new_run(f"faults-{seed}", delay=0.3, steps=STORM_STEPS, run_folder=str(disk.path / "run"), **config)
    run = Run(written.lab, disk.path / "run", written_at=written.config)
    storm = kind(run, seed, disk)
    run.submit()
    with storm.ending() as failures:
        begin = 1
        while not storm.is_over():
            storm.look()
            ready = storm.is_settled() and storm.step() >= begin and storm.last("first step") is not None
            if not ready or len(storm.done) >= MAX_FAULTS:
                continue
            storm.strike()
            while storm.chance.random() < 0.2:
                storm.wait(storm.chance.uniform(0.0, 1.5))  # into the recovery from it, wherever that is
                storm.strike()
            begin = storm.step() + storm.chance.choice([0, 0, 0, 1, 2])
    # twice where a fault came after it was printed
    digests = {line.split()[-1] for line in run.output().splitlines() if line.startswith("final weights sha256: ")}
    failures += storm.more_failures()
    if not failures:
        blamed = [event for event in run.events("verdict") if event.details["cause"] == "worker error"]
        failures += [f"blames the trainer: {event.attempt}: {event.details}" for event in blamed]
        failures += [f"an error of ours: {error}" for error in errors_in_logs(run)]
        failures += [f"a committed checkpoint is lost: {name}" for name in storm.lost]
        failures += storm.unexplained_waits()
        failures += [] if digests == {calm} else [f"other weights: {digests}"]
    storm.record(
        failures,
        settings=dict(settings),
        same_weights=digests == {calm},
        damaged=run.output().count("wrong checksum"),
    )
    assert failures == [], storm.story()


@pytest.mark.parametrize("seed", seeds())
def test_random_faults(new_run: Callable[..., Run], calm: str, disk: SmallDisk, seed: int) -> None:
    weather(TrainingStorm, new_run, calm, disk, seed, drawn(seed))
