"""Shared by all tests: a test marked ``slurm`` runs on a real cluster, or says by name why it does not."""

from __future__ import annotations

import functools
import os

import pytest

from slurmft.lab.cluster import Lab


@functools.cache
def _why_no_lab() -> str | None:
    return Lab.availability(accounting=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slurm") is None or (reason := _why_no_lab()) is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"the Slurm lab is needed here: {reason}", pytrace=False)
    pytest.skip(f"no Slurm lab: {reason}")
