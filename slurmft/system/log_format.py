"""How records are written to logs, in every process: as text that a terminal may show later."""

from __future__ import annotations

import logging

from slurmft.system.foreign_text import MAX_TEXT, block


class LogFormatter(logging.Formatter):
    """Records as safe text.

    Args:
        indent: before the further lines of a record, so that none looks like a record of its own.
    """

    def __init__(self, form: str, datefmt: str | None = None, *, indent: str = "  ") -> None:
        super().__init__(form, datefmt)
        self._indent = indent

    def format(self, record: logging.LogRecord) -> str:
        """One record; that of a logger which is not ours begins with its name."""
        text = super().format(record)
        if not record.name.startswith(("slurmft", "root", "__main__")):
            text = text.replace(record.message, f"{record.name}: {record.message}", 1)
        return block(text, MAX_TEXT).replace("\n", f"\n{self._indent}")


def log_to_stderr(
    form: str, *, level: int = logging.INFO, datefmt: str | None = None, indent: str = "  "
) -> logging.Handler:
    """Send all records to standard error, where the process has no logging of its own yet; returns the handler."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(form, datefmt, indent=indent))
    logging.basicConfig(level=level, handlers=[handler])
    return handler
