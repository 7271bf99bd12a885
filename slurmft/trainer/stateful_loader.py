"""torchdata's StatefulDataLoader, made to go on exactly where it was, in any epoch and with worker processes.

As it is, asking it for its state before the first batch makes its iterator, in the order of an epoch that the script
has not set yet; a resumed iterator draws a seed that an undisturbed one would not have drawn; and neither its own
generator nor those of its worker processes are part of its state. ``mend`` changes the class: scripts, frameworks and
wrappers that hold such loaders need no line of their own, and states that were saved without it load as before.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from slurmft.trainer import savers
from slurmft.trainer.savers import SAVERS

OURS = "slurmft"
"""The key of what is added to a loader's state, and in a worker to its data set's."""

_MODULE = "torchdata.stateful_dataloader.stateful_dataloader"
_WORKER_MODULE = "torchdata.stateful_dataloader.worker"

log = logging.getLogger(__name__)


def mend() -> None:
    """From now on, all such loaders of this process; nothing where torchdata is not in use."""
    kind: Any = getattr(sys.modules.get(_MODULE), "StatefulDataLoader", None)
    if kind is None or hasattr(kind, OURS):
        return
    worker = importlib.import_module(_WORKER_MODULE)
    needed = [(kind, "_get_iterator"), *((worker, name) for name in ("try_to_serialize", "try_to_deserialize"))]
    if unknown := [name for owner, name in needed if not hasattr(owner, name)]:
        log.warning(
            "this torchdata has no %s: StatefulDataLoader is left as it is, and may read a resumed epoch in "
            "another order",
            ", ".join(unknown),
        )
        setattr(kind, OURS, False)
        return
    make, ask = kind._get_iterator, kind.state_dict

    def get_iterator(self: Any) -> Any:
        given, init = self.worker_init_fn, _WorkerInit(self.worker_init_fn)
        self.worker_init_fn = init
        try:
            return _made(self, make)
        finally:
            self.worker_init_fn = given

    def state_dict(self: Any) -> dict[str, Any]:
        if self._iterator is None:
            return self.next_iter_state or {}  # it has not begun: it is where it was put, or at its beginning
        known = getattr(_epoch_sampler(self), "epoch", None)  # of an iterator that was made before this
        own = {"epoch": getattr(self._iterator, OURS, (known, 0))[0]}
        if self.generator is not None:
            own["generator"] = self.generator.get_state().numpy().tobytes().hex()
        return {**ask(self), OURS: own}

    kind._get_iterator, kind.state_dict = get_iterator, state_dict
    setattr(kind, OURS, True)


def _made(loader: Any, make: Callable[[Any], Any]) -> Any:
    """A new iterator, or the resumed one: in the order of the epoch that was saved, and without new draws."""
    state, sampler = loader.next_iter_state, _epoch_sampler(loader)
    own = (state or {}).get(OURS, {})
    _set_generator(loader, own)
    if sampler is not None and own.get("epoch") not in (None, sampler.epoch):
        if _is_used_up(loader, state):  # and the script has begun the next epoch
            loader.next_iter_state = state = None
        else:
            sampler.set_epoch(own["epoch"])
    before, loaded = savers.capture(), SAVERS.loaded
    is_undrawn = loaded is not None and not savers.has_drawn(loaded.random)
    iterator = make(loader)
    setattr(iterator, OURS, (None if sampler is None else sampler.epoch, iterator._num_yielded))
    if state is not None:
        savers.restore(before)
        _set_generator(loader, own)
    elif loaded is not None and is_undrawn:  # its own seed: a resumed one draws none
        SAVERS.loaded = replace(loaded, random=savers.capture())
    return iterator


def has_handed_out(loader: Any) -> bool:
    """Whether a batch was taken from it since it was made or loaded; False where that is not known of its kind."""
    iterator: Any = getattr(loader, "_iterator", None)
    _, first = getattr(iterator, OURS, (None, None))
    return bool(getattr(loader, "has_begun", first is not None and iterator._num_yielded > first))


def _epoch_sampler(loader: Any) -> Any:
    """What the order of the loader's samples depends on the epoch of, as torch's DistributedSampler; or None."""
    batches = loader.batch_sampler
    for one in (loader.sampler, batches, getattr(batches, "sampler", None)):
        if callable(getattr(one, "set_epoch", None)) and type(getattr(one, "epoch", None)) is int:
            return one
    return None


def _set_generator(loader: Any, own: Mapping[str, Any]) -> None:
    if loader.generator is not None and "generator" in own:
        loader.generator.set_state(_bytes(own["generator"]))


def _is_used_up(loader: Any, state: Mapping[str, Any]) -> bool:
    """Whether all batches of its epoch were handed out."""
    there = state.get("_snapshot")
    done = state["_num_yielded"] if there is None else there["_snapshot_step"] + state["_steps_since_snapshot"]
    try:
        return bool(done >= len(loader))
    except TypeError:  # a stream of unknown length
        return False


class _WorkerInit:
    """A loader's ``worker_init_fn``: what was drawn in a worker process becomes a part of its data set's state.

    A generator that nothing was drawn from costs nothing: the same seed begins it again.
    """

    def __init__(self, given: Callable[[int], Any] | None) -> None:
        self._given = given

    def __call__(self, worker_id: int) -> None:
        worker: Any = importlib.import_module(_WORKER_MODULE)
        if self._given is not None:
            self._given(worker_id)
        serialize, deserialize, fresh = worker.try_to_serialize, worker.try_to_deserialize, _draws()
        is_stream = isinstance(getattr(get_worker_info(), "dataset", None), IterableDataset)
        loaded: dict[str, Any] = {}

        def with_draws(one: Any) -> Any:
            if loaded:  # everything is in its place
                savers.restore({**savers.capture(), **loaded})
                loaded.clear()
            state = serialize(one)
            drawn = {name: value for name, value in _draws().items() if value != fresh.get(name)}
            if not drawn or (is_stream and state is None):  # such a stream is read from its beginning, and draws anew
                return state
            return {**(state or {}), OURS: drawn}

        def without_draws(one: Any, state: Any) -> Any:
            if isinstance(state, dict) and OURS in state:
                drawn = state[OURS]
                loaded.update(drawn, **({"torch": _bytes(drawn["torch"])} if "torch" in drawn else {}))
                state = {key: value for key, value in state.items() if key != OURS}
            return deserialize(one, state)

        worker.try_to_serialize, worker.try_to_deserialize = with_draws, without_draws


def _draws() -> dict[str, Any]:
    """The generators of this process but for a device's, in types that a worker can send."""
    state = savers.capture()
    state.pop("cuda", None)
    return {**state, "torch": state["torch"].numpy().tobytes().hex()}


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
