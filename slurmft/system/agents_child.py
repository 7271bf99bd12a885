"""A process of inference that an agent has started: a driver or a router."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from slurmft.errors import SlurmftError
from slurmft.system.log_format import log_to_stderr
from slurmft.system.processes import die_with_parent


def run_below_agent(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run ``work`` until it ends or the agent does; returns its exit code, or that of its error, which is logged."""
    log_to_stderr("slurmft: %(message)s")
    die_with_parent()
    # the agent says when to stop; an engine must not inherit "ignored"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda _number, _frame: None)
    try:
        return asyncio.run(work())
    except SlurmftError as error:
        with contextlib.suppress(OSError):  # a full disk
            sys.stderr.write(f"slurmft: {error}\n")
        return error.exit_code
