"""DistributedDataParallel that sums gradients in the same order in every process start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmft.trainer import rng

Rehearsal = Callable[[nn.Module], torch.Tensor]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def settled_ddp(model: nn.Module, rehearsal: Rehearsal, **options: Any) -> DistributedDataParallel:
    """``model`` in DDP with its gradient buckets in their final order; ``options`` are DDP's own.

    DDP rearranges its buckets after the first backward pass of a process, and the order in which three or more ranks
    are summed depends on where in a bucket a gradient lies. Without a pass before step one, the first step after a
    resume would sum in another order than the uninterrupted run did, and the weights would part in their last bits.

    ``rehearsal(ddp_model)`` does one forward pass on any batch of the usual shape and returns the loss. Weights,
    buffers, gradients and random numbers are afterwards what they were before; call it before the optimizer exists or
    before its first step, on every rank.
    """
    wrapped = DistributedDataParallel(model, **options)
    randomness = rng.capture()
    buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
    rehearsal(wrapped).backward()  # type: ignore[no-untyped-call]
    wrapped.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    rng.restore(randomness)
    return wrapped


def settle_order_of_gradients(model: Any) -> None:
    """A backward pass of zeros, so that DDP has its gradients in their final order before the first step.

    As ``settled_ddp``, but without the user's own code: the order is that of the parameters, the same at every start.
    Models in which a rehearsal could not be one are left alone: with unused parameters or communication hooks, with
    hooks around their forward pass, and with such that use up gradients, as an optimizer in the backward pass does.
    """
    if not isinstance(model, DistributedDataParallel) or model.static_graph or model.find_unused_parameters:
        return
    if getattr(model, "_comm_hooks", None):  # it may keep a state
        return
    inner = model.module
    own = vars(inner).get("forward")
    parameters = [one for one in inner.parameters() if one.requires_grad]
    if any(getattr(inner, name, None) for name in _HOOKS) or any(one._post_accumulate_grad_hooks for one in parameters):
        return
    inner.forward = lambda: sum((one * 0).sum() for one in parameters)
    try:
        model().backward()
    finally:
        if own is None:
            del inner.forward
        else:
            inner.forward = own
    for one in parameters:
        one.grad = None
