"""Process groups have the configured timeouts, read back from the groups, before and after the first step."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, torch.distributed as dist
from slurmft.worker.session import start_session
with start_session(seed=1) as session:
    early = session.new_group([0])
    facts = {"before": session._groups.timeouts()}
    for step in session.steps(start=0, until=2, save=lambda step: None):
        pass
    late = session.new_group([0])
    facts["after"] = session._groups.timeouts()
    facts["backend"] = dist.get_backend()
    print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts() -> dict:
    environment = os.environ | {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        "SLURMFT_INIT_TIMEOUT_MINUTES": "7", "SLURMFT_STEP_TIMEOUT_MINUTES": "0.5", "SLURMFT_BACKEND": "gloo",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_group_starts_with_the_long_timeout(facts):
    assert list(facts["before"].values()) == [420.0, 420.0]


def test_every_group_has_the_short_one_after_the_first_step(facts):
    assert list(facts["after"].values()) == [30.0, 30.0, 30.0], "later groups as well"


def test_the_backend_is_the_configured_one(facts):
    assert facts["backend"] == "gloo"
