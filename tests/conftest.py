"""Shared by all tests: a test marked ``slurm`` runs on a real cluster, or says by name why it does not."""

from __future__ import annotations

import functools
import os

import pytest
from hypothesis import HealthCheck, settings

from slurmft.lab.cluster import Lab

# A machine that is busy makes slow examples; in CI, hypothesis's own profile for it says so as well.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if not os.environ.get("CI"):
    settings.load_profile("busy")


@functools.cache
def _why_no_lab() -> str | None:
    return Lab.availability(accounting=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slurm") is None or (reason := _why_no_lab()) is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"the Slurm lab is needed here: {reason}", pytrace=False)
    pytest.skip(f"no Slurm lab: {reason}")
