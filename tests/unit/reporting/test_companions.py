"""Two companions of one run, as in a handover: only that of the owner publishes and tells, and each event once."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slurmft.config.run import RunConfig
from slurmft.storage.run_folder import Owner, RunFolder
from slurmft.system import processes

WAIT_S = 60.0

SUPERVISOR = """
import subprocess, sys
words = [sys.executable, "-P", "-m", "slurmft", "companion", sys.argv[1]]
companion = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
print(companion.pid, flush=True)
sys.stdin.read()
companion.stdin.close()
companion.wait()
"""

KEEP = """
import json, os, sys
message = json.load(sys.stdin)
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([os.getppid(), message["event"]]) + chr(10))
"""


class Supervisor:
    """A process that has a companion and does nothing else."""

    def __init__(self, config: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(config)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert self.process.stdout is not None
        self.companion = int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.communicate(timeout=WAIT_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunFolder, Callable[[], Supervisor], Path, Path]]:
    told, textfiles = tmp_path / "told", tmp_path / "textfiles"
    textfiles.mkdir()
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir(mode=0o700)
    config = RunConfig(
        command=["true"], run_folder=folder.path, metrics={"textfile_folder": textfiles, "interval_s": 1.0},
        notify={"command": [sys.executable, "-c", KEEP, str(told)], "events": ["worker failed"], "last_s": 5.0},
    )  # fmt: skip
    folder.config.write_text(config.as_yaml())
    made: list[Supervisor] = []

    def supervisor() -> Supervisor:
        made.append(Supervisor(folder.config))
        return made[-1]

    yield folder, supervisor, told, textfiles
    for one in made:
        one.process.kill()
        one.process.wait()


def owner_of(folder: RunFolder, supervisor: Supervisor, generation: int) -> Owner:
    return Owner(
        job=str(generation), restart=0, generation=generation, cluster="local", host=processes.me().host,
        pid=supervisor.process.pid, birth=processes.birth_of(supervisor.process.pid), folder=str(folder.path),
        inode=folder.path.stat().st_ino,
    )  # fmt: skip


def append(folder: RunFolder, event: str, number: int, **details: object) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(1_800_000_000 + number)) + "+00:00"
    line = {"format": 1, "at": at, "attempt": f"{number}.0.0", "event": event, **details}
    with (folder.path / "journal.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def messages(told: Path) -> list[list[object]]:
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def attempts(textfiles: Path) -> float | None:
    """The counter of attempts in the one file that there may be."""
    found = list(textfiles.glob("*.prom"))
    assert len(found) <= 1
    try:
        text = found[0].read_text() if found else ""
    except FileNotFoundError:
        return None
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return next((one.value for one in samples if one.name == "slurmft_run_attempts_total"), None)


def until(is_so: Callable[[], bool], watch: Callable[[], None]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        watch()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_turn_goes_from_one_to_the_other(run):
    folder, supervisor, told, textfiles = run
    seen: list[float] = []

    def watch() -> None:
        if (value := attempts(textfiles)) is not None:
            seen.append(value)

    old = supervisor()
    folder.take_over(first := owner_of(folder, old, 1))
    append(folder, "attempt started", 1)
    append(folder, "worker failed", 1, rank=0, node="n1")
    until(lambda: len(messages(told)) == 1 and attempts(textfiles) == 1, watch)

    new = supervisor()  # the candidate loads; the run is not its own yet
    append(folder, "worker failed", 1, rank=1, node="n1")
    until(lambda: len(messages(told)) == 2, watch)

    folder.take_over(replace(owner_of(folder, new, 2), job=first.job))
    append(folder, "attempt started", 2)
    append(folder, "worker failed", 2, rank=0, node="n2")
    until(lambda: len(messages(told)) >= 3 and attempts(textfiles) == 2, watch)

    old.end()  # it leaves later, and must take nothing with it
    watch()
    assert seen[-1] == 2, "the file of the new owner is still there"
    append(folder, "worker failed", 2, rank=1, node="n2")
    until(lambda: messages(told)[-1][0] == new.companion and len(messages(told)) >= 4, watch)
    new.end()
    tellers = [pid for pid, _ in messages(told)]
    assert tellers[:2] == [old.companion] * 2, "a candidate tells nothing"
    # what happens in the second of the change is told by either, and at worst by both: never by none
    assert len(tellers) in (4, 5)
    assert tellers[-1] == new.companion
    assert {event for _, event in messages(told)} == {"worker failed"}
    assert seen == sorted(seen), "a counter went back"
    assert list(textfiles.glob("*.prom")) == []
