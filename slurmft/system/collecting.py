"""Importing without the garbage collector, which looks at all modules again and again meanwhile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For imports: their objects stay, and looking for garbage among them takes up to a quarter of the time.

    Afterwards the collector leaves them alone, so that forked children share their pages for as long as they can.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
