"""A lab of these tests' own, in its own folder: it never meets the one a developer has standing."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import until

from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings, lab_processes

SETTINGS = {"nodes": 3, "kill_wait_s": 2, "slurmd_timeout_s": 4, "grace_s": 3}


@pytest.fixture(scope="session")
def lab_possible() -> None:
    reason = Lab.availability(accounting=True)
    if reason is not None and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def shared_lab(lab_possible: None) -> Iterator[Lab]:
    """With accounting; every test leaves it idle."""
    folder = Path(f"/var/lib/slurmft-lab-test-{os.getpid()}")
    try:
        yield Lab.up(LabSettings(folder=folder, accounting=True, **SETTINGS))
    finally:
        cluster.purge(folder)


@pytest.fixture
def own_lab(shared_lab: Lab) -> Iterator[Lab]:
    yield shared_lab
    shared_lab.run_as_admin(["scancel", "--user", shared_lab.user], check=False)
    shared_lab.wait_until_idle(60)


@pytest.fixture
def folder(lab_possible: None) -> Iterator[Path]:
    """A fresh lab folder; whatever a test leaves there is taken down."""
    folder = Path(f"/var/lib/slurmft-lab-test-{os.getpid()}-{time.monotonic_ns()}")
    yield folder
    cluster.purge(folder)
    assert lab_processes(folder) == {}


@pytest.fixture
def eventually() -> Callable[..., None]:
    return until
