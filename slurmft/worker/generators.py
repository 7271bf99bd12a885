"""The random state at the start of each iteration, saved in less than a microsecond.

Copying Python's and numpy's generators costs 8 and 30 us, and most steps draw nothing from them. So a few of their
words are compared first, and they are copied when those have changed. torch's are copied every time. With both copies
a step of the re-run machine would cost 40 us instead of 2 (bench/results/rerun.md).

Where those words lie is checked when they are looked up. Where that is not known, as of another generator than
MT19937, the states are copied every time, and the log says so once.
"""

from __future__ import annotations

import ctypes
import logging
import random
import sys
from typing import Any

import torch

from slurmft.trainer import savers

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
        """The remembered states, as ``rng.capture`` would have returned them."""
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
