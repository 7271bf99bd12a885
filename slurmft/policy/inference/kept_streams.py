"""How much text a router keeps of all the streams that may have to go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

MOST_BYTES = 256 << 20
"""Of all streams of a router."""

EXPIRES_S = 3600.0
"""A stream that has lasted for so long is not continued any more."""

OVERHEAD_BYTES = 64
"""What Python takes for a piece beyond its own bytes, roughly."""


class Keeping(Protocol):
    """A stream that keeps what has gone out."""

    def forget(self, why: str) -> None:
        """Let go of what is kept: it is passed on, but cannot be continued."""


class KeptStreams:
    """The account of what all streams of a router keep.

    Streams are told to forget where there is no room for more of theirs, or when they are too old; that is noticed
    when the next piece of any stream comes.

    Args:
        clock: seconds; of ``time.monotonic``.
    """

    def __init__(
        self, clock: Callable[[], float], *, most_bytes: int = MOST_BYTES, expires_s: float = EXPIRES_S
    ) -> None:
        self._clock, self._most_bytes, self._expires_s = clock, most_bytes, expires_s
        self.kept_bytes = 0
        self._each: dict[Keeping, tuple[float, int]] = {}
        """When the first piece came, the oldest stream first, and the bytes."""

    def __len__(self) -> int:
        """Streams that keep something."""
        return len(self._each)

    def keep(self, stream: Keeping, size: int) -> bool:
        """Whether the stream may keep one more piece of so many bytes; otherwise it has been told to forget."""
        now_s = self._clock()
        self._expire(now_s)
        size += OVERHEAD_BYTES
        if self.kept_bytes + size > self._most_bytes:
            self.end(stream)
            stream.forget("its router keeps too much for all streams")
            return False
        began_s, before = self._each.get(stream, (now_s, 0))
        self._each[stream] = began_s, before + size
        self.kept_bytes += size
        return True

    def end(self, stream: Keeping) -> None:
        """It keeps nothing any more."""
        _, size = self._each.pop(stream, (0.0, 0))
        self.kept_bytes -= size

    def _expire(self, now_s: float) -> None:
        while self._each:
            oldest = next(iter(self._each))
            if now_s - self._each[oldest][0] <= self._expires_s:
                return
            self.end(oldest)
            oldest.forget(f"it has lasted for more than {self._expires_s:.0f} s")
