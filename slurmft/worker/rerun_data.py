"""What a rerun starts from: data that can be handed out again, and the random state of each iteration."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from slurmft.trainer import savers

# --- The random state at the start of each iteration, saved in less than a microsecond ---
# Copying Python's and numpy's generators costs 8 and 30 us, and most steps draw nothing from them. So a few of their
# words are compared first, and they are copied when those have changed. torch's are copied every time. With both copies
# a step of the re-run machine would cost 40 us instead of 2 (bench/results/rerun.md).
#
# Where those words lie is checked when they are looked up. Where that is not known, as of another generator than
# MT19937, the states are copied every time, and the log says so once.

log = logging.getLogger(__name__)

_WORDS = 624
_CHANGED = -1
"""Equal to no remembered word."""


class IterationStart:
    """Remembers the states that ``mark`` finds; ``state`` and ``restore`` are as in ``trainer.savers``."""

    def __init__(self) -> None:
        self._copy_torch = torch.default_generator.get_state
        self._torch = self._copy_torch()
        self._python: Any = None
        self._python_word = _python_word()
        if self._python_word is None:
            _say_it_costs("Python")
        self._python_was = _CHANGED
        self._numpy: Any = None
        self._numpy_word: ctypes.c_uint64 | None = None
        self._numpy_was = _CHANGED
        self._numpy_global: Any = None
        self._numpy_bits: Any = None
        self._has_gpu = torch.cuda.is_available()
        self._cuda: torch.Tensor | None = None
        self.mark()

    def mark(self) -> None:
        """Remember the states as they are now."""
        self._torch = self._copy_torch()
        word = self._python_word
        if word is None or word.value != self._python_was:
            self._mark_python()
        word = self._numpy_word
        if word is None:
            if "numpy" in sys.modules:
                self._find_numpy()
        elif word.value != self._numpy_was:
            self._find_numpy()
        if self._has_gpu and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = torch.cuda.get_rng_state()

    def has_drawn(self) -> bool:
        """Whether anything was drawn since ``mark``, or may have been; remembers the states as they are now."""
        torchs, pythons, numpys, cudas = self._torch, self._python, self._numpy, self._cuda
        self.mark()
        is_same = torch.equal(self._torch, torchs) and self._python == pythons and self._numpy is numpys
        if is_same and self._cuda is not cudas:
            is_same = self._cuda is not None and cudas is not None and torch.equal(self._cuda, cudas)
        return not is_same

    def state(self) -> savers.RandomState:
        """The remembered states, as ``savers.capture`` would have returned them."""
        state: savers.RandomState = {"python": self._python, "torch": self._torch}
        if self._numpy is not None:
            state["numpy"] = savers.plain(self._numpy)
        if self._cuda is not None:
            state["cuda"] = self._cuda
        return state

    def restore(self) -> None:
        """Put the generators back to the remembered states."""
        if self._numpy_global is not None and self._numpy_global._bit_generator is not self._numpy_bits:
            log.warning("numpy's global generator was replaced during the training: it is not restored")
            self._numpy = None
        savers.restore(self.state())

    # A cached second gaussian is handed out without a trace in the words: while there is one, they prove nothing.

    def _mark_python(self) -> None:
        self._python = random.getstate()
        word, has_gauss = self._python_word, self._python[2] is not None
        self._python_was = _CHANGED if word is None or has_gauss else word.value

    def _find_numpy(self) -> None:
        randomness: Any = sys.modules["numpy"].random
        self._numpy = randomness.get_state(legacy=False)
        self._numpy_global = randomness.mtrand._rand
        if self._numpy_bits is not self._numpy_global._bit_generator:
            self._numpy_bits = self._numpy_global._bit_generator
            self._numpy_word = _numpy_word(self._numpy_bits)
            if self._numpy_word is None:
                _say_it_costs("numpy")
        word, has_gauss = self._numpy_word, self._numpy.get("has_gauss", 1)
        self._numpy_was = _CHANGED if word is None or has_gauss else word.value


def _say_it_costs(whose: str) -> None:
    log.info("the random state of %s is copied at each iteration: its place in memory is not known here", whose)


def _python_word() -> ctypes.c_uint64 | None:
    """The position and a word of Python's generator, where it lies in memory as CPython has it; that is checked."""
    generator = getattr(random, "_inst", None)
    if generator is None or sys.implementation.name != "cpython":
        return None
    start = id(generator) + object.__basicsize__
    if type(generator).__mro__[1].__basicsize__ - object.__basicsize__ < 4 * (_WORDS + 1):
        return None
    index, *words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(start)
    return ctypes.c_uint64.from_address(start) if (*words, index) == random.getstate()[1] else None


