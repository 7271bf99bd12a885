"""What kind of failure an exception is. Needs neither an agent nor torch."""

from __future__ import annotations

import contextlib
import errno
import re
from collections import deque
from collections.abc import Iterator
from enum import StrEnum

from slurmft.policy.verdicts.symptoms import cause_of_text
from slurmft.policy.verdicts.verdict import EXIT_TEMPORARY, Cause

_HARDWARE = re.compile(
    r"fallen off the bus|GPU is lost|\bXid\b|unspecified launch failure|CUDA error: unknown error|NVLink|"
    r"hardware (error|stack)|no CUDA-capable device|CUDA_ERROR_(ECC|HARDWARE|SYSTEM_NOT_READY)",
    re.IGNORECASE,
)
_MISUSE = re.compile(
    r"(CUDA|HIP) error: (device-side assert|invalid |no kernel image|misaligned address|too many resources|"
    r"peer access is|operation not (permitted|supported))",
    re.IGNORECASE,
)
"""CUDA's messages about program errors; other errors of CUDA without a known reason are the device's."""

_DEVICE = re.compile(r"\b(CUDA|HIP) error\b", re.IGNORECASE)
_HOST_MEMORY = re.compile(
    r"\b(host|cpu|system|main memory|ram|oom[- _]?kill\w*|killed|cgroup)\b.{0,200}\bout of memory\b|"
    r"\bout of (host|system|cpu|main) memory\b|\bout of memory: killed\b|\boom[-_]kill",
    re.IGNORECASE,
)
_DEVICE_MEMORY = re.compile(r"\bout of (device |gpu )?memory\b", re.IGNORECASE)
_COMMUNICATION = re.compile(
    r"\b(NCCL|RCCL|gloo)\b.{0,200}\b(timed?[ -]?out|timeout)\b|\bconnection (was )?(refused|reset|aborted|timed out)\b|"
    r"\bno route to host\b|\bnetwork is unreachable\b",
    re.IGNORECASE,
)
_NUMERICAL = re.compile(r"\b(NaNs?|infs?|non-?finite|not finite|overflow|diverged)\b", re.IGNORECASE)
_TIMEOUT = re.compile(r"\b(timed? ?out|deadline exceeded|watchdog)\b", re.IGNORECASE)
_STORAGE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOENT, errno.EACCES, errno.EMFILE}
)

MAX_EXCEPTIONS = 1000
"""Limit for one chain or group; a loop that raises from its last error makes endless ones."""

MAX_TEXT, MAX_NEWEST, MAX_HEAD = 400_000, 8_000, 4_000
"""Characters looked at: of the end of a text, there for words that may stand anywhere, and of its beginning."""


class FailureCategory(StrEnum):
    """Kinds of failures that call for different answers."""

    DEVICE_OUT_OF_MEMORY = "device out of memory"
    HOST_OUT_OF_MEMORY = "host out of memory"
    COMMUNICATION = "communication"
    HARDWARE = "hardware"
    NUMERICAL = "numerical"
    TIMEOUT = "timeout"
    STORAGE = "storage"
    PREEMPTION = "preemption"
    CODE = "code"
    UNKNOWN = "unknown"

    @property
    def cause(self) -> Cause:
        """The supervisor's cause for it."""
        return _CAUSES[self]


_CAUSES = {
    FailureCategory.DEVICE_OUT_OF_MEMORY: Cause.DEVICE_OUT_OF_MEMORY,
    FailureCategory.HOST_OUT_OF_MEMORY: Cause.HOST_OUT_OF_MEMORY,
    FailureCategory.COMMUNICATION: Cause.COMMUNICATION_ERROR,
    FailureCategory.HARDWARE: Cause.DATA_CORRUPTION,
    FailureCategory.NUMERICAL: Cause.WORKER_ERROR,
    FailureCategory.TIMEOUT: Cause.HANG,
    FailureCategory.STORAGE: Cause.WORKER_ERROR,
    FailureCategory.PREEMPTION: Cause.PREEMPTED,
    FailureCategory.CODE: Cause.WORKER_ERROR,
    FailureCategory.UNKNOWN: Cause.UNKNOWN,
}
_CATEGORIES = {
    cause: next(category for category in FailureCategory if category.cause is cause)
    for cause in (
        Cause.DEVICE_OUT_OF_MEMORY, Cause.HOST_OUT_OF_MEMORY, Cause.COMMUNICATION_ERROR, Cause.DATA_CORRUPTION
    )
}  # fmt: skip

