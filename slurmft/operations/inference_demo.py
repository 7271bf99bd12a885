"""Batch inference to look at: prompts, a replica that is killed on the way, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import textwrap
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from slurmft.errors import StorageError
from slurmft.inference.ledger import segments_of
from slurmft.inference.requests import folder_of, read
from slurmft.operations.run_configuration import configuration_of
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import read_text, replace_atomically

PROMPT_BYTES = 48
LOOK_S = 0.05


def trained_model(runs: Path) -> Path | None:
    """The checkpoints of the newest finished run of the quickstart below ``runs``."""
    for folder in sorted(runs.glob("quickstart-[0-9]*"), reverse=True):
        run = RunFolder(folder)
        with contextlib.suppress(StorageError):
            if run.exists() and run.done() is not None:
                return configuration_of(run).checkpoint_dir
    return None


def write_prompts(path: Path, count: int) -> None:
    """Requests for the byte GPT: beginnings of lines of Python's own source.

    Raises:
        OSError: they cannot be written.
    """
    lines = [line for line in read_text(Path(textwrap.__file__)).splitlines() if len(line.strip()) > 8]
    requests = [
        {"custom_id": f"prompt-{number}", "prompt": lines[number % len(lines)][:PROMPT_BYTES]}
        for number in range(count)
    ]  # fmt: skip
    replace_atomically(path, "".join(json.dumps(request) + "\n" for request in requests))


class ReplicaKiller:
    """Kills the process of one replica, once, when some answers are there; a thread of its own.

    Args:
        run: on this machine.
        after: answers that must be committed before.
    """

    def __init__(self, run: RunFolder, after: int) -> None:
        self._run, self._after = run, after
        self._over = threading.Event()
        self.killed = 0
        """Processes that it has killed."""

        self._thread = threading.Thread(target=self._work, name="replica killer", daemon=True)

    def start(self) -> None:
        """Begin to watch the run."""
        self._thread.start()

    def stop(self) -> None:
        """Kill nothing any more."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(StorageError):
                if ((self._run.progress() or {}).get("step") or 0) >= self._after and self._kill_one():
                    return

    def _kill_one(self) -> bool:
        logs = re.compile(rf"{re.escape(str(self._run.path.resolve()))}/.*/rank-\d+\.log")
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if logs.fullmatch(str(Path(f"/proc/{pid}/fd/1").readlink())):
                    os.kill(pid, signal.SIGKILL)
                    self.killed += 1
                    return True
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A batch, from its journal and its files."""

    requests: int
    answered: int
    errors: int
    died: int
    """Replicas that ended without being asked to."""

    restarted: int
    twice: int
    """Answers that were computed more than once; one of each counts."""

    seconds: float
    output: Path


def summary_of(run: RunFolder) -> Summary:
    """How the batch of a finished run went.

    Raises:
        StorageError: its files cannot be read.
    """
    events = run.journal().read()
    written = [event for event in events if event.event == EventName.OUTPUT_WRITTEN]
    if not written:
        raise StorageError(f"run {run.path.name} has no output yet", hint=f"slurmft explain {run.path}")
    begun = [event for event in events if event.event == EventName.REQUESTS_OPENED]
    starts = [event.details["start"] for event in events if event.event == EventName.REPLICA_READY]
    seen: Counter[int] = Counter()
    for path in segments_of(folder_of(run.path)).iterdir():
        seen.update(record.value["index"] for record in read(path) if "index" in record.value)
    facts = written[-1].details
    return Summary(
        requests=begun[0].details["total"], answered=facts["answers"], errors=facts["errors"],
        died=sum(event.event == EventName.REPLICA_DIED for event in events),
        restarted=sum(start > 1 for start in starts), twice=sum(count - 1 for count in seen.values()),
        seconds=written[-1].seconds() - begun[0].seconds(), output=Path(facts["folder"]),
    )  # fmt: skip
