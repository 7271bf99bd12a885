"""Log messages through a thread: the log may lie on the very filesystem that stalls, and must block no caller."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from logging.handlers import QueueHandler, QueueListener

FLUSH_S = 2.0


class BackgroundLog:
    """Takes the root logger's handlers over until the process ends."""

    def __init__(self) -> None:
        logging.raiseExceptions = False  # an error of the log cannot be logged
        root = logging.getLogger()
        messages: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._listener: QueueListener | None = QueueListener(messages, *root.handlers)
        root.handlers = [QueueHandler(messages)]
        self._listener.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Write waiting records, but do not wait for a log that hangs. Nothing is logged afterwards."""
        listener, self._listener = self._listener, None
        if listener is not None:
            stopping = threading.Thread(target=listener.stop, daemon=True)
            stopping.start()
            stopping.join(FLUSH_S)
