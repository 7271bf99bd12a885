"""A run in a storm of faults: what strikes it, how each fault is undone, and what every wait is explained by.

One table says what can happen (``Kind``); the chance of a seed chooses. The time from a fault to the next new step is
measured, and where nothing moves for a while Slurm is asked what the job waits for: a wait that neither a fault in
force, nor Slurm, nor a known limit explains fails the test.
"""

import json
import os
import random
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slurm.conftest import Run
from slurm.small_disk import SmallDisk
from slurmft.errors import LabError, StorageError
from slurmft.storage.journal import Event

RECOVERY_S = 280.0
"""The longest time without a new step that is waited for: a lost batch host, then Slurm's own 121 s."""

CRON_S = 8.0
"""How often `requeue --rescue` looks at a run that stands still, as cron does every few minutes."""

IMPATIENT_S = 20.0
"""In Slurm's own delay after which a user says `slurmft requeue`, which lets the waiting job begin."""

QUIET_S = 3.0
"""From here on a time without a new step is looked into."""

ROUND, DUE = 5, 0.2
"""So many seeds in a row meet every kind: each has its share, of which one is next with this chance."""

WENT_ON = 3
"""New steps of the same attempt after a fault that say that it goes on: ranks that live may end one or two."""

OVERTAKEN = 20
"""The same for faults that end an attempt in their own time (a stop, a preemption)."""

STARTING = frozenset({"attempt started", "agents ready", "workers started", "requests opened", "node answers",
                      "endpoint opened", "router ready"})  # fmt: skip
"""Newest events of a run whose processes are starting."""

BUSY = 2.0
"""Processes for each core that want to run (the load average), above which a start may take longer in proportion."""

WAITS = {
    "RUNNING": 25.0,  # what a fault needs to be noticed comes on top
    "RUNNING starting": 25.0,  # processes that import torch: more on a machine that has more to do (BUSY)
    "PENDING BeginTime": 125.0,  # Slurm's own delay of a requeue, where ours is overtaken
    "PENDING": 45.0,  # for nodes: until Slurm counts a dead one as DOWN and it is back, or the preemptor has ended
    "COMPLETING": 25.0,  # SlurmdTimeout and KillWait
    "not in the queue": CRON_S + 12.0,  # until cron brings the run back
    "no answer": 20.0,  # a controller that starts reads its state first
}
"""Seconds for each fault since the last step that the job may be seen in a state; in force means: no limit of ours."""