_WORDS = (
    (FailureCategory.HARDWARE, _HARDWARE),
    (FailureCategory.HOST_OUT_OF_MEMORY, _HOST_MEMORY),
    (FailureCategory.DEVICE_OUT_OF_MEMORY, _DEVICE_MEMORY),
    (FailureCategory.CODE, _MISUSE),
    (FailureCategory.HARDWARE, _DEVICE),
    (FailureCategory.COMMUNICATION, _COMMUNICATION),
    (FailureCategory.TIMEOUT, _TIMEOUT),
    (FailureCategory.NUMERICAL, _NUMERICAL),
)
"""In this order: rules that name a reason come before those that name the place."""


def categorize_failure(error: object) -> FailureCategory:
    """The category of an exception, or of the text of one, such as a traceback in a log; never raises.

    The exception itself counts first, then those it was raised from, and the members of a group. An exception that no
    rule matches is ``code``, a text ``unknown``; any other object is ``unknown`` as well.
    """
    with contextlib.suppress(Exception):  # objects of others, whose every attribute may raise
        if isinstance(error, str):
            return _of_text(str.__str__(error)) or FailureCategory.UNKNOWN
        if isinstance(error, BaseException):
            found = (_of_one(one) for one in _chain(error))
            return next((category for category in found if category is not None), FailureCategory.CODE)
    return FailureCategory.UNKNOWN


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = deque([error]), set[int]()
    while waiting and len(seen) < MAX_EXCEPTIONS:
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        with contextlib.suppress(Exception):
            further = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
            members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            waiting.extend([*members[:MAX_EXCEPTIONS], *([further] if further is not None else [])])


def _of_one(error: BaseException) -> FailureCategory | None:
    category = None
    with contextlib.suppress(Exception):
        category = _of_type(error)
    return category or _of_text(_words(error))


def _words(error: BaseException) -> str:
    """The exception as the last lines of its traceback name it, without those that it was raised from."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    notes = getattr(error, "__notes__", None)
    parts = [_text_of(error), *(_text_of(note) for note in (notes if isinstance(notes, list) else [])[:20])]
    return f"{name}: " + "\n".join(parts)


def _text_of(value: object) -> str:
    try:
        return str.__str__(str(value))
    except BaseException:  # noqa: BLE001 - as traceback does: nothing that it raises says more than its type does
        return ""


def _of_type(error: BaseException) -> FailureCategory | None:
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == EXIT_TEMPORARY):
        return FailureCategory.PREEMPTION
    if isinstance(error, FloatingPointError | OverflowError | ZeroDivisionError):
        return FailureCategory.NUMERICAL
    if isinstance(error, ConnectionError):
        return FailureCategory.COMMUNICATION
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return FailureCategory.STORAGE
    return None


def _of_text(text: str) -> FailureCategory | None:
    found = _of_part(text[-MAX_TEXT:])
    return found if found is not None or len(text) <= MAX_NEWEST else _of_part(text[:MAX_HEAD])


def _of_part(text: str) -> FailureCategory | None:
    if (cause := cause_of_text(text)) is not None:
        return _CATEGORIES[cause]
    newest = text[-MAX_NEWEST:]
    for category, pattern in _WORDS:
        if pattern.search(newest):
            return category
    return FailureCategory.TIMEOUT if text.startswith("TimeoutError") else None
