"""slurmft's log lines in a worker: marked as its own, with the rank, under any formatter.

The end of a rank's log is read for symptoms of what ended it, and what slurmft says of a trouble that it has dealt with
sounds like the trouble itself (``policy.verdicts.symptoms``). So the mark is in the message, not in a format that the
trainer may replace by one of its own, and in each of its lines: what NCCL and CUDA say of an error has several, and so
has a traceback of an exception that was dealt with.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Callable
from typing import Any

from slurmft.system.log_format import log_to_stderr

_PACKAGE = __name__.partition(".")[0]


def log_with_rank() -> None:
    """Log to standard error, each line with the rank; through the trainer's own logging where it has one."""
    _mark_records()
    if not logging.getLogger().handlers:
        log_to_stderr("%(message)s", indent="")  # no indent: the mark tells whose line it is


def _mark_records() -> None:
    make = logging.getLogRecordFactory()
    plain = getattr(make, "plain", make)  # a process may have been forked from one that marks with its own rank
    marking = _marking(plain, os.environ.get("RANK", "0"))
    marking.plain = plain  # type: ignore[attr-defined]
    logging.setLogRecordFactory(marking)


def _marking(plain: Callable[..., logging.LogRecord], rank: str) -> Callable[..., logging.LogRecord]:
    def marked(*arguments: Any, **more: Any) -> logging.LogRecord:
        record = plain(*arguments, **more)
        if record.name.partition(".")[0] == _PACKAGE:
            _mark(record, f"slurmft rank {rank}: ")
        return record

    return marked


def _mark(record: logging.LogRecord, mark: str) -> None:
    record.msg = f"{mark}{record.msg}"
    with contextlib.suppress(Exception):  # arguments that do not fit: logging tells of them later
        lines = record.getMessage().splitlines()
        if len(lines) > 1:
            record.msg, record.args = f"\n{mark}".join(lines), None
    if record.exc_info:  # formatters take this text where it is there
        text = "".join(traceback.format_exception(*record.exc_info))
        record.exc_text = "\n".join(f"{mark}{line}" for line in text.splitlines())
