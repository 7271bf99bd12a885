"""The settings of a worker, as an agent writes them: what a test gives is added to what the environment has."""

import json
import os
from collections.abc import Mapping
from typing import Any

import pytest

from slurmft.policy.worker_settings import WORKER_VARIABLE


def worker_variable(before: Mapping[str, str] = os.environ, **settings: Any) -> dict[str, str]:
    """The variable, with these settings; those of the sections ``checkpoint`` and ``rerun`` are dicts."""
    values = json.loads(before.get(WORKER_VARIABLE) or "{}")
    for name, value in settings.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return {WORKER_VARIABLE: json.dumps(values)}


def set_settings(patch: pytest.MonkeyPatch, **settings: Any) -> None:
    """For this process and its children."""
    for name, text in worker_variable(**settings).items():
        patch.setenv(name, text)
