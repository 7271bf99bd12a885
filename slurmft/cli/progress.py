"""Live progress of a run until it ends, then a short report."""

from __future__ import annotations

import time

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from slurmft.cli.main import console, say
from slurmft.operations.status import Overview, exit_code_of, has_ended, oldest_first, overviews
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import RunFolder, progress_of
from slurmft.supervisor.evidence import tail
from slurmft.system.foreign_text import one_line

FAST_S, SLURM_S = 0.3, 3.0
"""Reading the folder is cheap; Slurm is asked rarely."""

PLAIN_LINE_S = 10.0
"""Without a terminal there is no bar; a line now and then shows progress."""

_TOLD = frozenset(
    {
        EventName.STOP_REQUESTED,
        EventName.REQUEUED,
        EventName.RESUBMITTED,
        EventName.STARTING_ANEW,
        EventName.FIRST_STEP,
        EventName.WORKER_FAILED,
        EventName.STATE_KEPT,
        EventName.WORKER_HUNG,
        EventName.AGENT_LOST,
        EventName.STOP_OVERDUE,
        EventName.STOP_WITHOUT_A_SAVE,
        EventName.NOT_CONTINUED,
        EventName.SAVE_REQUESTED,
        EventName.SAVES_KEEP_FAILING,
        EventName.SAVES_WORK_AGAIN,
    }
)


def watch(run: RunFolder, *, told: int, stop_on_interrupt: bool) -> int:
    """Show progress until the run has ended; returns its exit code.

    ``told`` is the length of the journal before the run was submitted: events up to there are of earlier submissions.
    Ctrl-C stops the watching; where the run lives on this machine it asks the run to save and end first.
    """
    watcher = Watcher(run, told)
    try:
        view = watcher.follow()
    except KeyboardInterrupt:
        if not stop_on_interrupt:
            say(f"the run goes on; slurmft stop {run.path} ends it after a save")
            return 130
        say("saving, then ending; Ctrl-C again leaves the run to itself")
        run.request("KILL", "Ctrl-C")
        view = watcher.follow()
    return _report(run, view, run.journal().read()[told:])


class Watcher:
    """Follows one submission of a run."""

    def __init__(self, run: RunFolder, told: int) -> None:
        self._run, self._before, self._told = run, told, told
        self._began = time.time()
        self._console = console()
        self._last_line_at = time.monotonic()
        self._waiting_for = "starting"

    def follow(self) -> Overview:
        """Show what happens until the run has ended."""
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}", markup=False), TimeElapsedColumn(),
        )  # fmt: skip
        asked_slurm = 0.0
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task(one_line(self._run.path.name)[:24], total=None, note="starting")
            while True:
                time.sleep(FAST_S)
                events = self._tell_news()
                self._show_progress(progress, bar)
                if self._run.done() is None and time.monotonic() - asked_slurm < SLURM_S:
                    continue
                asked_slurm = time.monotonic()
                if (view := self._ended(events)) is not None:
                    return view

    def _tell_news(self) -> list[Event]:
        events = self._run.journal().read()
        for event in events[self._told :]:
            if event.event in _TOLD:
                self._console.print(one_line(_told(event)), highlight=False, markup=False)
        self._told = len(events)
        return events[self._before :]

    def _show_progress(self, progress: Progress, bar: TaskID) -> None:
        facts = progress_of(self._run)
        if (facts.at or 0.0) < self._began:
            progress.update(bar, note=one_line(self._waiting_for))
            return
        note = facts.state or ""
        if facts.until:
            note = f"{facts.step}/{facts.until} {note}"
            note += f" loss {facts.metric:.3f}" if facts.metric is not None else ""
        progress.update(bar, completed=facts.step or 0, total=facts.until or None, note=one_line(note))
        if not self._console.is_terminal and time.monotonic() - self._last_line_at > PLAIN_LINE_S:
            self._last_line_at = time.monotonic()
            self._console.print(f"{time.strftime('%H:%M:%S')} {one_line(note)}", highlight=False, markup=False)

    def _ended(self, events: list[Event]) -> Overview | None:
        view = overviews([self._run])[0]
        if view.state == "waiting" and view.detail != self._waiting_for:
            self._waiting_for = view.detail
            self._console.print(f"{time.strftime('%H:%M:%S')} {one_line(view.detail)}", highlight=False, markup=False)
        return view if has_ended(view, events, since=self._began) else None


def _told(event: Event) -> str:
    words = [f"{event.at.astimezone():%H:%M:%S} {event.event}"]
    if (rank := event.details.get("rank")) is not None:
        words[0] += f" (rank {rank} on {event.details.get('node')}, exit code {event.details.get('code')})"
    words += [str(event.details[key]) for key in ("reason", "error") if event.details.get(key)]
    if (seconds := event.details.get("seconds_since_stop_request")) is not None:
        words.append(f"{seconds:.1f} s after the stop was asked for")
    return ": ".join(words)


def _report(run: RunFolder, view: Overview, events: list[Event]) -> int:
    starts, stops = _starts_and_stops(events)
    in_all = _starts_and_stops(run.journal().read())
    earlier = "" if in_all == (starts, stops) else f"; in all submissions {in_all[0]} and {in_all[1]}"
    seconds = events[-1].seconds() - events[0].seconds() if events else 0.0
    say(f"{view.run}: {view.state}. {view.detail}")
    if view.until:
        say(f"  steps      {view.step} of {view.until}" + (f", loss {view.metric:.4f}" if view.metric else ""))
    say(f"  time       {seconds:.1f} s; starts: {starts}, stops: {stops}{earlier}")
    if view.saved is not None:
        say(f"  saved      step {view.saved} in {run.path}")
    if digest := _final_digest(run):
        say(f"  weights    sha256 {digest}")
    say(f"  the story  slurmft explain {run.path}")
    return exit_code_of(view, events)


def _starts_and_stops(events: list[Event]) -> tuple[int, int]:
    names = [event.event for event in events]
    return names.count(EventName.ATTEMPT_STARTED), names.count(EventName.STOP_REQUESTED)


def _final_digest(run: RunFolder) -> str | None:
    for path in reversed(oldest_first(run.attempts.glob("*/rank-0.log"))):
        for line in (tail(path) or "").splitlines()[-20:]:
            if line.startswith("final weights sha256: "):
                return line.removeprefix("final weights sha256: ").strip()
    return None
