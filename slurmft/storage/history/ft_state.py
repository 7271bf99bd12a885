"""``ft_state.json``: how long each section took in earlier attempts, by workload; one bounded file in the run folder.

An invalid file counts as missing: limits are learned anew then. A file of a newer slurmft is never written over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmft.errors import NewerFormat, StorageError
from slurmft.policy.timing.learned_timeouts import MAX_SAMPLES
from slurmft.system.files import duration, read_json, write_json

FT_STATE_FILE = "ft_state.json"
MAX_BYTES = 4 << 20
MAX_WORKLOADS = 8
MAX_SECTIONS = 128

log = logging.getLogger(__name__)

Samples = Mapping[str, Sequence[float]]
"""Seconds by the section's name, oldest first."""


def read(run_folder: Path, workload: str) -> dict[str, list[float]]:
    """Durations of this workload's sections; empty where none are known."""
    return _read_all(run_folder).get(workload, {})


def write(run_folder: Path, workload: str, samples: Samples) -> None:
    """Replace this workload's entry; those that were written least recently are forgotten first.

    Raises:
        OSError: the file is as it was.
        NewerFormat: it is a newer slurmft's.
    """
    path = run_folder / FT_STATE_FILE
    try:
        read_json(path, limit_bytes=MAX_BYTES)
    except NewerFormat:
        raise
    except StorageError as error:
        log.debug("%s is replaced: %s", path, error.what)
    kept: list[tuple[str, Samples]] = [(name, each) for name, each in _read_all(run_folder).items() if name != workload]
    kept = [*kept, (workload, samples)][-MAX_WORKLOADS:]
    workloads = [  # a list: their order is when they were last written
        [name, {section: [round(each, 3) for each in durations[-MAX_SAMPLES:]]
                for section, durations in list(sections.items())[:MAX_SECTIONS]}]
        for name, sections in kept
    ]  # fmt: skip
    write_json(path, {"workloads": workloads}, durable=False)


def _read_all(run_folder: Path) -> dict[str, dict[str, list[float]]]:
    path = run_folder / FT_STATE_FILE
    try:
        if (value := read_json(path, limit_bytes=MAX_BYTES)) is None:
            return {}
        return {
            str(name): {
                str(section): [duration(value) for value in each][-MAX_SAMPLES:]
                for section, each in list(sections.items())[:MAX_SECTIONS]
            }
            for name, sections in value["workloads"][-MAX_WORKLOADS:]
        }
    except (StorageError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        log.warning("the learned timeouts in %s are ignored: %s", path, getattr(error, "what", repr(error)))
        return {}
