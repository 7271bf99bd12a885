"""Random faults at random moments while a batch is answered: every request is answered exactly once.

As test_random_faults.py: the seed decides; ``SLURMFT_FAULT_SEEDS`` chooses seeds, ``SLURMFT_FAULTS_OUTPUT`` takes a
line of JSON for each run.
"""

import time
from collections.abc import Callable
from typing import ClassVar

import pytest

from slurm.cluster_faults import CLUSTER_KINDS, ReplicasStorm
from slurm.small_disk import SmallDisk
from slurm.storm import Kind, errors_in_logs, seeds
from slurm.test_inference import BatchRun, new_batch  # noqa: F401 - a fixture
from slurm.test_random_faults import disk  # noqa: F401 - a fixture
from slurmft.inference.ledger import segments_of
from slurmft.inference.requests import folder_of

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(1800)]

MAX_FAULTS = 60
REQUESTS = 3000


class InferenceStorm(ReplicasStorm):
    name = "inference"
    run: BatchRun

    engine = "^[^ ]*python[^ ]* [^ ]*/engine.py"

    def tear(self) -> str | None:
        """What a full disk or a power cut leaves: half a line at the end, of segments that are not written to now."""
        segments = sorted(segments_of(folder_of(self.run.path)).glob("*.jsonl"))
        old = [path for path in segments if time.time() - path.stat().st_mtime > 5]
        if not old or "full disk" in self.held:
            return None
        chosen = self.chance.choice(old)
        with chosen.open("ab") as stream:
            stream.write(b'deadbeef {"index": 1, "resp')
        return chosen.name

    kinds: ClassVar = {
        "engine": Kind(16, lambda storm: storm.signal_engine("KILL")),
        "driver": Kind(14, lambda storm: storm.signal_driver("KILL")),
        "engine stopped": Kind(8, lambda storm: storm.signal_engine("STOP")),
        "driver stopped": Kind(8, lambda storm: storm.signal_driver("STOP")),
        "torn segment": Kind(6, tear),
        **CLUSTER_KINDS,
    }  # fmt: skip


@pytest.mark.parametrize("seed", seeds())
def test_random_inference_faults(
    new_batch: Callable[..., BatchRun],  # noqa: F811
    disk: SmallDisk,  # noqa: F811
    seed: int,
) -> None:
    run = new_batch(
        REQUESTS, pause=0.5, nodes=3, inference={"hang_timeout_s": 2, "max_restarts": 50, "concurrency": 4},
        run_folder=str(disk.path / "run"), exclusions={"threshold": 1000, "probation": 999},
        fault_tolerance={"num_in_job_restarts": 100, "num_job_retries_on_failure": 100, "max_no_progress_cycles": 100,
                         "retry_delay_s": 0, "max_retry_delay_s": 1, "agent_timeout_s": 3, "supervisor_lease_s": 6},
    )  # fmt: skip
    run.path = disk.path / "run"
    storm = InferenceStorm(run, seed, disk)
    run.submit()
    with storm.ending() as failures:
        while not storm.is_over():
            storm.wait(storm.chance.uniform(0.1, 1.2))
            # mostly at a run that works; sometimes into the recovery from the last fault
            if len(storm.done) < MAX_FAULTS and (storm.is_settled() or storm.chance.random() < 0.1):
                storm.strike()
    if not failures:
        failures += [f"an error of ours: {error}" for error in errors_in_logs(run)]
        failures += storm.unexplained_waits()
        try:
            run.assert_exactly_once()
        except AssertionError as error:
            failures.append(f"not exactly once: {str(error)[:2000]}")
    storm.record(failures, repeated=run.repeated(), requests=REQUESTS, deaths=len(run.events("replica died")),
                 nodes_lost=len(run.events("agent lost")))  # fmt: skip
    assert failures == [], storm.story()
