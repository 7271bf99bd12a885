"""What goes into a checkpoint and comes out of it: the trainer's objects on one side, plain payloads on the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from slurmft.checkpoint.catalog import SHARED
from slurmft.checkpoint.payload import Damage, Damaged
from slurmft.checkpoint.plain_state import as_plain, original
from slurmft.errors import CheckpointError, UsageError
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

    def shared_payload(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """What is equal on every rank of a DDP run."""
        payload: dict[str, Any] = {
            "model": unwrapped(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "extra": as_plain(dict(extra or {})),
        }
        payload |= {
            name: as_plain(part.state_dict()) for name, part in self._shared_parts().items() if part is not None
        }
        return payload

    def rank_payload(self) -> dict[str, Any]:
        """What each rank has for itself."""
        payload: dict[str, Any] = {"rng": rng.capture()}
        if self.loader is not None:
            payload["loader"] = as_plain(self.loader.state_dict())
        return payload

    def check_fit(self, shared: Mapping[str, Any]) -> None:
        """Return when ``shared`` can be loaded into these objects; looks at names and shapes and changes nothing.

        Raises:
            Damaged: it cannot; loading would stop half way.
        """
        if problem := _model_misfit(unwrapped(self.model), shared.get("model")):
            raise Damaged(Damage.MISFIT, SHARED, problem)
        if problem := _optimizer_misfit(self.optimizer, shared.get("optimizer")):
            raise Damaged(Damage.MISFIT, SHARED, problem)

    def apply(self, shared: Mapping[str, Any], own: Mapping[str, Any], *, restore_rng: bool) -> None:
        """Load everything; the random number generators last, so that nothing draws from them in between."""
        _load_part("loader", self.loader, own)  # first: it refuses other data, and then the model is still whole
        unwrapped(self.model).load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        for name, part in self._shared_parts().items():
            _load_part(name, part, shared)
        if restore_rng:
            rng.restore(own["rng"])

    def _shared_parts(self) -> dict[str, Stateful | None]:
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


def refuse_sharded(model: torch.nn.Module) -> None:
    """Raises UsageError for a model whose weights are spread over ranks: rank 0 would save only its own part."""
    sharded = any(hasattr(weight, "device_mesh") for weight in model.parameters())
    if sharded or any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UsageError("CheckpointManager saves replicated (DDP) models; this one is sharded over ranks")


def _load_part(name: str, part: Stateful | None, payload: Mapping[str, Any]) -> None:
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


def _model_misfit(model: torch.nn.Module, saved: Any) -> str:
    if not isinstance(saved, dict):
        return "no model state"
    present = model.state_dict()
    if missing := sorted(present.keys() - saved.keys()):
        return f"it lacks {_some(missing)}"
    if unknown := sorted(saved.keys() - present.keys()):
        return f"this model has no {_some(unknown)}"
    for name, value in present.items():
        theirs = saved[name]
        if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
            continue
        if not isinstance(theirs, torch.Tensor) or value.shape != theirs.shape:
            return f"{name} is {_shape(theirs)} there and {_shape(value)} here"
    return ""


def _optimizer_misfit(optimizer: torch.optim.Optimizer, saved: Any) -> str:
    if not isinstance(saved, dict) or not isinstance(saved.get("param_groups"), list):
        return "no optimizer state"
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in saved["param_groups"]]
    return "" if here == there else f"parameters per optimizer group are {there} there and {here} here"


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
