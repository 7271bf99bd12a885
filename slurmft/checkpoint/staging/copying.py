"""The copy of the trainer's tensors into shared memory, which the training waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from slurmft.checkpoint.staging.pinning import in_pieces
from slurmft.trainer import streams
from slurmft.trainer.streams import Device


def copy_into(
    views: list[torch.Tensor], sources: list[torch.Tensor], base: int = 0, *, within_s: float | None = None
) -> Device | None:
    """Copy each source into its view; from a GPU beside all that it does, waiting for nothing else.

    The caller knows that the sources are what they are to be: it has waited for all that the host has asked the device
    for (``streams.settle``), or has seen the events behind what has written them. Returns the device, or the first one.

    Args:
        base: address of the memory that the views lie in.
        within_s: the longest time to wait for a device.

    Raises:
        TimeoutError: the device did not do it in time.
    """
    with torch.no_grad():
        devices = streams.devices(sources)
        if not devices:
            if views:
                torch._foreach_copy_(views, sources)
            return None
        pairs = list(zip(views, sources, strict=True))
        for view, source in pairs:
            if not streams.is_on_device(source):
                view.copy_(source)
        for device in devices:
            streams.copy_from_device(device, _pieces_of(device, pairs, base), within_s)
        return devices[0]


def _pieces_of(
    device: Device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], base: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of what is on ``device``, made one by one: a source whose values do not follow each other in memory is
    put in order by a kernel, which has to be on the stream of the copies."""
    for view, source in pairs:
        if streams.device_of(source) is device:
            yield from in_pieces(view, source, base)
