"""How a global batch is spread over ranks, and each rank's share over micro-batches. Pure arithmetic, and exact.

The policy of elastic runs is to keep the global batch: the number of samples behind one optimizer step does not depend
on the world size, so neither does the learning rate. Ranks may then have unequal shares, and a mean of means would be
wrong; gradients are weighted by the number of samples instead (``BatchSplit.loss_scale``).
"""

from __future__ import annotations

from dataclasses import dataclass

from slurmft.errors import UsageError


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
