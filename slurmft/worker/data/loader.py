"""Data that goes on exactly where it was: the resumable sampler, and bytes to train on with a loader of their own.

``ElasticSampler`` with ``ElasticLoader`` serves torch's DataLoader and any data set with numbered samples, at any world
size (``worker.data.sampler``). torchdata's ``StatefulDataLoader``, and any object with ``state_dict`` and
``load_state_dict``, can be given to a CheckpointManager as ``loader=`` as they are: each rank's state is saved, and the
same number of ranks goes on from it. Another number of ranks can where the loader has ``shared_position(state_dict)``
too, which returns the part of a state that all ranks share; that is compared at every load.

Of the bytes, the order of samples depends on the corpus, the window and the seed only. A position is a number of
samples over all ranks, so that a run may stop on four ranks and go on with two.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import stat
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slurmft.errors import DataError, UsageError
from slurmft.system.opening import read_part
from slurmft.worker.data.sampler import ElasticLoader, ElasticSampler

__all__ = ["ByteCorpus", "ElasticLoader", "ElasticSampler", "WindowLoader"]

log = logging.getLogger(__name__)

_PROBE_BYTES = 8192
_NO_CORPUS = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, eq=False, slots=True)
class ByteCorpus:
    """Text as a one-dimensional uint8 tensor."""

    data: torch.Tensor
    source: str
    """Where it came from, for messages."""

    def __len__(self) -> int:
        return len(self.data)

    @classmethod
    def load(cls, path: Path | str | None = None, limit_bytes: int = 8 << 20) -> ByteCorpus:
        """Read at most ``limit_bytes`` of text, in an order that depends on file names alone.

        None stands for the source files of the running Python's standard library, without its tests. A folder stands
        for all readable text files below it; hidden files, binary files and links to folders are left out.

        Raises:
            DataError: nothing is there, it is empty, or it cannot be read.
        """
        if limit_bytes < 1:
            raise UsageError(f"limit_bytes is {limit_bytes}")
        if path is None:
            folder = Path(sysconfig.get_path("stdlib"))
            return cls._of(_read_files(_sources(folder), limit_bytes), f"Python's standard library in {folder}")
        path = Path(path)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}", hint="pass a text file or a folder") from error
        if stat.S_ISDIR(mode):
            return cls._of(_read_files(_texts(path), limit_bytes), f"the text files in {path}")
        if not stat.S_ISREG(mode):
            raise DataError(f"{path} is neither a regular file nor a folder")
        try:
            return cls._of(_head(path, limit_bytes), str(path))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error

    def split(self, held_out_fraction: float = 0.05) -> tuple[ByteCorpus, ByteCorpus]:
        """The first part to train on and the last part to evaluate on."""
        if not 0 < held_out_fraction < 1:
            raise UsageError(f"held_out_fraction is {held_out_fraction}; it lies between 0 and 1")
        border = len(self) - max(1, int(len(self) * held_out_fraction))
        return (
            ByteCorpus(self.data[:border], f"{self.source} (training part)"),
            ByteCorpus(self.data[border:], f"{self.source} (held-out part)"),
        )

    def windows(self, starts: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of shape (len(starts), window), int64; a target is the byte that follows its input."""
        index = starts[:, None] + torch.arange(window + 1)
        chunk = self.data[index].long()
        return chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()

    def fingerprint(self) -> str:
        """Equal for equal bytes; 16 hex digits."""
        content = ctypes.string_at(self.data.data_ptr(), len(self))  # torch offers no buffer without numpy
        return hashlib.sha256(content).hexdigest()[:16]

    @classmethod
    def _of(cls, content: bytearray, source: str) -> ByteCorpus:
        if not content:
            raise DataError(f"{source}: there is no text to train on", hint="pass a text file or a folder of them")
        return cls(torch.frombuffer(content, dtype=torch.uint8), source)


