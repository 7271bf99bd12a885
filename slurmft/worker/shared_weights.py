"""Weights that a program has made once, in a node's memory for all processes that come after it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slurmft.storage.shared_weights import kept, need_room

if TYPE_CHECKING:
    import torch

FILE = "weights.pt"


def shared_weights(
    source: str | Path, load: Callable[[], Mapping[str, torch.Tensor]], *, version: str = ""
) -> Mapping[str, torch.Tensor]:
    """What ``load`` returns, from this node's memory where a process of the run has put it there before.

    The tensors lie in one file that all processes of the node map: they cost no time, and memory once. Give them to a
    model on the device ``meta`` by ``load_state_dict(weights, assign=True)``. What a process writes into them is its
    own, and no other one's. They outlive the process and are removed when the run ends on the node.

    Args:
        source: where the weights come from; a file or a folder that has changed is loaded anew.
        load: returns tensors on the CPU, such as a model's ``state_dict()``. The first time, they are in memory twice
            until the copy is made.
        version: what else makes ``load`` return something else: a revision, a dtype, a quantization.

    Returns:
        As ``load`` has made them, where there is no room for them (with a warning), and where no agent of a run started
        this process.
    """
    import torch

    made: list[Mapping[str, torch.Tensor]] = []

    def save(folder: Path) -> None:
        made.append(load())
        need_room(sum(tensor.nbytes for tensor in made[0].values()), folder)
        try:
            torch.save(dict(made[0]), folder / FILE)
        except RuntimeError as error:  # torch's own, where the memory was taken meanwhile
            raise OSError(errno.ENOSPC, str(error)) from error

    folder = kept(source, f"tensors {version}", save)
    if folder is None:
        return made[0] if made else load()
    made.clear()
    weights: dict[str, torch.Tensor] = torch.load(folder / FILE, map_location="cpu", mmap=True, weights_only=True)
    return weights
