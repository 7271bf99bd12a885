"""Everything of the configuration that workers need, as one object that the agent writes and workers read; and which
settings of checkpoints are among it.

    environment[WORKER_VARIABLE] = settings.as_text()       # the agent
    settings = WorkerSettings.from_environment(os.environ)  # a worker, and each process that it starts

Folders, the attempt and the pages have variables of their own: scripts use them, too (docs/reference/run-folder.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from slurmft.errors import ConfigError, UsageError
from slurmft.policy.reruns import RerunSettings
from slurmft.policy.verdict import Cause

# --- batches ---
# How a global batch is spread over ranks, and each rank's share over micro-batches. Pure arithmetic, and exact.
#
# The policy of elastic runs is to keep the global batch: the number of samples behind one optimizer step does not
# depend on the world size, so neither does the learning rate. Ranks may then have unequal shares, and a mean of means
# would be wrong; gradients are weighted by the number of samples instead (``BatchSplit.loss_scale``).


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSplit:
    """Each rank's share of one global batch."""

    samples: tuple[int, ...]
    """Samples of each rank; they differ by at most 1, and the lower ranks have more."""

    max_micro_batch: int

    @property
    def global_batch(self) -> int:
        """Samples of all ranks together."""
        return sum(self.samples)

    @property
    def accumulation(self) -> int:
        """Micro-batches of the rank that has most; another one may have one fewer."""
        return -(-max(self.samples) // self.max_micro_batch)

    def span(self, rank: int) -> tuple[int, int]:
        """Where in the global batch the samples of ``rank`` begin and end."""
        first = sum(self.samples[:rank])
        return first, first + self.samples[rank]

    def micro_batches(self, rank: int) -> tuple[int, ...]:
        """Sizes of the micro-batches of ``rank``, none empty; as few as the limit allows, and they differ by at most 1.

        With DDP all but the last belong into ``no_sync()``: each rank synchronises once, however many it has.
        """
        samples = self.samples[rank]
        return even_parts(samples, -(-samples // self.max_micro_batch)) if samples else ()

    def loss_scale(self, micro_batch: int) -> float:
        """Factor for the mean loss of a micro-batch, before ``backward``.

        DDP divides the sum of all gradients by the world size. With this factor the result is the gradient of the mean
        loss over the global batch, also where shares are unequal.
        """
        return micro_batch * len(self.samples) / self.global_batch


def split_batch(global_batch: int, world_size: int, max_micro_batch: int) -> BatchSplit:
    """Spread ``global_batch`` samples over ``world_size`` ranks, at most ``max_micro_batch`` of them at a time.

    Raises:
        UsageError: a number is not positive, or there are more ranks than samples.
    """
    for name, value in (
        ("global_batch", global_batch),
        ("world_size", world_size),
        ("max_micro_batch", max_micro_batch),
    ):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} is {value!r}; it must be a positive number")
    if world_size > global_batch:
        raise UsageError(
            f"a global batch of {global_batch} samples leaves {world_size - global_batch} of {world_size} ranks idle",
            hint="make the global batch larger, or elastic.max_nodes smaller",
        )
    return BatchSplit(samples=even_parts(global_batch, world_size), max_micro_batch=max_micro_batch)


def even_parts(total: int, parts: int) -> tuple[int, ...]:
    """``total`` as a sum of ``parts`` numbers that differ by at most 1, the larger ones first."""
    size, larger = divmod(total, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


# --- After an attempt that ran out of memory: the same global batch, in smaller pieces ---

OUT_OF_MEMORY = frozenset({Cause.DEVICE_OUT_OF_MEMORY, Cause.HOST_OUT_OF_MEMORY})

MAX_DIVISOR = 2**30
"""More than any micro-batch has samples; larger numbers in a damaged journal are ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Smaller:
    """The next start computes each of its micro-batches in this many pieces."""

    divisor: int
    micro_batches: tuple[int, ...]
    """Samples of each, after that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Irreducible:
    """No smaller pieces are possible, or allowed."""

    reason: str


def pieces(micro_batch: int, at_least: int) -> int:
    """The smallest number of equal pieces, ``at_least`` so many, that ``micro_batch`` samples can be cut into.

    As many as there are samples where it has fewer. 12 samples: 1, 2, 4, 12 when it is doubled each time.
    """
    small = [number for number in range(1, math.isqrt(micro_batch) + 1) if micro_batch % number == 0]
    divisors = [*small, *(micro_batch // number for number in small)]
    return min((number for number in divisors if number >= at_least), default=micro_batch)


def smaller(asked: Collection[int], *, divisor: int, min_batch: int) -> Smaller | Irreducible:
    """At least twice as many pieces as ``divisor``, such that all that was ``asked`` for stays exact.

    Args:
        asked: the micro-batches that the trainer has asked for; not empty, all positive.
        divisor: the one in force.
        min_batch: samples below which no micro-batch may go.
    """
    largest = max(asked)
    cut = pieces(largest, divisor)
    now = [size // pieces(size, cut) for size in sorted(asked)]
    words = f"the micro-batch of {' and '.join(map(str, now))} sample{'s' * (now != [1])}"
    if cut == largest:
        return Irreducible(reason=f"{words} cannot be made smaller")
    wanted = pieces(largest, 2 * cut)
    after = [size // pieces(size, wanted) for size in sorted(asked)]
    if below := [size for size, before in zip(after, now, strict=True) if size < min_batch and size != before]:
        return Irreducible(reason=f"{words} could next be {below[0]}, below oom.min_batch={min_batch}")
    return Smaller(divisor=wanted, micro_batches=tuple(after))


def divisor_in(values: Iterable[object]) -> int:
    """The divisor in force after these, oldest first, as a journal has them; invalid values are skipped."""
    divisor = 1
    for value in values:
        if type(value) is int and 1 <= value <= MAX_DIVISOR:
            divisor = value
    return divisor


# --- The section ``checkpoint`` as a worker gets it, and the defaults where there is no agent ---

Spacing = Literal["steps", "seconds", "auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """Names, meaning and defaults are those of ``config.sections``; a test compares them."""

    interval: Spacing = "steps"
    interval_steps: int = 100
    interval_seconds: float = 0.0
    keep_last_n: int = 3
    keep_every: int = 0
    save_best: bool = True
    best_metric: str = "loss"
    best_mode: Literal["min", "max"] = "min"
    async_save: bool = True
    when_busy: Literal["skip", "wait"] = "skip"
    max_failed_saves: int = 3
    bandwidth: int | None = None
    """Bytes per second."""

    peer_copies: int = 0
    peer_interval: int = 0
    local_directory: str | None = None
    just_in_time: bool = True
    stall_timeout_s: float = 30.0
    mtbf_s: float | None = None
    """Seconds between two failures; None where no supervisor has said."""

    def changed(self, given: Mapping[str, Any]) -> CheckpointSettings:
        """These, with what is not None in ``given``."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


# --- Everything of the configuration that workers need: one object, which the agent writes and workers read ---

WORKER_VARIABLE = "SLURMFT_WORKER"

_POSITIVE = frozenset({"batch_divisor", "straggler_profiling_interval", "keep_last_n", "max_failed_saves", "bandwidth",
                       "init_timeout_minutes", "step_timeout_minutes"})  # fmt: skip
"""Numbers that are not 0."""


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

    def __post_init__(self) -> None:
        for name, value in (asdict(self) | asdict(self.checkpoint)).items():
            is_number, may_be_0 = type(value) in (int, float), name not in _POSITIVE
            if is_number and not (0 <= value < 1 << 62 and (value or may_be_0)):
                raise ValueError(f"{name} is {str(value)[:60]}, which cannot be")

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
        import msgspec  # as in ``files.read_as``

        try:
            given = json.loads(text)
            if isinstance(given, dict):
                given["batch_divisor"] = divisor_in([given.get("batch_divisor")])
            return msgspec.convert(given, cls)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{WORKER_VARIABLE} does not hold a worker's settings as JSON: {error}",
                hint="leave it to slurmft submit, or unset it",
            ) from error
