"""The content of a checkpoint: the trainer's objects on one side, plain payloads on the other."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from slurmft.checkpoint.format.plain_state import as_json, as_plain, original
from slurmft.errors import CheckpointError, UsageError
from slurmft.trainer import rng, stateful_loader
from slurmft.trainer.savers import SAVERS

log = logging.getLogger(__name__)


LOADER, SCHEDULER, SCALER = "loader", "scheduler", "scaler"


UNSUPPORTED = {
    "FullyShardedDataParallel": "use torch.distributed.fsdp.fully_shard (FSDP2), or DistributedDataParallel",
    "ZeroRedundancyOptimizer": "use torch.distributed.fsdp.fully_shard (FSDP2), whose optimizer is sharded with it",
}
"""Classes with state that differs from rank to rank under names that no other rank knows."""


class Stateful(Protocol):
    """Schedulers, gradient scalers, loaders: objects whose state can be saved and restored.

    A loader may also have ``shared_position(state_dict)``: the part of such a state that is the same on every rank, or
    None. A run with another number of ranks goes on from that; without it, each rank's position is its own, and only
    the same number of ranks can resume.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Trainee:
    """The objects of one training script that a checkpoint covers."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    loader: Stateful | None = None

    def __post_init__(self) -> None:
        """Raises UsageError where some of it has no state that could be saved, or none that other ranks could use."""
        stateful_loader.mend()
        for kind in (*map(type, self.model.modules()), type(self.optimizer)):
            if hint := UNSUPPORTED.get(kind.__name__):
                raise UsageError(f"state within {kind.__name__} cannot be saved here", hint=hint)
        for name, part in self.parts.items():
            if part is not None and not all(hasattr(part, one) for one in ("state_dict", "load_state_dict")):
                raise UsageError(
                    f"{name}= is a {type(part).__name__}, which has no state_dict() and load_state_dict()",
                    hint="pass torchdata's StatefulDataLoader, or an ElasticLoader around this one"
                    if name == LOADER
                    else f"leave {name}= out, or pass an object that has both",
                )

    @property
    def parts(self) -> dict[str, Stateful | None]:
        """All objects beside model and optimizer, by the name that their state is stored under."""
        return {**self.shared_parts(), LOADER: self.loader}

    def rank_payload(self) -> dict[str, Any]:
        """Each rank's own state."""
        payload: dict[str, Any] = {"rng": rng.capture()}
        if self.loader is not None:
            payload[LOADER] = as_plain(self.loader_state())
        return payload

    def loader_state(self) -> Any:
        """Where the loader is. Until the first step after a load that is what was loaded, and empty at step 0: some
        loaders that are asked make their iterator, in the order of an epoch that the script has not set yet.
        """
        if self.loader is None:
            return None
        if SAVERS.first_step is not None:
            if (loaded := SAVERS.loaded) is None or loaded.loader is not self.loader:
                if SAVERS.first_step == 0:
                    return {}
            elif loaded.state is not None and loaded.step == SAVERS.first_step:
                return original(copy.deepcopy(loaded.state))
        return self.loader.state_dict()

    def restore_rng(self, own: Mapping[str, Any]) -> None:
        """Put the random number generators back to where ``rank_payload`` saw them."""
        rng.restore(own["rng"])

    def shared_parts(self) -> dict[str, Stateful | None]:
        """Parts that are equal on every rank beside model and optimizer, by the name that they are stored under."""
        return {SCHEDULER: self.scheduler, SCALER: self.scaler}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed differences between a checkpoint and the objects that it is loaded into."""

    missing: frozenset[str] = frozenset()
    """Names of ``Trainee.parts`` that may start anew where the checkpoint has no state for them."""

    cast: bool = False
    """Weights may be of another dtype than the model's."""

    @classmethod
    def of(cls, allow_missing: Collection[str], *, allow_cast: bool) -> Tolerance:
        """Raises UsageError where ``allow_missing`` names something else than a scheduler, scaler or loader."""
        given = {allow_missing} if isinstance(allow_missing, str) else {*allow_missing}
        if unknown := sorted(given - {LOADER, SCHEDULER, SCALER}):
            raise UsageError(
                f"allow_missing names {', '.join(map(repr, unknown))}",
                hint=f"it takes {LOADER!r}, {SCHEDULER!r} and {SCALER!r}",
            )
        return cls(frozenset(given), cast=allow_cast)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside DDP and ``torch.compile``, whose wrappers rename every weight."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def position_number(loader: Stateful | None, own: Mapping[str, Any]) -> int:
    """63 bits of the position in ``own`` that every rank must have alike; 0 where each has one of its own."""
    position = shared_position(loader, own)
    if position is None:
        return 0
    text = json.dumps(as_json(position), sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 or 1


def shared_position(loader: Stateful | None, own: Mapping[str, Any]) -> Any:
    """The part of the loader's state in ``own`` that is the same on every rank; None where there is none."""
    if own.get(LOADER) == {}:  # saved before the first batch
        return {}
    of = getattr(loader, "shared_position", None)
    return of(original(own[LOADER])) if of is not None and LOADER in own else None


def load_part(name: str, part: Stateful | None, payload: Mapping[str, Any]) -> None:
    """Give ``part`` the state that was stored for it; a state or part without a counterpart is logged.

    Raises:
        CheckpointError: it cannot take that state.
    """
    if part is not None and name in payload:
        if name == LOADER and payload[name] == {}:  # saved before the first batch: it is as it was made
            return
        try:
            part.load_state_dict(original(copy.deepcopy(payload[name])))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the {name} cannot take up the state that the checkpoint has for it: {error!r}",
                hint=f"pass a {name} of the kind that was saved; with a re-run machine, that is the machine",
            ) from error
    elif part is not None:
        log.warning("the checkpoint holds no %s state: the %s starts anew, as allow_missing says", name, name)
    elif name in payload:
        log.warning("the checkpoint holds %s state, and no %s was passed to load it into", name, name)
