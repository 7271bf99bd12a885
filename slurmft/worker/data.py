"""Which samples each rank takes next: exact over stops, restarts and changes of the world size.

The order of an epoch depends on the number of samples, the seed and the epoch only. A position is a number of samples
that all ranks together have taken, so a run may stop on four ranks and go on with three: it takes what comes next in
the same order, each sample of the epoch once. Every rank gets its part of each global batch, and parts differ by at
most one sample (``policy.worker_settings``), at any world size.

    sampler = ElasticSampler(len(data), global_batch=256, seed=1)
    loader = ElasticLoader(DataLoader(data, batch_sampler=sampler, num_workers=4, generator=torch.Generator()), sampler)
    loaded = checkpoints.load_latest(model, optimizer, loader=loader)
    for step in session.steps(...):
        batch = next(loader)
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
from torch.utils.data import Sampler

from slurmft.errors import DataError, UsageError
from slurmft.policy.worker_settings import BatchSplit, even_parts, split_batch
from slurmft.system.files import read_part

FORMAT = 1
Tail = Literal["span", "short", "drop"]
Batch = TypeVar("Batch")


class ElasticSampler(Sampler[list[int]]):
    """This rank's sample numbers of one global batch after another: a ``batch_sampler`` for torch's DataLoader.

    Iterating yields the batches from the position to the end of the epoch and does not move the position: a DataLoader
    fetches ahead of what the trainer has used. ``advance()`` moves it, which ``ElasticLoader`` does by itself.

    Args:
        samples: samples in the data set.
        global_batch: samples of all ranks together behind one optimizer step. The same on any world size.
        rank, world_size: as in the environment (RANK, WORLD_SIZE) when not given.
        tail: treatment of the samples at the end of an epoch that do not fill a global batch. ``span``: the batch is
            filled from the next epoch. ``short``: the last batch is shorter; where it has fewer samples than ranks, the
            highest ranks get an empty list, which torch's own ``default_collate`` refuses. ``drop``: they are left out.
            Nothing is ever repeated to pad a batch.

    Raises:
        UsageError: the numbers make no sense.
    """

    def __init__(
        self,
        samples: int,
        global_batch: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = "span",
    ) -> None:
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if type(samples) is not int or samples < 1:
            raise UsageError(f"a data set of {samples!r} samples cannot be trained on")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of {self.world_size} makes no sense")
        if tail not in get_args(Tail):
            raise UsageError(f"tail is {tail!r}; it is one of {', '.join(get_args(Tail))}")
        if tail == "drop" and samples < global_batch:
            raise UsageError(f"{samples} samples fill no global batch of {global_batch}, and tail='drop' leaves none")
        split_batch(global_batch, self.world_size, global_batch)  # refuses what cannot be spread
        self.samples, self.global_batch, self.seed, self.shuffle = samples, global_batch, seed, shuffle
        self.tail: Tail = tail
        self.epoch = 0
        """The epoch of the next global batch's first sample."""

        self.consumed = 0
        """Samples of this epoch that all ranks together have taken."""

        self._orders: dict[int, torch.Tensor] = {}

    @property
    def position(self) -> int:
        """Samples that all ranks together have taken, in all epochs; with ``drop``, those left out count as well."""
        return self.epoch * self.samples + self.consumed

    def __len__(self) -> int:
        """Global batches from the position to the end of the epoch: those that begin in it."""
        left = self.samples - self.consumed
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        return _Batches(self)

    def split(self, max_micro_batch: int | None = None) -> BatchSplit:
        """How the next global batch is spread: micro-batches and weights of the gradients.

        With the tail ``short``, a rank may have no sample in the last batch of an epoch; its part is empty.
        """
        samples = even_parts(self._size(self.consumed), self.world_size)
        return BatchSplit(samples=samples, max_micro_batch=max_micro_batch or self.global_batch)

    def advance(self) -> None:
        """One global batch has been used."""
        further, self.consumed = divmod(self.consumed + self._size(self.consumed), self.samples)
        self.epoch += further
        if not len(self):  # the rest is dropped
            self.epoch, self.consumed = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The global position; the same on every rank."""
        return {
            "format": FORMAT,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on behind the last sample of ``state_dict``, also when world size or global batch are others.

        Raises:
            DataError: it belongs to other data or another order, where the position would mean nothing, or it is no
                position; this sampler stays as it was.
        """
        version = state_dict.get("format")
        if type(version) is not int or version > FORMAT:
            raise DataError(
                f"the sampler's state has format {version!r}; this slurmft reads up to {FORMAT}",
                hint="upgrade slurmft, or resume with the loader that was saved",
            )
        for key in ("samples", "seed", "shuffle"):
            if state_dict.get(key) != getattr(self, key):
                raise DataError(
                    f"the checkpoint has {key} {state_dict.get(key)!r}, and this sampler has {getattr(self, key)!r}",
                    hint="resume with the same data, seed and order, or start a new run",
                )
        epoch, consumed = state_dict.get("epoch"), state_dict.get("consumed")
        if type(epoch) is not int or type(consumed) is not int or epoch < 0 or not 0 <= consumed < self.samples:
            raise DataError(f"the sampler's state is not a position: epoch {epoch!r}, {consumed!r} samples of it")
        self.epoch, self.consumed = epoch, consumed
        if not len(self):  # a larger global batch than before
            self.epoch, self.consumed = epoch + 1, 0

    def shared_position(self, state_dict: Mapping[str, Any], /) -> Any:
        """The part of ``state_dict`` that all ranks share, which is all of it."""
        return {key: state_dict.get(key) for key in self.state_dict()}

    def _size(self, consumed: int) -> int:
        """Samples of the global batch that begins behind ``consumed``."""
        return min(self.global_batch, self.samples - consumed) if self.tail == "short" else self.global_batch

    def _part(self, epoch: int, consumed: int) -> list[int]:
        parts = even_parts(self._size(consumed), self.world_size)
        first = consumed + sum(parts[: self.rank])
        return self._numbers(epoch, first, first + parts[self.rank])

    def _numbers(self, epoch: int, first: int, end: int) -> list[int]:
        """The samples ``first`` to ``end`` of the endless stream that begins with ``epoch``."""
        found: list[int] = []
        while first < end:
            ahead, offset = divmod(first, self.samples)
            found += self._order(epoch + ahead)[offset : offset + end - first].tolist()
            first = epoch_end if (epoch_end := (ahead + 1) * self.samples) < end else end
        return found

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            if len(self._orders) > 1:  # a batch may span two epochs
                del self._orders[min(self._orders)]
            self._orders[epoch] = self._shuffled(epoch) if self.shuffle else torch.arange(self.samples)
        return self._orders[epoch]

    def _shuffled(self, epoch: int) -> torch.Tensor:
        mixed = hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big"))
        return torch.randperm(self.samples, generator=generator)


