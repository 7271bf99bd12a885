"""Everything of the configuration that workers need: one object, which the agent writes and workers read.

    environment[WORKER_VARIABLE] = settings.as_text()       # the agent
    settings = WorkerSettings.from_environment(os.environ)  # a worker, and each process that it starts

Folders, the attempt and the pages have variables of their own: scripts use them, too (docs/reference/run-folder.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from slurmft.errors import ConfigError
from slurmft.policy.checkpoints.checkpoint_settings import CheckpointSettings
from slurmft.policy.checkpoints.oom import divisor_in
from slurmft.policy.nodes.rerun_settings import RerunSettings

WORKER_VARIABLE = "SLURMFT_WORKER"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """The defaults are those of a trainer without an agent, such as one under plain torchrun."""

    backend: str = "auto"
    init_timeout_minutes: float = 30.0
    """Of process groups until the first step is done."""

    step_timeout_minutes: float = 10.0
    """Of process groups from then on."""

    batch_divisor: int = 1
    """Into so many pieces each micro-batch is cut, since an earlier start ran out of memory."""

    base_world_size: int = 0
    """Where each rank keeps its share (``elastic.batch: keep_micro_batch``): ranks of a whole global batch; else 0."""

    straggler_detection: bool = True
    straggler_profiling_interval: int = 1
    """Every so many steps are timed."""

    rehearsal: bool = False
    """A spare tries the script for two steps, in a world of its own; nothing is saved."""
    digest_interval_steps: int = 0
    """Steps between two digests of the state of each replica; 0: none."""

    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    rerun: RerunSettings = field(default_factory=RerunSettings)

    def as_text(self) -> str:
        """The variable's value: JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> WorkerSettings:
        """The settings from the agent; the defaults where there is no agent, and for keys that are missing.

        Raises:
            ConfigError: the variable was changed by hand and cannot be read.
        """
        text = environment.get(WORKER_VARIABLE, "")
        if not text:
            return cls()
        try:
            return cls._from_json(json.loads(text))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{WORKER_VARIABLE} does not hold a worker's settings as JSON: {error}",
                hint="leave it to slurmft submit, or unset it",
            ) from error

    @classmethod
    def _from_json(cls, given: Mapping[str, Any]) -> WorkerSettings:
        alone = cls()
        return cls(
            backend=str(given.get("backend", alone.backend)),
            init_timeout_minutes=_minutes(given.get("init_timeout_minutes", alone.init_timeout_minutes)),
            step_timeout_minutes=_minutes(given.get("step_timeout_minutes", alone.step_timeout_minutes)),
            batch_divisor=divisor_in([given.get("batch_divisor")]),
            base_world_size=max(0, int(given.get("base_world_size", alone.base_world_size))),
            straggler_detection=bool(given.get("straggler_detection", alone.straggler_detection)),
            straggler_profiling_interval=max(1, int(given.get("straggler_profiling_interval", 1))),
            rehearsal=given.get("rehearsal") is True,
            digest_interval_steps=max(0, int(given.get("digest_interval_steps", 0))),
            checkpoint=CheckpointSettings.from_json(given.get("checkpoint", {})),
            rerun=RerunSettings.from_json(given.get("rerun", {})),
        )


def _minutes(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{str(value)[:40]!r} minutes cannot be")
    return float(value)
