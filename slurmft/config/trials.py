"""The section ``trials`` of the configuration: a sweep, of which each trial is a process of its own."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from slurmft.config.base import Count, Folder, ObjectName, Positive, Seconds, Section
from slurmft.config.inference import EngineConfig, InferenceConfig
from slurmft.policy import values as plain

MAX_TRIALS = 1_000_000
"""Of one sweep: each costs a folder, and 50 bytes of the supervisor's memory; 400 where ``next`` names it."""

MAX_JOBS = 1024

_FRACTION = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")


def _numbers_in(value: Any) -> Any:
    """A configuration's fractions are texts until the field that takes them is known."""
    match value:
        case str() if _FRACTION.fullmatch(value) and math.isfinite(number := float(value)):
            return number
        case dict():
            return {key: _numbers_in(each) for key, each in value.items()}
        case [*_]:
            return [_numbers_in(each) for each in value]
    return value


class TrialsConfig(Section):
    """What to try. Exactly one of ``list``, ``grid``, ``file`` and ``next``."""

    list: tuple[dict[str, Any], ...] | None = None
    """The parameters of each trial. ``custom_id`` among them is the trial's name; else they themselves are. A list in
    the place of the whole section is this one."""

    grid: dict[str, tuple[Any, ...]] | None = None
    """Values for each parameter; every combination is a trial, the last parameter changing first. What reads as a
    number is one, here and in ``list``; ``file`` tells texts from numbers."""

    file: Folder | None = None
    """JSON lines, each as an element of ``list``. A path in the place of the whole section is this one."""

    next: ObjectName | None = None
    """``package.module:name`` of a function that is asked for the next trial while the sweep runs, with the rows of
    those that have ended since the last call; it returns parameters, or a list of them, or None at the end."""

    callable: ObjectName | None = None
    """``package.module:name`` of a function to call with the parameters, in place of ``command``; what it returns is
    the result."""

    nodes: Annotated[Positive, AfterValidator(plain.at_most(64))] = 1
    """Nodes of one trial, all of one job. Each job of the sweep has so many, the run's own a multiple of it where
    ``nodes`` says so; with more than 1 ``per_node`` is 1."""

    nproc_per_node: Annotated[Positive, AfterValidator(plain.at_most(64))] = 1
    """Ranks of one trial on each of its nodes; several in all have the variables of torch: ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR`` and so on. Rank 0's result is the trial's."""

    per_node: Annotated[Positive, AfterValidator(plain.at_most(1024))] = 1
    """Trials at a time on each node."""

    gpus: Annotated[Count, AfterValidator(plain.at_most(64))] = Field(default=0, ge=0)
    """GPUs that each trial sees, on each of its nodes; 0: all of them."""

    max_jobs: Annotated[Positive, AfterValidator(plain.at_most(MAX_JOBS))] = 1
    """Most jobs at a time: the run's own, and more of ``nodes`` each, as long as there are trials for them."""

    retries: Count = Field(default=0, ge=0)
    """Further tries of a trial that fails by itself. What a lost node or a stop has cut off is no try."""

    timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Seconds that one try may take; none when empty."""

    log_bytes: Annotated[Count, Field(ge=4096)] = 16 << 20
    """Most of a trial's output that is kept, its end; ``log.txt`` in its folder."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        match value:
            case [*_]:
                return {"list": value}
            case str():
                return {"file": value}
        return value

    @field_validator("list", "grid", mode="before")
    @classmethod
    def _fractions_are_numbers(cls, value: Any) -> Any:
        return _numbers_in(value)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in ("list", "grid", "file", "next") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of list, grid, file and next; given: {', '.join(given) or 'none'}")
        if self.grid is not None and (count := math.prod(map(len, self.grid.values()))) > MAX_TRIALS:
            raise ValueError(f"grid: {count} trials are more than {MAX_TRIALS}; ask for them with next, or sample")
        if self.grid is not None and not all(self.grid.values()):
            raise ValueError("grid: each parameter needs a value")
        if self.nodes > 1 and self.per_node > 1:
            raise ValueError(f"per_node ({self.per_node}) must be 1 with nodes ({self.nodes}) above 1")
        return self

    def with_paths(self, absolute: Callable[[Path | None], Path | None]) -> Self:
        """The same section with every path passed through ``absolute``."""
        return self.model_copy(update={"file": absolute(self.file)})

    def as_inference(self, command: tuple[str, ...], run_folder: Path) -> InferenceConfig:
        """The batch that a sweep is: each trial a request, whose engine is a process of its own."""
        if self.callable is not None:
            command = (sys.executable, "-m", "slurmft.inference.trial_call", self.callable)
        engine = EngineConfig(process=command, continue_from_prefix="never", log_bytes=self.log_bytes,
                              nodes=self.nodes, nproc_per_node=self.nproc_per_node)  # fmt: skip
        timeout: dict[str, Any] = {} if self.timeout_s is None else {"request_timeout_s": self.timeout_s}
        return InferenceConfig(
            input=run_folder / "inference" / "requests.jsonl", engine=engine, replicas_per_node=self.per_node,
            gpus_per_replica=self.gpus, concurrency=1, max_retries=self.retries, part_requests=0, **timeout,
        )  # fmt: skip