OURS = re.compile(
    r"^(slurmft\.[\w.]++(?! FAILED)|KeyError|AttributeError|TypeError|AssertionError|NameError|IndexError)\b", re.M
)
"""How the last line of an exception begins that neither a fault nor a lost peer explains."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    weight: int
    strike: Callable[[Any], str | None]
    """Returns what was done, in words; None where its target has just gone."""

    takes_s: float = 6.0
    """Seconds in which slurmft may notice it while the job runs."""

    ends: bool = False
    """It ends the attempt, though not at once."""

    clear: bool = False
    """Strikes only while no other fault is in force that has to be undone."""

    undone: str = ""
    """How it is undone, where the run itself does not."""


@dataclass(slots=True)
class Held:
    """A fault in force."""

    undo: Callable[[], bool]
    """Whether it is undone; asked again until then."""

    due_s: float
    excuses: bool
    """No step can be expected meanwhile."""


@dataclass(slots=True)
class Struck:
    """A fault and what came of it."""

    kind: str
    said: str
    at: str
    step: int
    seconds: float | None = None
    """Until the next new step; None where the run was over before."""

    at_s: float = 0.0
    """Since the epoch."""

    journal: dict[str, float] = field(default_factory=dict)
    """Events until then, and when each came first, in seconds after the fault."""


@dataclass(slots=True)
class _Open:
    struck: Struck
    attempt: str
    began_s: float
    at_s: float
    events: int
    seen_in: str = ""
    """The attempt, older than the fault, that has made steps since: which first, and when."""
    first_step: int = 0
    first_new_s: float = 0.0


@dataclass(slots=True)
class Gap:
    """A time without a new step."""

    seconds: float
    waits: dict[str, float]
    """Seconds by what the job was seen to wait for."""

    kinds: list[str]
    load: float = 0.0
    """The highest load average for each core meanwhile."""

    def unexplained(self, kinds: Mapping[str, Kind]) -> dict[str, float]:
        """The waits above their limits, with their seconds."""
        found = {}
        for label, seconds in self.waits.items():
            if label.startswith("while "):
                continue
            limit = WAITS.get(label, WAITS.get(label.partition(" ")[0], 0.0))
            if label != "RUNNING":
                limit *= max(1, len(self.kinds))
            if label == "RUNNING starting":
                limit *= max(1.0, self.load / BUSY)
            if label.startswith("RUNNING"):
                limit += sum(kinds[kind].takes_s for kind in self.kinds)
            if seconds > limit:
                found[label] = round(seconds, 1)
        return found


class Storm:
    """A run, and the chance that meets it."""

    name: ClassVar[str]
    kinds: ClassVar[dict[str, Kind]]

    def __init__(self, run: Run, seed: int, disk: SmallDisk | None = None) -> None:
        self.run, self.lab, self.seed, self.disk = run, run.lab, seed, disk
        self.chance = random.Random(seed)
        self._due = [name for place, name in enumerate(self.kinds) if place % ROUND == seed % ROUND]
        """Kinds that come whatever their weight."""
        self.done: list[Struck] = []
        self.gaps: list[Gap] = []
        self.held: dict[str, Held] = {}
        self.began_s = self._moved_s = self._next_cron_s = self._next_sample_s = time.monotonic()
        self._open: list[_Open] = []
        self._since: list[str] = []
        """Kinds that have struck since the last new step."""
        self._waits: Counter[str] = Counter()
        self._is_hurried, self._load = False, 0.0
        self._mark: tuple[str, int] = ("", 0)
        self._read: tuple[int, list[Event]] = (-1, [])
        words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        self._commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()

    # what is seen of the run

    def story(self) -> str:
        faults = [f"{one.at} at {one.step}: {one.kind}: {one.said} -> {one.seconds}" for one in self.done]
        gaps = [str(gap) for gap in self.gaps if gap.unexplained(self.kinds)]
        return "\n".join([f"seed {self.seed}", *faults, *gaps, self.run.story()])

    def journal(self) -> list[Event]:
        """All events; read anew only where there are more."""
        try:
            size = self.run.folder.journal().path.stat().st_size
        except OSError:
            return []
        if size != self._read[0]:
            self._read = (size, self.run.events())
        return self._read[1]

    def last(self, name: str) -> Event | None:
        return next((event for event in reversed(self.journal()) if event.event == name), None)

    def hosts(self) -> list[str]:
        """Nodes that work for the run, by the journal."""
        raise NotImplementedError

    def batch_host(self) -> str:
        started = self.last("attempt started")
        return "" if started is None else str(started.details["host"])

    def progress(self) -> tuple[str, int, bool]:
        """Attempt, step, and whether that step is one of this attempt's own."""
        seen = self.run.folder.progress() or {}
        step = int(seen.get("step") or 0)
        return str(seen.get("attempt", "")), step, step > int(seen.get("resumed") or 0)

    def step(self) -> int:
        return self._mark[1]

    def is_over(self) -> bool:
        return self.run.folder.done() is not None

    def is_settled(self) -> bool:
        """Each fault so far was followed by new steps."""
        return not self._open

    # what happens all the time

    def look(self) -> None:
        """One look: progress, what is to be undone, cron, and what a run waits for that stands still."""
        now_s = time.monotonic()
        self._see_progress(now_s)
        for name, held in list(self.held.items()):
            if now_s >= held.due_s:
                is_undone = self.attempt(held.undo)
                held.due_s = time.monotonic() + 1.0
                if (took_s := time.monotonic() - now_s) > QUIET_S:
                    self._waits[f"while {name}"] += took_s
                    self._next_sample_s = time.monotonic() + 1.0
                if is_undone:
                    del self.held[name]
        quiet_s = now_s - self._moved_s
        if quiet_s > RECOVERY_S:
            pytest.fail(f"no new step within {RECOVERY_S:.0f} s: {dict(self._waits)}\n{self.story()}")
        if quiet_s > QUIET_S and now_s >= self._next_sample_s:
            self._sample(now_s)
        if quiet_s > CRON_S and now_s >= self._next_cron_s and "controller" not in self.held:
            self._next_cron_s = now_s + CRON_S
            self.attempt(lambda: self.run.slurmft("requeue", "--rescue", str(self.run.path), check=False))
        if self._waits["PENDING BeginTime"] > IMPATIENT_S and not self._is_hurried:
            self._is_hurried = True
            self.attempt(lambda: self.run.slurmft("requeue", str(self.run.path), check=False))
        time.sleep(0.05)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not self.is_over():
            self.look()

    def _see_progress(self, now_s: float) -> None:
        try:
            attempt, step, own = self.progress()
        except StorageError:
            return
        if not own or (attempt, step) == self._mark:
            return
        self._mark = (attempt, step)
        self.end_gap(now_s)
        self.at_new_step()
        for one in list(self._open):
            self._settle(one, attempt, step, now_s)
        self._since = [one.struck.kind for one in self._open]

    def end_gap(self, now_s: float) -> None:
        seconds = now_s - self._moved_s
        if seconds > QUIET_S:
            waits = {label: round(amount, 1) for label, amount in self._waits.items()}
            self.gaps.append(Gap(round(seconds, 1), waits, list(self._since), round(self._load, 1)))
        self._moved_s = self._next_sample_s = now_s
        self._waits.clear()
        self._is_hurried, self._load = False, 0.0

    def at_new_step(self) -> None:
        """For more that is to be looked at."""

    def _settle(self, one: _Open, attempt: str, step: int, now_s: float) -> None:
        """Closed by the first step of an attempt that began later, or by some steps of one that goes on."""
        if not self._began_after(one, attempt):
            if attempt != one.seen_in:
                one.seen_in, one.first_step, one.first_new_s = attempt, step, now_s
            if step - one.first_step < (OVERTAKEN if self.kinds[one.struck.kind].ends else WENT_ON):
                return
            now_s = one.first_new_s
        self._close(one, now_s)

    def _began_after(self, one: _Open, attempt: str) -> bool:
        for event in reversed(self.journal()):
            if event.event == "attempt started" and event.attempt == attempt:
                return event.seconds() > one.at_s
        return attempt != one.attempt  # not written yet, as the disk is full

    def _close(self, one: _Open, now_s: float | None) -> None:
        one.struck.seconds = None if now_s is None else round(now_s - one.began_s, 2)
        for event in self.journal()[one.events :]:
            word = f"{event.event}: {event.details.get('cause')}" if event.event == "verdict" else event.event
            one.struck.journal.setdefault(word, round(event.seconds() - one.at_s, 1))
        self._open.remove(one)

    def _sample(self, now_s: float) -> None:
        since_s, self._next_sample_s = max(self._next_sample_s - 1.0, self._moved_s), now_s + 1.0
        self._load = max(self._load, os.getloadavg()[0] / (os.cpu_count() or 1))
        excuses = sorted(name for name, held in self.held.items() if held.excuses)
        self._waits[f"while {', '.join(excuses)}" if excuses else self._queue_state()] += now_s - since_s

    def _queue_state(self) -> str:
        try:
            job = self.run.folder.jobs()[-1]
            asked = self.lab.run(["squeue", "-h", "-j", job, "-o", "%T %r"], check=False, timeout=15)
        except (LabError, StorageError, IndexError):
            return "no answer"
        if asked.returncode != 0:
            return "not in the queue" if "Invalid job id" in asked.stderr else "no answer"
        state, _, reason = (asked.stdout.splitlines() or [""])[0].partition(" ")
        if state == "RUNNING" and self.journal()[-1].event in STARTING:
            return "RUNNING starting"
        if state in ("RUNNING", "COMPLETING"):
            return state
        return f"{state} {reason}" if state == "PENDING" else "not in the queue"

    # faults

    def strike(self) -> bool:
        """One fault of a kind that is possible now; False where its target has just gone."""
        kinds = [name for name, kind in self.kinds.items() if not (kind.clear and self.held)]
        due = [name for name in self._due if name in kinds]
        if due and self.chance.random() < DUE:
            name = due[0]
            self._due.remove(name)
        else:
            name = self.chance.choices(kinds, [self.kinds[name].weight for name in kinds])[0]
        began_s, at_s, events, (attempt, step) = time.monotonic(), time.time(), len(self.journal()), self._mark
        said = self.attempt(lambda: self.kinds[name].strike(self))
        if said is None:
            return False
        struck = Struck(name, str(said), time.strftime("%T"), step, at_s=at_s)
        self.done.append(struck)
        self._open.append(_Open(struck, attempt, began_s, at_s, events))
        self._since.append(name)
        print(f"{self.name} {self.seed}: {struck.at} at {step}: {name}: {said}", flush=True)
        return True

    def attempt(self, action: Callable[[], Any]) -> Any:
        """None where the lab cannot do it at this moment, as the node is dead or Slurm away."""
        try:
            return action()
        except LabError:
            return None

    def hold(self, name: str, undo: Callable[[], bool], *, for_s: float, excuses: bool = False) -> None:
        """``undo`` is due after so many seconds."""
        self.held[name] = Held(undo, time.monotonic() + for_s, excuses)

    @contextmanager
    def ending(self) -> Iterator[list[str]]:
        """What goes wrong inside is in the list afterwards, and all faults are undone; a Ctrl-C is no failure."""
        failures: list[str] = []
        try:
            yield failures
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - told by the caller, after the faults are undone
            failures.append(f"{type(error).__name__}: {error}")
        finally:
            self._undo_all()
        self.end_gap(time.monotonic())
        for one in list(self._open):  # the run was over before
            self._close(one, None)

    def _undo_all(self) -> None:
        deadline_s = time.monotonic() + 90
        while self.held and time.monotonic() < deadline_s:
            for name, held in list(self.held.items()):
                if self.attempt(held.undo):
                    del self.held[name]
            time.sleep(0.3)

    # the result

    def record(self, failures: list[str], **result: Any) -> None:
        """Append a line of JSON to SLURMFT_FAULTS_OUTPUT; keep the run folder of a failure in SLURMFT_FAULTS_KEEP."""
        if failures and (keep := os.environ.get("SLURMFT_FAULTS_KEEP")):
            place = Path(keep) / f"{self.name}-{self.seed}"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(self.run.path, place / "run", symlinks=True, ignore_dangling_symlinks=True)
            shutil.copytree(self.lab.folder / "log", place / "slurm", ignore_dangling_symlinks=True)
            (place / "story").write_text("\n".join([*failures, self.story()]))
        if not (output := os.environ.get("SLURMFT_FAULTS_OUTPUT")):
            return
        line = {
            "storm": self.name, "seed": self.seed, "faults": len(self.done),
            "failures": [one[:300] for one in failures],
            "seconds": round(time.monotonic() - self.began_s), **result,
            "commit": self._commit,
            "slurm": self.lab.run(["sinfo", "--version"], check=False).stdout.strip(),
            "causes": Counter(event.details["cause"] for event in self.journal() if event.event == "verdict"),
            "struck": [asdict(one) for one in self.done], "gaps": [asdict(gap) for gap in self.gaps],
        }  # fmt: skip
        with Path(output).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def unexplained_waits(self) -> list[str]:
        return [
            f"nothing explains a wait: {found} of {gap}" for gap in self.gaps if (found := gap.unexplained(self.kinds))
        ]


def seeds() -> list[int]:
    chosen = os.environ.get("SLURMFT_FAULT_SEEDS", "1")
    parts = [part.partition("-") for part in chosen.split(",")]
    return [seed for first, _, last in parts for seed in range(int(first), int(last or first) + 1)]


def errors_in_logs(run: Run) -> list[str]:
    """Exceptions of ours in any log."""
    found = []
    for path in (path for path in run.path.rglob("*") if path.suffix in (".log", ".err", ".out") and path.is_file()):
        text = path.read_text(errors="replace")
        name = path.relative_to(run.path)
        found += [f"{name}: {text[max(0, m.start() - 1500) : m.end() + 300]}" for m in OURS.finditer(text)]
        if "Traceback" in text and not path.name.startswith("rank-"):
            found.append(f"{name}: {text[text.index('Traceback') :][:1500]}")
    return found
