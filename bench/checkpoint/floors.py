"""What the machine can do: copies, writes, reads and digests of the same bytes in the same tensors."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import xxhash
from state import State

PIECE = 16 << 20
PAGE = 4096


def measure(state: State, folder: Path, memory: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by name."""
    tensors = [tensor for _, tensor in state.tensors()]
    found = copies(tensors, memory, rounds)
    with Shared(memory / "floor", sum(map(room, tensors))) as shared:
        found["hash"] = [timed(shared.hash) for _ in range(rounds)]
        path = folder / "floor"
        for name, flags in (("write, O_DIRECT", os.O_DIRECT), ("write, buffered", 0)):
            found[name] = [timed(lambda flags=flags: shared.write(path, flags)) for _ in range(rounds)]
        found["read, cold, O_DIRECT"] = [timed(lambda: shared.read(path)) for _ in range(rounds)]
    found |= reads(tensors, path, rounds)
    path.unlink()
    return found


def copies(tensors: list[torch.Tensor], memory: Path, rounds: int) -> dict[str, list[float]]:
    found = {}
    with Shared(memory / "floor", sum(map(room, tensors))) as shared:
        found["copy into warm shared memory"] = _copies(tensors, shared.views(tensors), rounds)
    warm = [torch.zeros_like(each) for each in tensors]
    found["copy into warm private memory"] = _copies(tensors, warm, rounds)
    found["copy, as after a restart"] = [timed(partial(_restarted, tensors, warm), give_back) for _ in range(rounds)]
    found["clone"] = [timed(lambda: [each.clone() for each in tensors], give_back) for _ in range(rounds)]
    return found


def _copies(tensors: list[torch.Tensor], into: list[torch.Tensor], rounds: int) -> list[float]:
    def copy() -> None:
        for source, target in zip(tensors, into, strict=True):
            target.copy_(source)

    copy()  # from here on the memory is warm
    return [timed(copy) for _ in range(rounds)]


def _restarted(tensors: list[torch.Tensor], warm: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        into.copy_(each) if _has_its_place(number) else each.clone()
        for number, (each, into) in enumerate(zip(tensors, warm, strict=True))
    ]


def _has_its_place(number: int) -> bool:
    """After a restart parameters have their memory, the three tensors that follow each of them, Adam's, have not."""
    return number % 4 == 0


def reads(tensors: list[torch.Tensor], path: Path, rounds: int) -> dict[str, list[float]]:
    """Into memory that is there; into memory that is new; and as after a restart: the optimizer's part is new."""
    warm = [torch.zeros_like(each) for each in tensors]
    places: dict[str, Callable[[], list[torch.Tensor]]] = {
        "into warm memory": lambda: warm,
        "into fresh memory": lambda: [torch.empty_like(each) for each in tensors],
        "as after a restart": lambda: [
            each if _has_its_place(number) else torch.empty_like(each) for number, each in enumerate(warm)
        ],
    }
    found = {}
    for place, make in places.items():
        for kept in (False, True):
            seconds = []
            for _ in range(rounds):
                if not kept:
                    forget_pages(path)
                seconds.append(timed(lambda make=make: read_into(make(), path), give_back))
            found[f"read, {'cached' if kept else 'cold'}, {place}"] = seconds
    return found


def read_into(tensors: list[torch.Tensor], path: Path) -> None:
    with path.open("rb", buffering=0) as stream:
        for tensor in tensors:
            view = memoryview(tensor.reshape(-1).numpy()).cast("B")
            done = 0
            while done < len(view):
                done += stream.readinto(view[done : done + PIECE])


def timed(work: Callable[[], object], after: Callable[[], object] | None = None) -> float:
    """Seconds; what ``work`` returns is freed afterwards, and ``after`` not timed either."""
    began = time.monotonic()
    result = work()
    seconds = time.monotonic() - began
    del result
    if after:
        after()
    return seconds


def give_back() -> None:
    """Freed memory goes back to the system, so that the next allocation is fresh."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def forget_pages(path: Path) -> None:
    """Of a file or of all files below a folder: what is in the page cache."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64


class Shared:
    """Shared memory of so many bytes, warm; or that of another process, which has made it."""

    def __init__(self, path: Path, size: int, *, is_new: bool = True) -> None:
        self.path, self.size, self.is_new = path, -(-size // PAGE) * PAGE, is_new

    def __enter__(self) -> Shared:
        descriptor = os.open(self.path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if self.is_new else 0), 0o600)
        if self.is_new:
            os.ftruncate(descriptor, self.size)
        self.memory = mmap.mmap(descriptor, self.size)
        os.close(descriptor)
        self.all = torch.frombuffer(self.memory, dtype=torch.uint8)
        if self.is_new:
            self.all.fill_(1)
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_new:
            self.path.unlink()
        del self.all
        gc.collect()
        self.memory.close()

    def views(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        offset, found = 0, []
        for tensor in tensors:
            found.append(self.all[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            offset += room(tensor)
        return found

    def pieces(self) -> Iterator[memoryview]:
        view = memoryview(self.memory)
        for start in range(0, self.size, PIECE):
            yield view[start : start + PIECE]

    def hash(self) -> str:
        digest = xxhash.xxh3_128()
        for piece in self.pieces():
            digest.update(piece)
        return digest.hexdigest()

    def write(self, path: Path, flags: int) -> None:
        """A new file each time, durable on return."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
        for piece in self.pieces():
            assert os.write(descriptor, piece) == len(piece)
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self, path: Path) -> None:
        forget_pages(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for piece in self.pieces():
            assert os.readv(descriptor, [piece]) == len(piece)
        os.close(descriptor)
