"""The random number generators of one rank, as plain values that ``torch.load(weights_only=True)`` accepts.

Covers Python's ``random``, numpy's global generator (when numpy is loaded), torch's CPU generator and the current GPU's
(when CUDA is in use). Generators that the trainer makes itself are its own to save.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

log = logging.getLogger(__name__)

RandomState = dict[str, Any]
"""The states of this process's generators, as ``capture`` returns them."""

_ARRAY = "ndarray"


def capture() -> RandomState:
    """The present states; draws nothing from any generator. ``restore`` brings back exactly these."""
    state: RandomState = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = plain(numpy.random.get_state(legacy=False))
    # Asking an unused CUDA for its state would create a context: memory on the GPU, and a process that must not fork.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put every generator back to the state of ``capture``; later draws are identical.

    A generator that does not exist here (no numpy, no GPU) is named in a warning and left out. Unknown keys are
    ignored.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: ``state`` did not come from ``capture``.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        _restore_numpy(state["numpy"])
    if "cuda" in state:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        else:
            log.warning("the saved GPU generator is not restored: this process has no GPU")


def has_drawn(since: Mapping[str, Any]) -> bool:
    """Whether a generator of ``since``, which ``capture`` has returned, is in another state now."""
    now = capture()
    return any(
        not torch.equal(state, now[name]) if isinstance(state, torch.Tensor) else state != now[name]
        for name, state in since.items()
    )


def _restore_numpy(state: Mapping[str, Any]) -> None:
    try:
        import numpy
    except ImportError:
        log.warning("the saved numpy generator is not restored: numpy is not installed here")
        return
    numpy.random.set_state(_original(state))


def plain(value: Any) -> Any:
    """Arrays and numpy scalars as Python values; a numpy array would need pickle's full power to load."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        items = value.tolist()
        return {_ARRAY: items, "dtype": str(value.dtype)} if isinstance(items, list) else items
    return value


def _original(value: Any) -> Any:
    if isinstance(value, Mapping):
        if _ARRAY in value:
            import numpy

            return numpy.array(value[_ARRAY], dtype=value["dtype"])
        return {key: _original(item) for key, item in value.items()}
    return value
