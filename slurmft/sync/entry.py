"""The process that keeps a node's folders: a store that does not answer must not block the agent.

It reads lines of JSON, first the settings of the folders and then orders, and writes lines of JSON. It ends with its
agent.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from slurmft.config.sections import SyncConfig
from slurmft.sync.folder import KeptFolder, Order
from slurmft.system.foreign_text import log_to_stderr
from slurmft.system.processes import die_with_parent

NICE = 10
EXIT_INTERNAL = 70

log = logging.getLogger(__name__)


def main() -> None:
    """Serve until the standard input ends."""
    log_to_stderr("slurmft: %(message)s")
    die_with_parent()
    os.nice(NICE)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # the agent says when to stop
        signal.signal(number, lambda _number, _frame: None)
    threading.excepthook = _end_with
    lock = threading.Lock()

    def say(message: Mapping[str, Any]) -> None:
        with lock:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()

    folders: list[KeptFolder] = []
    for line in sys.stdin:
        value = json.loads(line)
        if not folders:
            folders = [KeptFolder(SyncConfig.model_validate(each), at, say) for at, each in enumerate(value["folders"])]
            continue
        for folder in folders:
            folder.take(Order(**value))
    os._exit(0)  # a thread may be waiting for a store for ever


def _end_with(arguments: threading.ExceptHookArgs) -> None:
    log.error("internal error: %r", arguments.exc_value, exc_info=arguments.exc_value)
    os._exit(EXIT_INTERNAL)


if __name__ == "__main__":
    main()
