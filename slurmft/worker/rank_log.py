"""slurmft's log lines in a worker: marked as its own, with the rank, under any formatter.

The end of a rank's log is read for symptoms of what ended it, and slurmft's message about an error that it has handled
looks like the error itself (``policy.verdicts.symptoms``). So the mark is in the message, not in a format that the
trainer may replace by one of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from slurmft.system.log_format import log_to_stderr

_PACKAGE = __name__.partition(".")[0]


def log_with_rank() -> None:
    """Log to standard error, each line with the rank; through the trainer's own logging where it has one."""
    _mark_records()
    if not logging.getLogger().handlers:
        # no indent: the lines of an exception are looked for where Python prints them
        log_to_stderr("%(message)s", indent="")


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
            record.msg = f"slurmft rank {rank}: {record.msg}"
        return record

    return marked
