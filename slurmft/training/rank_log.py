"""What slurmft logs in a worker, with its rank."""

from __future__ import annotations

import logging
import os


def log_with_rank() -> None:
    """Log to standard error, each line with the rank; nothing where the trainer has its own logging."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="slurmft rank %(rank)s: %(message)s", handlers=[_handler()])


def _handler() -> logging.Handler:
    handler = logging.StreamHandler()
    rank = os.environ.get("RANK", "0")

    def add_rank(record: logging.LogRecord) -> bool:
        record.rank = rank
        return True

    handler.addFilter(add_rank)
    return handler
