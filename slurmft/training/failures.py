"""What kind of failure an exception is. Needs neither an agent nor torch."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator
from enum import StrEnum

from slurmft.policy.symptoms import cause_of_text
from slurmft.policy.verdict import EXIT_TEMPORARY, Cause

_HARDWARE = re.compile(
    r"fallen off the bus|GPU is lost|\bXid\b|unspecified launch failure|CUDA error: unknown error|NVLink|"
    r"hardware (error|stack)|no CUDA-capable device|CUDA_ERROR_(ECC|HARDWARE|SYSTEM_NOT_READY)",
    re.IGNORECASE,
)
_NUMERICAL = re.compile(r"\b(NaNs?|infs?|non-?finite|not finite|overflow|diverged)\b", re.IGNORECASE)
_TIMEOUT = re.compile(r"\b(timed? ?out|deadline exceeded|watchdog)\b", re.IGNORECASE)
_STORAGE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOENT, errno.EACCES, errno.EMFILE}
)


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
        """The cause by which a supervisor would know it."""
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


def categorize_failure(error: BaseException | str) -> FailureCategory:
    """The category of an exception, or of the text of one, such as a traceback in a log; never raises.

    The exception itself speaks first, then those it was raised from, and the members of a group. What no rule knows is
    ``code`` for an exception and ``unknown`` for a text.
    """
    if isinstance(error, str):
        return _of_text(error) or FailureCategory.UNKNOWN
    for one in _chain(error):
        if (category := _of_type(one) or _of_text(_words(one))) is not None:
            return category
    return FailureCategory.CODE


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        further = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += [*members, *([further] if further is not None else [])]


def _words(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error))  # copes with a __str__ that fails


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
    if (cause := cause_of_text(text)) is not None:
        return _CATEGORIES[cause]
    text = text[-8000:]
    for category, pattern in (
        (FailureCategory.HARDWARE, _HARDWARE),
        (FailureCategory.TIMEOUT, _TIMEOUT),
        (FailureCategory.NUMERICAL, _NUMERICAL),
    ):
        if pattern.search(text) or (category is FailureCategory.TIMEOUT and text.startswith("TimeoutError")):
            return category
    return None
