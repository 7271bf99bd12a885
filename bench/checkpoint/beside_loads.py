"""What the machine can do at best, measured beside each load: its disk and its memory differ from minute to minute."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash
from floors import read_into, room
from state import State

RAW_READ, COPY, VERIFIED_COPY = "raw read", "copy", "map anew, hash, then copy"


class BesideLoads:
    """The same bytes, from the same file into the same tensors, which the load that follows fills again."""

    def __init__(self, state: State, image: Path) -> None:
        self._state, self._image = state, image
        self._kept = self._mapped()

    def floors(self, circumstance: str) -> dict[str, Callable[[], object]]:
        """By name; they return memory that is freed later."""
        places = self._new_places if "restart" in circumstance else self._places
        if "memory" not in circumstance:
            return {RAW_READ: lambda: read_into(places(), self._image)}
        found: dict[str, Callable[[], object]] = {COPY: lambda: self._copy(self._kept, places())}
        if "in place" in circumstance:
            found[VERIFIED_COPY] = lambda: self._verified_copy(places())
        return found

    def _places(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self._state.tensors()]

    def _new_places(self) -> list[torch.Tensor]:
        """As after a restart: what the optimizer has is new."""
        weights = [parameter.detach() for parameter in self._state.model.parameters()]
        step = torch.empty(())
        return [
            place
            for each in weights
            for place in (each, torch.empty_like(step), torch.empty_like(each), torch.empty_like(each))
        ]

    def _mapped(self) -> torch.Tensor:
        descriptor = os.open(self._image, os.O_RDONLY)
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        os.close(descriptor)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _views(self, whole: torch.Tensor, places: list[torch.Tensor]) -> list[torch.Tensor]:
        found, offset = [], 0
        for place in places:
            found.append(whole[offset : offset + place.nbytes].view(place.dtype).view(place.shape))
            offset += room(place)
        return found

    def _copy(self, whole: torch.Tensor, places: list[torch.Tensor]) -> list[torch.Tensor]:
        for place, view in zip(places, self._views(whole, places), strict=True):
            place.copy_(view)
        return places

    def _verified_copy(self, places: list[torch.Tensor]) -> None:
        """What a load from memory cannot do without: map it, look at every byte before any is used, and copy."""
        whole = self._mapped()
        queue = iter(self._views(whole, places))  # each thread takes the next one

        def hash_some() -> None:
            for view in queue:
                xxhash.xxh3_128().update(memoryview(view.reshape(-1).numpy()).cast("B"))

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(hash_some) for _ in range(2)]:
                done.result()
        self._copy(whole, places)
