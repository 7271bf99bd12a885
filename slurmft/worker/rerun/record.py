"""The re-run state machine's record of a rejected result: within the process, and in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slurmft.errors import UsageError
from slurmft.policy.nodes.evidence import Suspect

MAX_VALUES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """One rank's rejected result."""

    rank: int
    invocation: int
    """Number of the validation within the iteration, from 0."""

    message: str
    values: tuple[float, ...]
    tolerance: float
    producers: tuple[int, ...]
    """Ranks that could have produced it."""

    suspects: tuple[Suspect, ...] = ()
    """Where they ran; known once all ranks have been asked."""

    def on(self, hardware: Sequence[Suspect]) -> Rejection:
        """With the suspects filled in; ``hardware`` is that of all ranks, in their order.

        Ranks that do not exist are left out. The rank that rejected it is suspected where no other one is: with no
        suspect, a rerun on the same hardware would count as one elsewhere.
        """
        known = [rank for rank in self.producers if 0 <= rank < len(hardware)] or [self.rank]
        return replace(self, suspects=tuple(hardware[rank] for rank in known))

    def plain(self) -> dict[str, Any]:
        """For the checkpoint."""
        suspects = [{"node": one.node, "gpu": one.gpu, "rank": one.rank} for one in self.suspects]
        return {
            "rank": self.rank, "invocation": self.invocation, "message": self.message, "values": list(self.values),
            "tolerance": self.tolerance, "producers": list(self.producers), "suspects": suspects,
        }  # fmt: skip

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Rejection:
        """As ``plain`` has written it.

        Raises:
            KeyError, TypeError, ValueError: it has not.
        """
        return cls(
            rank=int(value["rank"]), invocation=int(value["invocation"]), message=str(value["message"]),
            values=tuple(float(one) for one in value["values"]), tolerance=float(value["tolerance"]),
            producers=tuple(int(one) for one in value["producers"]),
            suspects=tuple(Suspect(node=one["node"], gpu=one["gpu"], rank=one["rank"]) for one in value["suspects"]),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """An iteration that waits for its rerun on other hardware; saved with the checkpoint, the same on all ranks."""

    iteration: int
    attempts: int
    """Placements asked for so far."""

    world_size: int
    rejections: tuple[Rejection, ...]

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """All of them, each once."""
        return suspects_of(self.rejections)

    def plain(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "iteration": self.iteration, "attempts": self.attempts, "world_size": self.world_size,
            "rejections": [one.plain() for one in self.rejections],
        }  # fmt: skip

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Pending:
        """As ``plain`` has written it; raises as ``Rejection.from_plain``."""
        return cls(
            iteration=int(value["iteration"]), attempts=int(value["attempts"]), world_size=int(value["world_size"]),
            rejections=tuple(Rejection.from_plain(one) for one in value["rejections"]),
        )  # fmt: skip


def suspects_of(rejections: Sequence[Rejection]) -> tuple[Suspect, ...]:
    """Each suspect once, in the order of ranks."""
    return tuple(dict.fromkeys(suspect for one in rejections for suspect in one.suspects))


def as_tensor(result: Any) -> torch.Tensor:
    """A result in one tensor: itself, or the numbers of (nested) lists and tuples, of tensors in them, of an array.

    Raises:
        UsageError: there is something in it that is not a number.
    """
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, list | tuple):
        parts = [as_tensor(one).detach().reshape(-1) for one in result]
        device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
        return torch.cat([torch.zeros(0, dtype=torch.double, device=device), *(part.to(device) for part in parts)])
    try:
        if isinstance(result, str | bytes):
            raise TypeError("a text")
        return torch.as_tensor(result, dtype=torch.double)  # a float beyond those of 32 bits is not infinite
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"a result to validate is {result!r:.60}", hint="it is a number, a tensor, or a list or tuple of them"
        ) from error


def values_of(result: torch.Tensor | float) -> tuple[float, ...]:
    """A result as plain numbers, a complex one as two; waits for the GPU where it lies on one.

    Raises:
        UsageError: it has too many values to keep.
    """
    if not isinstance(result, torch.Tensor):
        return (float(result),)
    if result.numel() > MAX_VALUES:
        raise UsageError(
            f"a result of {result.numel()} values is validated; at most {MAX_VALUES} can be compared",
            hint="validate its sum or its norm",
        )
    plain = torch.view_as_real(result.detach().resolve_conj()) if result.is_complex() else result.detach()
    return tuple(plain.double().cpu().reshape(-1).tolist())


def number_of(result: torch.Tensor | float) -> float:
    """A result of one value."""
    return float(result.item() if isinstance(result, torch.Tensor) else result)


def is_rejected(verdict: Any) -> bool:
    """The result of a rejection function: a bool, or a tensor, array or sequence of which any element is true."""
    if isinstance(verdict, list | tuple):
        return any(is_rejected(one) for one in verdict)
    if isinstance(verdict, torch.Tensor) and verdict.numel() == 1:
        return bool(verdict)
    return bool(verdict.any() if hasattr(verdict, "any") else verdict)