class WindowLoader(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """Endless batches of windows, this rank's share of each global batch.

    Every epoch visits every window of the corpus once, in an order of its own; a global batch may span two epochs, so
    none is dropped. With the same product of ``batch_size`` and ``world_size`` the global batches are the same, however
    they are spread over ranks. Draws nothing from the global random number generators.

    Args:
        window: bytes of input per sample.
        batch_size: samples per batch and rank.

    Raises:
        DataError: the corpus is shorter than one window and its last target.
    """

    def __init__(
        self, corpus: ByteCorpus, window: int, batch_size: int, *, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        if window < 1 or batch_size < 1 or not 0 <= rank < world_size:
            raise UsageError(f"window {window}, batch size {batch_size}, rank {rank} of {world_size} make no sense")
        self._windows = (len(corpus) - 1) // window
        if self._windows < 1:
            raise DataError(
                f"{corpus.source}: {len(corpus)} bytes are too short for a window of {window} bytes and a target",
                hint="pass more text, or a smaller window",
            )
        self._corpus = corpus
        self._window = window
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._fingerprint = corpus.fingerprint()
        self._position = 0
        self._order: tuple[int, torch.Tensor] | None = None

    @property
    def position(self) -> int:
        """Samples that all ranks together have taken."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next global batch's first sample."""
        return self._position // self._windows

    def __iter__(self) -> WindowLoader:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = self._position + self._rank * self._batch_size
        starts = self._starts(first, first + self._batch_size)
        batch = self._corpus.windows(starts, self._window)
        self._position += self._batch_size * self._world_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far; the same on every rank."""
        return {
            "position": self._position,
            "seed": self._seed,
            "window": self._window,
            "corpus": self._fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on behind the last sample of ``state_dict``, also when the batch size or world size is another one.

        Raises:
            DataError: the corpus, the window or the seed is another one, where the position would mean nothing.
        """
        here = self.state_dict()
        for key in ("corpus", "window", "seed"):
            if state_dict[key] != here[key]:
                raise DataError(
                    f"the checkpoint has {key} {state_dict[key]}, and {self._corpus.source} has {here[key]}",
                    hint="resume with the same data, window and seed, or start a new run",
                )
        self._position = int(state_dict["position"])

    def shared_position(self, state_dict: Mapping[str, Any], /) -> Any:
        """The part of ``state_dict`` that all ranks share: the position counts the samples of all."""
        return {key: state_dict.get(key) for key in self.state_dict()}

    def _starts(self, first: int, end: int) -> torch.Tensor:
        """Where in the corpus the samples ``first`` to ``end`` of the endless stream begin."""
        parts = []
        while first < end:
            epoch, offset = divmod(first, self._windows)
            part = self._epoch_order(epoch)[offset : offset + end - first]
            parts.append(part)
            first += len(part)
        return torch.cat(parts) * self._window

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            mixed = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big"))
            self._order = (epoch, torch.randperm(self._windows, generator=generator))
        return self._order[1]


def _sources(folder: Path) -> Iterator[Path]:
    return (file for file in _walk(folder, _NO_CORPUS) if file.suffix == ".py")


def _texts(folder: Path) -> Iterator[Path]:
    return (file for file in _walk(folder, frozenset()) if not file.name.startswith("."))


def _walk(folder: Path, left_out: frozenset[str]) -> Iterator[Path]:
    """Regular files below ``folder``, in the same order on every machine: os.walk's own order is the filesystem's."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        yield from (file for name in sorted(names) if (file := Path(root, name)).is_file())


def _read_files(files: Iterator[Path], limit_bytes: int) -> bytearray:
    content = bytearray()
    for file in files:
        if len(content) >= limit_bytes:
            break
        try:
            text = _head(file, limit_bytes - len(content))
        except OSError as error:
            log.warning("leaving out %s: %s", file, error)
            continue
        if b"\0" not in text[:_PROBE_BYTES]:
            content += text
    return content


def _head(path: Path, limit_bytes: int) -> bytearray:
    return bytearray(read_part(path, 0, limit_bytes))
