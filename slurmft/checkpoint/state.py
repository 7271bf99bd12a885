"""What goes into a checkpoint and comes out of it: the trainer's objects on one side, plain payloads on the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from slurmft.checkpoint.plain_state import as_plain, original
from slurmft.errors import CheckpointError
from slurmft.training import rng

log = logging.getLogger(__name__)


class Stateful(Protocol):
    """Schedulers, gradient scalers, loaders: whatever can say where it is and go back there."""

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

    def rank_payload(self) -> dict[str, Any]:
        """What each rank has for itself."""
        payload: dict[str, Any] = {"rng": rng.capture()}
        if self.loader is not None:
            payload["loader"] = as_plain(self.loader.state_dict())
        return payload

    def restore_rng(self, own: Mapping[str, Any]) -> None:
        """Put the random number generators back to where ``rank_payload`` saw them."""
        rng.restore(own["rng"])

    def shared_parts(self) -> dict[str, Stateful | None]:
        """What is equal on every rank beside model and optimizer, by the name that it is stored under."""
        return {"scheduler": self.scheduler, "scaler": self.scaler}


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside DDP and ``torch.compile``, whose wrappers rename every weight."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def load_part(name: str, part: Stateful | None, payload: Mapping[str, Any]) -> None:
    """Give ``part`` the state that was stored for it; what is on one side only is logged.

    Raises:
        CheckpointError: it cannot take that state.
    """
    if part is not None and name in payload:
        try:
            part.load_state_dict(original(payload[name]))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the {name} cannot take up the state that the checkpoint has for it: {error!r}",
                hint=f"pass a {name} of the kind that was saved; with a re-run machine, that is the machine",
            ) from error
    elif part is not None:
        log.warning("the checkpoint holds no %s state: the %s starts anew", name, name)
    elif name in payload:
        log.warning("the checkpoint holds %s state, and no %s was passed to load it into", name, name)
