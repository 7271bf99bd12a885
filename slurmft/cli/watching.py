"""Live progress of a run until it ends, then a short report."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slurmft.launch.overview import Overview, overviews
from slurmft.policy.verdict import EXIT_TEMPORARY
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import RunFolder

FAST_S, SLURM_S = 0.3, 3.0
"""The folder is cheap to look at; Slurm is asked rarely, and only about a run that shows no progress."""

_TOLD = frozenset({"stop requested", "requeued", "resubmitted", "starting anew", "first step", "worker failed",
                   "agent lost", "stop overdue", "stop without a save", "not continued", "save requested"})  # fmt: skip


def watch(run: RunFolder, *, told: int, stop_on_interrupt: bool) -> int:
    """Show progress until the run has ended; returns its exit code.

    ``told`` is the length of the journal before the run was submitted: what stands there is of earlier submissions.
    Ctrl-C stops the watching; where the run lives on this machine it asks the run to save and end first.
    """
    console = Console()
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total} steps"),
        TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(run.path.name, total=None, note="starting")
        try:
            last = _follow(run, told, progress, bar)
        except KeyboardInterrupt:
            if not stop_on_interrupt:
                progress.stop()
                click.echo(f"the run goes on; slurmft stop {run.path} ends it after a save")
                return 130
            progress.update(bar, note="saving, then ending (Ctrl-C again leaves it to itself)")
            run.request("KILL", "Ctrl-C")
            last = _follow(run, told, progress, bar)
    return _report(run, last, run.journal().read()[told:])


def _follow(run: RunFolder, before: int, progress: Progress, bar: TaskID) -> Overview:
    told, asked_slurm, since = before, 0.0, time.time()
    while True:
        time.sleep(FAST_S)
        events = run.journal().read()
        for event in events[told:]:
            if event.event in _TOLD:
                progress.console.print(_told(event), highlight=False)
        told = len(events)
        _show(run.progress(), since, progress, bar)
        if run.done() is not None or time.monotonic() - asked_slurm > SLURM_S:
            asked_slurm = time.monotonic()
            view = overviews([run])[0]
            if view.state == "finished" or (
                view.state == "stopped" and any(e.event == "decision" for e in events[before:])
            ):
                return view
            if view.state in ("stopped", "new") and time.time() - since > 30.0:
                return view


def _show(facts: Any, since: float, progress: Progress, bar: TaskID) -> None:
    if not facts or facts["at"] < since or not facts.get("until"):
        return
    loss = f"loss {facts['metric']:.3f}" if facts.get("metric") is not None else ""
    progress.update(bar, completed=facts["step"], total=facts["until"], note=f"{facts['state']} {loss}")


def _told(event: Event) -> str:
    words = [f"{event.at.astimezone():%H:%M:%S} {event.event}"]
    words += [str(event.details[key]) for key in ("reason", "error") if event.details.get(key)]
    if (seconds := event.details.get("seconds_since_stop_request")) is not None:
        words.append(f"{seconds:.1f} s after the stop was asked for")
    return ": ".join(words)


def _report(run: RunFolder, view: Overview, events: list[Event]) -> int:
    decisions = [event for event in events if event.event == "decision"]
    code = int(decisions[-1].details["exit_code"]) if decisions else EXIT_TEMPORARY
    starts = sum(event.event == "attempt started" for event in events)
    stops = sum(event.event == "stop requested" for event in events)
    click.echo(f"{view.run}: {view.state}. {view.detail}")
    click.echo(f"  steps      {view.step} of {view.until}" + (f", loss {view.metric:.4f}" if view.metric else ""))
    seconds = events[-1].seconds() - events[0].seconds() if events else 0.0
    click.echo(f"  time       {seconds:.1f} s, {starts} starts, {stops} stops")
    click.echo(f"  saved      step {view.saved} in {run.path}")
    if digest := _final_digest(run):
        click.echo(f"  weights    sha256 {digest}")
    click.echo(f"  the story  slurmft explain {run.path}")
    return 0 if view.state == "finished" else code


def _final_digest(run: RunFolder) -> str | None:
    for path in sorted(run.attempts.glob("*/rank-0.log"), key=lambda path: path.stat().st_mtime, reverse=True):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]:
            if line.startswith("final weights sha256: "):
                return line.removeprefix("final weights sha256: ").strip()
    return None