class _Batches(Iterator[list[int]]):
    """The batches from the sampler's position to the end of its epoch.

    torchdata's StatefulDataLoader asks it where it is: where that loader is the one that is saved, it goes on there,
    since the sampler itself stays at the beginning.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler, self._epoch, self._first = sampler, sampler.epoch, sampler.consumed
        self._left, self._taken = len(sampler), 0

    def __next__(self) -> list[int]:
        if self._taken >= self._left:
            raise StopIteration
        part = self._sampler._part(self._epoch, self._first + self._taken * self._sampler.global_batch)
        self._taken += 1
        return part

    def state_dict(self) -> dict[str, Any]:
        """Batches that were taken since it began."""
        return {"format": FORMAT, "taken": self._taken}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on behind them; raises DataError where there are fewer."""
        taken = state_dict.get("taken")
        if type(taken) is not int or not 0 <= taken <= self._left:
            raise DataError(f"the sampler's state is not a position: {taken!r} of {self._left} batches")
        self._taken = taken


class ElasticLoader(Iterator[Batch], Generic[Batch]):
    """Endless batches of ``loader``, whose ``batch_sampler`` is ``sampler``; the position moves as they are handed out.

    Pass it to ``CheckpointManager`` as ``loader=``. Samples that a DataLoader's workers have fetched ahead do not count
    as taken, and are fetched again by the next start.
    """

    def __init__(self, loader: Iterable[Batch], sampler: ElasticSampler) -> None:
        self.loader, self.sampler = loader, sampler
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> ElasticLoader[Batch]:
        return self

    def __next__(self) -> Batch:
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = None  # the end of an epoch
                continue
            self.sampler.advance()
            return batch
        raise UsageError("the loader has no batches", hint="pass the sampler to it as batch_sampler")

    @property
    def has_begun(self) -> bool:
        """Whether a batch was handed out since it was made, or given a state."""
        return self._batches is not None

    def state_dict(self) -> dict[str, Any]:
        """The position behind the batches handed out so far."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on from there; raises as ``ElasticSampler.load_state_dict`` does."""
        self.sampler.load_state_dict(state_dict)
        self._batches = None

    def shared_position(self, state_dict: Mapping[str, Any], /) -> Any:
        """As of the sampler."""
        return self.sampler.shared_position(state_dict)


# --- loader ---
# Bytes to train on, with a loader of their own. (What other loaders a CheckpointManager takes: ``state.Stateful``.)
#
# The order of samples depends on the corpus, the window and the seed only. A position is a number of samples over all
# ranks, so that a run may stop on four ranks and go on with two.

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
            return cls._of(
                _read_files(_walk(folder, _NO_CORPUS, ".py"), limit_bytes), f"Python's standard library in {folder}"
            )
        path = Path(path)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}", hint="pass a text file or a folder") from error
        if stat.S_ISDIR(mode):
            return cls._of(_read_files(_walk(path), limit_bytes), f"the text files in {path}")
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
        self._corpus, self._window, self._fingerprint = corpus, window, corpus.fingerprint()
        self._sampler = ElasticSampler(
            self._windows, batch_size * world_size, rank=rank, world_size=world_size, seed=seed
        )

    @property
    def position(self) -> int:
        """Samples that all ranks together have taken."""
        return self._sampler.position

    @property
    def epoch(self) -> int:
        """The epoch of the next global batch's first sample."""
        return self._sampler.epoch

    def __iter__(self) -> WindowLoader:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = next(iter(self._sampler))
        self._sampler.advance()
        return self._corpus.windows(torch.tensor(numbers) * self._window, self._window)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far; the same on every rank."""
        return {
            "position": self.position,
            "seed": self._sampler.seed,
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
        self._sampler.epoch, self._sampler.consumed = divmod(int(state_dict["position"]), self._windows)

    def shared_position(self, state_dict: Mapping[str, Any], /) -> Any:
        """The part of ``state_dict`` that all ranks share: the position counts the samples of all."""
        return {key: state_dict.get(key) for key in self.state_dict()}


def _walk(folder: Path, left_out: frozenset[str] = frozenset(), suffix: str = "") -> Iterator[Path]:
    """Regular files below ``folder``, in the same order on every machine: os.walk's own order is the filesystem's."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        wanted = (name for name in sorted(names) if name.endswith(suffix) and not name.startswith("."))
        yield from (file for name in wanted if (file := Path(root, name)).is_file())


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