def _numpy_word(bits: Any) -> ctypes.c_uint64 | None:
    """The same of numpy's usual generator, whose address numpy publishes."""
    if type(bits).__name__ != "MT19937":
        return None
    start = bits.ctypes.state_address
    *words, position = (ctypes.c_uint32 * (_WORDS + 1)).from_address(start)
    state = bits.state["state"]
    is_known = words == state["key"].tolist() and position == state["pos"]
    return ctypes.c_uint64.from_address(start + 4 * (_WORDS - 1)) if is_known else None


# --- rerun data ---
# Data that can be handed out again: within the process for a rerun in place, and after a restart for one elsewhere.

_FORMAT = "rerun_data"

WATCHED = 64
"""Fetches without a random number, at the beginning of each pass, until a loader counts as one that draws none."""


class RerunDataIterator(Iterator[Any]):
    """Any iterator or data loader, with a memory of the batches of the iteration under way.

    ``rewind`` hands them out again, ``advance`` forgets them. Save it with the checkpoint: a state that is taken in the
    middle of an iteration holds its batches with their hashes, and they come first after a load. The position of the
    loader itself is saved where it has ``state_dict``; a loader's own state, saved without this wrapper, loads too.

    Batches are not copied, so do not change one in place; a rerun that meets a changed one proves nothing, and reports
    that. A loader that draws random numbers, as augmentations and the start of an epoch do, has drawn them in the
    rerun, too: the generators are put to where it had left them.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._fetch: Callable[[], Any] = self._fetch_first
        self._taken: list[tuple[Any, Any]] = []
        """The batches of this iteration, each with torch's count of writes when it was handed out."""

        self._next = 0
        self._loaded_hashes: list[str] = []
        self._is_under_way: Callable[[], bool] = lambda: False
        self._watch: IterationStart | None = None
        self._quiet = 0
        self._drawn: dict[int, savers.RandomState] = {}
        """By the batch's place in the iteration: the generators after a fetch that drew from them."""

    def __iter__(self) -> RerunDataIterator:
        return self

    def __next__(self) -> Any:
        index, taken = self._next, self._taken
        if index < len(taken):
            self._next = index + 1
            if index in self._drawn:
                savers.restore(self._drawn[index])
            return taken[index][0]
        batch = self._fetch()
        if type(batch) is tuple and len(batch) == 2:  # inputs and targets, nearly always: spare the calls
            first, second = batch
            try:
                taken.append((batch, (first._version, second._version)))
            except AttributeError:
                taken.append((batch, _versions(batch)))
        else:
            taken.append((batch, _versions(batch)))
        self._next = index + 1
        return batch

    def advance(self) -> None:
        """The iteration is over: forget the batches it took."""
        taken = self._taken
        if self._next == len(taken):
            taken.clear()  # nearly always, and twice as fast
        else:
            del taken[: self._next]
        if self._drawn:
            self._drawn = {index - self._next: state for index, state in self._drawn.items() if index >= self._next}
        self._next = 0

    def within(self, is_under_way: Callable[[], bool]) -> None:
        """The machine of these iterations: while one is under way, all of its batches are needed again after a load."""
        self._is_under_way = is_under_way

    def rewind(self) -> None:
        """Hand out the batches of this iteration once more."""
        self._next = 0

    def restart_epoch(self) -> None:
        """Begin a new pass over the loader with the next batch that is not a repetition."""
        self._fetch = self._fetch_first

    def _fetch_first(self) -> Any:
        self._watch, self._quiet = self._watch or IterationStart(), 0
        self._watch.mark()  # before iter(): a DataLoader draws its seed there
        fetch = iter(self._loader).__next__
        self._fetch = lambda: self._fetch_watched(fetch)
        return self._noted(fetch(), fetch)

    def _fetch_watched(self, fetch: Callable[[], Any]) -> Any:
        assert self._watch is not None
        self._watch.mark()
        return self._noted(fetch(), fetch)

    def _noted(self, batch: Any, fetch: Callable[[], Any]) -> Any:
        """Remember what the fetch has drawn; a loader that draws nothing for a while is not watched any more."""
        assert self._watch is not None
        if self._watch.has_drawn():
            self._drawn[len(self._taken)] = self._watch.state()
            self._quiet = 0
        else:
            self._quiet += 1
        if self._quiet >= WATCHED:
            self._fetch = fetch
        return batch

    def changed_in_place(self) -> bool:
        """Whether the loop has written into a batch of this iteration since it was handed out."""
        return any(_versions(batch) != seen for batch, seen in self._taken)

    def hashes(self) -> list[str]:
        """One for each batch that this iteration has taken so far; equal for equal content, on any machine."""
        return [batch_hash(batch) for batch, _ in self._taken[: self._next]]

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, and the batches that the iteration under way has taken; none between two iterations."""
        inner = getattr(self._loader, "state_dict", None)
        first = 0 if self._is_under_way() else self._next
        batches = [batch for batch, _ in self._taken[first:]]
        can_save = all(_is_plain(batch) for batch in batches)
        if not can_save:
            log.warning("batches of this type cannot be saved: a rerun on other hardware will be inconclusive")
        return {
            _FORMAT: 1,
            "inner": inner() if inner is not None else None,
            # on the CPU and alone: a slice would take its whole data set with it into the file
            "batches": tree_map_only(torch.Tensor, lambda one: one.detach().cpu().clone(), batches) if can_save else [],
            "hashes": [batch_hash(batch) for batch in batches],
            "on_gpu": any(isinstance(one, torch.Tensor) and one.is_cuda for one in tree_leaves(batches)),
            "drawn": {index - first: state for index, state in self._drawn.items() if index >= first and can_save},
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on as after ``state_dict``: first the batches of the iteration that was under way, then the loader's."""
        self._fetch, self._next = self._fetch_first, 0
        is_ours = _FORMAT in state
        inner, load = state["inner"] if is_ours else state, getattr(self._loader, "load_state_dict", None)
        if load is not None and inner is not None:
            load(inner)
        device = "cuda" if is_ours and state["on_gpu"] and torch.cuda.is_available() else "cpu"
        batches = tree_map_only(torch.Tensor, lambda one: one.to(device), state["batches"]) if is_ours else []
        self._taken = [(batch, _versions(batch)) for batch in batches]
        self._loaded_hashes = [str(one) for one in state["hashes"]] if batches else []
        self._drawn = dict(state.get("drawn", {})) if batches else {}

    def shared_position(self, state: Mapping[str, Any], /) -> Any:
        """The part of the loader's own state that all ranks share; None where it does not report it."""
        inner, of = state["inner"] if _FORMAT in state else state, getattr(self._loader, "shared_position", None)
        return None if of is None or inner is None else of(inner)

    def forget_replay(self) -> None:
        """Drop the batches of a loaded state: they are another rank's."""
        self._taken, self._loaded_hashes, self._drawn, self._next = [], [], {}, 0

    def is_damaged(self) -> bool:
        """Whether the batches of a loaded state are not those that were saved."""
        return bool(self._loaded_hashes) and [batch_hash(batch) for batch, _ in self._taken] != self._loaded_hashes


def batch_hash(batch: Any) -> str:
    """32 hex digits of a batch's content: types, shapes and bytes, wherever its tensors lie."""
    digest = hashlib.sha256()
    _feed(digest, batch)
    return digest.hexdigest()[:32]


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        there = value.detach().cpu()
        there = (there if there.layout is torch.strided else there.to_dense()).contiguous()
        digest.update(f"tensor {there.dtype} {tuple(there.shape)}:".encode())
        if there.numel():
            # its own bytes: a slice shares the storage of the whole
            digest.update(ctypes.string_at(there.data_ptr(), there.numel() * there.element_size()))
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}:".encode())
        for key, item in value.items():
            _feed(digest, key)
            _feed(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)}:".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, bytes):
        digest.update(b"bytes %d:" % len(value) + value)
    elif isinstance(value, str | int | float | None):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    else:
        digest.update(pickle.dumps(value, protocol=4))


def _versions(value: Any) -> Any:
    """torch counts the writes into each tensor; numpy arrays and others have no counter."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, list | tuple):
        return tuple(_versions(item) for item in value)
    if isinstance(value, Mapping):
        return tuple(_versions(item) for item in value.values())
    return None


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    return type(value) in (torch.Tensor, str, bytes, int, float, bool, type(None))
