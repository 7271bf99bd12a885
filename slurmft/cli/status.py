"""What runs are doing, their history and the output of a worker: ``slurmft status``, ``explain``, ``logs``; and
``watch``, a full-screen view, and the progress of one run.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from slurmft.cli import arguments
from slurmft.cli.main import console, counted, say, say_error, say_json, say_raw, table
from slurmft.errors import StorageError, UsageError
from slurmft.operations import control
from slurmft.storage import run_folder
from slurmft.storage.journal import Event, EventName, JournalTail
from slurmft.storage.run_folder import LiveView, RunFolder, progress_of
from slurmft.system.files import opened, read_part
from slurmft.system.foreign_text import Terminal, one_line

if TYPE_CHECKING:
    from rich.console import Console

# --- ``slurmft status``: what runs are doing ---

WATCH_INTERVAL_S = 2.0


_COLOURS = {"finished": "green", "running": "cyan", "waiting": "yellow", "stopped": "red", "unknown": "magenta"}


@click.command()
@arguments.optional_run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--watch", is_flag=True, help="Refresh until interrupted.")
def status(*, run: RunFolder | None, as_json: bool, watch: bool) -> int:
    """Show what runs are doing: RUN, or all below SLURMFT_RUNS (default: runs). Roles have a line of their own."""

    def look() -> list[control.Overview]:
        return control.overviews(run_folder.with_roles([run] if run is not None else arguments.every_run()))

    shown, entries = console(), look()
    if as_json:
        for entry in entries:
            say_json(entry.as_json())
    elif not watch:
        shown.print(_table(entries))
    if as_json or not watch:
        return StorageError.exit_code if run is not None and entries[0].state == "damaged" else 0
    with Live(_table(entries), console=shown, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(WATCH_INTERVAL_S)
                live.update(_table(look()), refresh=True)
        except KeyboardInterrupt:
            return 0


def _table(entries: Sequence[control.Overview]) -> RenderableType:
    if not entries:
        return Text(f"no runs in {arguments.runs_root().absolute()} (SLURMFT_RUNS names another folder)")
    made = table("run", "state", "step", "saved", "loss", "jobs", "starts", "detail", wrapped=("run", "detail"))
    for entry in entries:
        made.add_row(
            Text(one_line(entry.run)),
            Text(entry.state, style=_COLOURS.get(entry.state, "")),
            _steps(entry),
            "-" if entry.saved is None else str(entry.saved),
            "-" if entry.metric is None else f"{entry.metric:.4f}",
            Text(one_line(" > ".join(entry.jobs[-3:]) or "-")),
            str(entry.attempts),
            Text(one_line(entry.detail)),
        )
    return made


# --- ``slurmft explain``: the history of a run ---

_IN_FULL: dict[str, frozenset[str]] = {
    EventName.VERDICT: frozenset({"rank", "node", "suspects", "rerun", "traceback", "evidence"}),
    EventName.LAST_LOOK: frozenset({"culprits", "victims", "ranks", "folder"}),
}
"""Details of the newest of these events that are shown below the history, and not in its line."""


@click.command()
@arguments.newest_run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def explain(*, run: RunFolder, as_json: bool) -> int:
    """Show the run's history: each event, each decision and its reason, from the journal.

    Below it: the evidence from the newest look at all ranks before a kill (the culprit with its section and stack, its
    victims, and where the files lie), and the rank that the newest verdict blames, with suspects, evidence and the end
    of the traceback. Saves that keep failing (``checkpoint.max_failed_saves``) are named at the end.
    """
    told = control.story(run)
    if as_json:
        for event in told.events:
            line = {"at": event.at.isoformat(), "attempt": event.attempt, "event": event.event, **event.details}
            say_json({"format": 1, **line})
    else:
        _tell(told.events)
        _tell_rows("the newest look at the ranks", control.look_told(told.events))
        _tell_rows("the newest verdict", control.account_of(told.events))
        _tell_rows("SAVES KEEP FAILING", control.saves_told(told.events))
    return _tell_damage(run, told.unreadable, len(told.events))


def _tell(events: Sequence[Event]) -> None:
    attempt = None
    for event in events:
        if event.attempt and event.attempt != attempt:
            attempt = event.attempt
            job, restart, *_ = [*attempt.rsplit(".", 2), "?"]
            say("")
            say(f"job {job}, restart {restart}", bold=True)
        say(_line(event))


def _tell_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        say("")
        say(f"{title}, on attempt {rows[0][1]}", bold=True)
    before = ""
    for name, text in rows[1:]:
        say(f"  {'' if name == before else name:<10} {one_line(text)}".rstrip())
        before = name


def _tell_damage(run: RunFolder, unreadable: int, events: int) -> int:
    path = run.journal().path
    if not unreadable and not events:
        raise StorageError(f"{path} is empty", hint=f"the supervisor's own messages may be in {run.logs}")
    if not events:
        raise StorageError(
            f"{path} is damaged: none of its {unreadable} lines can be read",
            hint=f"move it away, and the next submission begins a new one; see also {run.logs}",
        )
    if unreadable:
        why = "torn by a writer that died, or damaged"
        say_error(f"{unreadable} lines of {path} cannot be read and are left out ({why})")
    return 0


def _line(event: Event) -> str:
    at = event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    details = dict(event.details)
    reason = str(details.pop("reason", ""))
    if hidden := _IN_FULL.get(event.event):
        details = {key: value for key, value in details.items() if key not in hidden}
    facts = "  ".join(f"{key}={_shown(value)}" for key, value in details.items() if value not in ("", None, []))
    return f"  {at}  {event.event:<20} {reason}{'  ' * bool(reason and facts)}{facts}".rstrip()


def _shown(value: object) -> str:
    if isinstance(value, float) and _EPOCHS[0] < value < _EPOCHS[1]:
        return datetime.fromtimestamp(value).astimezone().strftime("%H:%M:%S")
    if isinstance(value, float):
        return f"{value:.3f}"
    return " ".join(str(value).split()) if not isinstance(value, list) else ",".join(map(str, value))


_EPOCHS = (1.5e9, 4e9)
"""Seconds since 1970 that are a moment of a run, and no measured value."""


# --- ``slurmft logs``: the output of a worker ---

MAX_SHOWN_BYTES = 64 << 20
"""Only the end of a log is shown: more is no use on a terminal, and a sparse file could take hours to print."""


@click.command()
@arguments.newest_run_argument
@click.option("--rank", default=0, type=arguments.RANK, show_default=True, help="Which worker's output.")
@click.option("--attempt", help="JOB.RESTART.CYCLE; the newest when empty.")
@click.option("--all-attempts", is_flag=True, help="Every attempt's, oldest first.")
@click.option("-n", "--lines", default=0, type=arguments.LINES, help="Only the last lines of each.")
@click.option("-f", "--follow", is_flag=True, help="Go on printing as it grows.")
def logs(*, run: RunFolder, rank: int, attempt: str | None, all_attempts: bool, lines: int, follow: bool) -> int:
    """Print a worker's output, and the supervisor's when there is none."""
    files = control.logs_of(run, rank=rank, attempt=attempt)
    for path in files if all_attempts else files[-1:]:
        if all_attempts:
            say(f"==> {path.parent.name}/{path.name} <==")
        text = read_part(path, -MAX_SHOWN_BYTES, MAX_SHOWN_BYTES).decode(errors="replace")
        _show("\n".join(text.removesuffix("\n").split("\n")[-lines:]) + "\n" if lines else text, Terminal())
        if not lines and (size := path.stat().st_size) > MAX_SHOWN_BYTES:
            say_error(f"these are the last {MAX_SHOWN_BYTES} of {size} bytes of {path}")
    return _follow(files[-1]) if follow else 0


def _show(text: str, terminal: Terminal) -> None:
    """A worker's own words: exactly for files and pipes, and without anything but colours for a terminal."""
    say_raw(terminal.feed(text) if sys.stdout.isatty() else text)


def _follow(path: Path) -> int:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    terminal = Terminal()
    with contextlib.suppress(KeyboardInterrupt), opened(path) as descriptor:
        os.lseek(descriptor, 0, os.SEEK_END)
        while True:
            if part := os.read(descriptor, 1 << 16):
                _show(decoder.decode(part), terminal)
            else:
                time.sleep(0.3)
    return 0


# --- What ``slurmft watch`` shows, as values: all runs of a folder, or one run with its ranks and newest events ---
# Everything in it comes from files that others may have written; the view makes it safe to show.

KEPT_EVENTS = 500
CURVE_POINTS = 200
SLURM_EVERY_S = 10.0
"""Slurm is asked no more often than this, however often the view is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One moment."""

    runs: Sequence[control.Overview]
    chosen: control.Overview | None = None
    """The run that is looked at closely; None: all are listed."""

    view: LiveView = field(default_factory=LiveView)
    events: Sequence[Event] = ()
    """The newest events, oldest first."""

    span: str | None = None
    since: float | None = None
    replicas: Sequence[tuple[str, str]] = ()
    """Node and number of each replica that can answer."""

    curve: Sequence[float] = ()
    """The loss, or the first other number that the trainer reports, over the run's steps."""

    curve_name: str = ""
    problem: str = ""
    at: float = 0.0


class Watcher:
    """Looks at runs again and again; cheap: of a journal only what is new is read.

    Args:
        chosen: the run to look at closely; None: all of ``runs``.
    """

    def __init__(self, runs: Sequence[RunFolder], chosen: RunFolder | None) -> None:
        self._runs, self._chosen = [chosen] if chosen is not None else runs, chosen
        self._tail = None if chosen is None else JournalTail(chosen.path)
        self._begin(0)
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._seen: Sequence[control.Overview] = ()
        self._asked_s = -math.inf
        self._curve: tuple[str, Sequence[float]] = ("", ())

    def _begin(self, begun: int) -> None:
        from slurmft.reporting.metrics import RunCounts  # `slurmft status` needs none

        self._counts, self._begun = RunCounts(), begun

    def look(self) -> Scene:
        """This moment."""
        if time.monotonic() - self._asked_s > SLURM_EVERY_S:
            self._seen, self._asked_s = control.overviews(self._runs), time.monotonic()
            if self._chosen is not None and (found := curve_of(self._chosen))[1]:
                self._curve = found
        if self._chosen is None or self._tail is None:
            return Scene(runs=self._seen, at=time.time())
        problem = ""
        try:
            for entry in self._tail.news():
                if self._tail.begun != self._begun:
                    self._begin(self._tail.begun)
                    self._events.clear()
                self._counts.take((entry,))
                self._events.append(entry)
        except OSError as error:
            problem = f"the journal cannot be read: {error.strerror or error}"
        counts = self._counts
        return Scene(
            runs=self._seen, chosen=self._seen[0], view=run_folder.read(self._chosen.path), events=tuple(self._events),
            span=counts.span, since=counts.since, replicas=sorted(counts.ready_replicas), problem=problem,
            curve_name=self._curve[0], curve=self._curve[1], at=time.time(),
        )  # fmt: skip


def curve_of(run: RunFolder) -> tuple[str, Sequence[float]]:
    """Name and values of the first number that the trainer reports: a loss, where there is one."""
    from slurmft.storage.history import METRICS_FILE, curves  # `slurmft status` needs none

    name, points = next(iter(curves(run.path / METRICS_FILE, CURVE_POINTS).items()), ("", []))
    return name, [value for _, value in points]


def known_step_s(view: LiveView) -> list[float]:
    """Seconds of a step, of the ranks where that is known; ascending."""
    return sorted(each for each in view.step_s if each is not None and each > 0)


def open_sections(view: LiveView) -> list[tuple[str, int, float]]:
    """Each section that is open: its name, in how many ranks, and the longest time; the longest first."""
    count: Counter[str] = Counter()
    longest: dict[str, float] = {}
    for rank, name in enumerate(view.sections):
        if name:
            count[name] += 1
            held_s = (view.section_s[rank] if rank < len(view.section_s) else None) or 0.0
            longest[name] = max(longest.get(name, 0.0), held_s)
    return sorted(((name, count[name], longest[name]) for name in count), key=lambda each: (-each[2], each[0]))


LEVELS = 8


def heat(view: LiveView) -> list[int | None]:
    """For each rank how slow its steps are: 0 as fast as the fastest, 7 twice as slow as the median or more; None
    where that is not known."""
    known = known_step_s(view)
    if not known:
        return [None] * max(len(view.steps), len(view.step_s))
    low, median = known[0], known[len(known) // 2]
    span = max(2 * median - low, 0.1 * median)
    return [
        None if each is None else min(LEVELS - 1, max(0, int(LEVELS * (each - low) / span))) for each in view.step_s
    ]


def slowest(view: LiveView, count: int) -> list[tuple[int, float, str]]:
    """Rank, seconds of a step and node of the slowest ranks."""
    known = [(each, rank) for rank, each in enumerate(view.step_s) if each is not None]
    return [
        (rank, each, view.nodes[rank] if rank < len(view.nodes) else "")
        for each, rank in sorted(known)[: -count - 1 : -1]
    ]


# --- ``slurmft watch``: a full-screen view of runs ---

_HEAT = ("green", "green", "green", "yellow", "yellow", "yellow", "red", "bold red")
_BLOCKS, _PLAIN = "▁▂▃▄▅▆▇█", "01234567"
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONCE_EVENTS = 20
MIN_WIDTH, MIN_HEIGHT = 20, 6


class _Ended(Exception):
    """A signal came."""


@click.command()
@arguments.optional_run_argument
@click.option("--once", is_flag=True, help="Print the view once, and end.")
@click.option(
    "--interval", default=2.0, show_default=True, type=arguments.Amount(0.2, 3600), help="Seconds between two looks."
)
def watch(*, run: RunFolder | None, once: bool, interval: float) -> int:
    """Watch runs: all of them, or the ranks, saves and events of RUN, until q is pressed.

    With RUN: where the run is, the step time of every rank as a map, the sections that are open now, where the newest
    save lies, and events as they come; of a run with roles a line for each. NO_COLOR and TERM=dumb are honoured; a view
    of any width will do.
    """
    runs = run_folder.with_roles([run] if run is not None else arguments.every_run())
    watcher = Watcher(runs, run if len(runs) == 1 else None)
    shown = console(width_in_pipe=80)
    if once:
        for line in _lines(watcher.look(), shown.width, _signs(shown), events=ONCE_EVENTS, height=None):
            shown.print(line, soft_wrap=True)
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") in ("dumb", ""):
        raise UsageError("this is no terminal that can be drawn on", hint="slurmft watch --once prints the view")
    with _terminal() as pressed:
        _draw(shown, watcher.look, interval, pressed)
    return 0


def _draw(shown: Console, look: Callable[[], Scene], interval_s: float, pressed: Callable[[float], str]) -> None:
    def frame(scene: Scene) -> Text:
        width, height = shown.size
        lines = _lines(scene, width, _signs(shown), events=height, height=height)[:height]
        for line in lines:
            line.truncate(width)
        return Text("\n", no_wrap=True, overflow="crop").join(lines)

    scene = look()
    with contextlib.suppress(_Ended), Live(console=shown, screen=True, auto_refresh=False) as live:
        size, looked_s = shown.size, time.monotonic()
        live.update(frame(scene), refresh=True)
        while pressed(0.2) not in ("q", "Q", "\x03", "\x04"):
            due = time.monotonic() - looked_s >= interval_s
            if due:
                scene, looked_s = look(), time.monotonic()
            if due or shown.size != size:
                size = shown.size
                live.update(frame(scene), refresh=True)


@contextlib.contextmanager
def _terminal() -> Iterator[Callable[[float], str]]:
    """Keys at once and unseen; the function waits for one so many seconds. All is as before afterwards, also after a
    signal, which raises ``_Ended``."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def on_signal(number: int, _frame: object) -> None:
        for each in _ENDS:
            signal.signal(each, signal.SIG_IGN)  # the terminal is restored in peace
        raise _Ended(number)

    def pressed(within_s: float) -> str:
        if not select.select([keyboard], [], [], within_s)[0]:
            return ""
        data = os.read(keyboard, 64)
        if not data:  # the terminal is gone
            raise _Ended
        return data[:1].decode(errors="replace")

    handlers = {number: signal.signal(number, on_signal) for number in _ENDS}
    try:
        tty.setcbreak(keyboard)
        yield pressed
    except _Ended:
        pass
    finally:
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            if signal.getsignal(number) is on_signal:  # after one they stay ignored, or the second of two would kill
                signal.signal(number, handler)


def _signs(shown: Console) -> str:
    """One for each level of heat: as digits where blocks would be no help."""
    return _BLOCKS if shown.encoding.lower().startswith("utf") and os.environ.get("TERM") != "dumb" else _PLAIN


# What is drawn: lines, from the top, each in a width


def _lines(scene: Scene, width: int, signs: str, *, events: int, height: int | None) -> list[Text]:
    width = max(width, MIN_WIDTH)
    at = time.strftime("%H:%M:%S", time.localtime(scene.at))
    if scene.chosen is None:
        return [
            _text(f"slurmft  {at}  {counted(len(scene.runs), 'run')}  (q ends)", "bold"),
            *_list(scene.runs, width),
        ]
    head = [*_head(scene, scene.chosen, width, at), *_curve(scene, width, signs)]
    is_live = scene.chosen.state in ("running", "unknown")  # else its ranks are of an attempt that is over
    body = [*_map(scene, width, signs, height), *_sections(scene)] if is_live else []
    kept = events if height is None else max(0, max(height, MIN_HEIGHT) - len(head) - len(body) - 1)
    shown = [_event(entry) for entry in list(scene.events)[-kept:]] if kept else []
    return [*head, *body, _text("events", "bold"), *shown]


def _text(text: str, style: str = "") -> Text:
    return Text(one_line(text), style=style, no_wrap=True, overflow="crop")


def _list(runs: Sequence[control.Overview], width: int) -> list[Text]:
    if not runs:
        return [_text(f"no runs in {arguments.runs_root().absolute()} (SLURMFT_RUNS names another folder)")]
    longest = min(max(len(one_line(each.run)) for each in runs), max(8, width // 3))
    lines = []
    for each in runs:
        line = _text(f"{one_line(each.run)[:longest]:<{longest}}  ")
        line.append(f"{each.state:<9}", _COLOURS.get(each.state, ""))
        line.append(f" {_steps(each):>15}{_loss(each)}  {one_line(each.detail)}")
        lines.append(line)
    return lines


def _steps(run: control.Overview) -> str:
    return "-" if run.step is None else f"{run.step}/{run.until or '?'}"


def _loss(run: control.Overview) -> str:
    return "" if run.metric is None else f"  loss {run.metric:.4f}"


def _head(scene: Scene, run: control.Overview, width: int, at: str) -> list[Text]:
    title = _text(f"{run.run}  ", "bold")
    title.append(run.state, _COLOURS.get(run.state, ""))
    title.append(f"  {at}  (q ends)")
    lines = [title, _text(run.detail)]
    if run.step is not None and run.until:
        done = min(1.0, run.step / run.until)
        room = max(5, min(40, width - 40))
        bar = "#" * int(done * room)
        lines.append(_text(f"[{bar:<{room}}] {run.step} of {run.until}{_loss(run)}{_pace(scene, run)}"))
    else:
        lines.append(_text(f"step {_steps(run)}{_loss(run)}"))
    if scene.span is not None and scene.since is not None and run.state != "finished":
        lines.append(
            _text(f"{scene.span} for {_duration(scene.at - scene.since)}; {counted(run.attempts, 'start')} so far")
        )
    saved = "none by this attempt" if run.saved is None else f"step {run.saved}"
    if run.state == "running" and scene.view.tiers:
        saved += f"  ({', '.join(f'{name}: {where}' for name, where in scene.view.tiers.items())})"
    lines.append(_text(f"newest save  {saved}", "bold red" if run.failed_saves else ""))
    if scene.problem:
        lines.append(_text(scene.problem, "red"))
    if scene.replicas:
        nodes = sorted({node for node, _ in scene.replicas})
        lines.append(_text(f"replicas     {len(scene.replicas)} ready on {len(nodes)} nodes: {', '.join(nodes)}"))
    return lines


def _pace(scene: Scene, run: control.Overview) -> str:
    """Steps in a second and the time that is left at this pace; nothing while it is not known."""
    known = known_step_s(scene.view)
    if not known or run.state != "running" or run.step is None or not run.until:
        return ""
    step_s = known[len(known) // 2]
    pace = f"{1 / step_s:.3g} steps/s" if step_s < 1 else f"{step_s:.3g} s a step"
    return f"  {pace}, {_duration(max(0, run.until - run.step) * step_s)} left"


def _curve(scene: Scene, width: int, signs: str) -> list[Text]:
    """One line: the mean of what falls into each column, from the lowest value to the highest."""
    values, room = scene.curve, max(8, width - 40)
    if len(values) < 2:
        return []
    each = -(-len(values) // room)
    means = [math.fsum(part) / len(part) for part in (values[at : at + each] for at in range(0, len(values), each))]
    low, span = min(means), (max(means) - min(means)) or 1.0
    line = "".join(signs[min(LEVELS - 1, int(LEVELS * (mean - low) / span))] for mean in means)
    return [_text(f"{one_line(scene.curve_name, 11):<11}  {line}  {values[0]:.4g} to {values[-1]:.4g}")]


def _map(scene: Scene, width: int, signs: str, height: int | None) -> list[Text]:
    levels = heat(scene.view)
    if not levels:
        return []
    age_s = scene.at - scene.view.at
    about = _text(f"step time of {len(levels)} ranks, {signs[0]} fast, {signs[-1]} slow", "bold")
    if age_s > 60:
        about.append(f", {_duration(age_s)} old", "bold red")
    # as many ranks to a sign as are needed for the map to leave half of the screen; the slowest counts
    rows = max(1, len(levels) if height is None else height // 2 - 2)
    room = max(8, width - 8)
    each = max(1, -(-len(levels) // (rows * room)))
    cells = [_worst(levels[first : first + each]) for first in range(0, len(levels), each)]
    if each > 1:
        about.append(f", {each} ranks to a sign")
    lines = [about]
    for first in range(0, len(cells), room):
        line = _text(f"{first * each:>6}  ")
        for level in cells[first : first + room]:
            line.append(*(("?", "dim") if level is None else (signs[level], _HEAT[level])))
        lines.append(line)
    worst = slowest(scene.view, 3)
    if worst:
        lines.append(_text("slowest  " + ", ".join(
            f"rank {rank}{f' on {one_line(node, 60)}' if node else ''} {step_s:.3f} s" for rank, step_s, node in worst
        )))  # fmt: skip
    return lines


def _worst(levels: Sequence[int | None]) -> int | None:
    return max((level for level in levels if level is not None), default=None)


def _sections(scene: Scene) -> list[Text]:
    found = open_sections(scene.view)[:4]
    if not found:
        return []
    told = ", ".join(
        f"{one_line(name, 60)} in {counted(count, 'rank')}, up to {_duration(held_s)}" for name, count, held_s in found
    )
    line = _text("open now  ")
    if (used := scene.view.hang_used) is not None and used > 0.8:
        line.append(f"{used:.0%} of a time limit  ", "bold red")  # first: what does not fit is cut off
    line.append(told)
    return [line]


def _event(entry: Event) -> Text:
    facts = entry.details
    kind = next((f"{facts[name]}: " for name in ("cause", "action") if facts.get(name)), "")
    told = kind + next((str(facts[name]) for name in ("reason", "error", "what") if facts.get(name)), "")
    where = f" {facts['node']}" if facts.get("node") else ""
    line = _text(f"{time.strftime('%H:%M:%S', time.localtime(entry.seconds()))}  ")
    line.append(f"{one_line(entry.event, 40):<20}", "red" if entry.event in _BAD else "")
    line.append(one_line(f"{where} {told}".rstrip(), 500))
    return line


_BAD = frozenset({"worker failed", "worker hung", "agent lost", "saves keep failing", "save failed", "replica died",
                  "replica down", "supervisor lost", "stop without a save"})  # fmt: skip


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


# --- Live progress of a run until it ends, then a short report ---

FAST_S, ENDING_S, SLURM_S = 0.3, 3.0, 15.0
"""Reading the folder is cheap; Slurm is asked rarely, and more often once the journal says that nothing follows."""

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


def follow(run: RunFolder, *, told: int, stop_on_interrupt: bool) -> int:
    """Show progress until the run has ended; returns its exit code.

    ``told`` is the length of the journal before the run was submitted: events up to there are of earlier submissions.
    Ctrl-C stops the watching; where the run lives on this machine it asks the run to save and end first.
    """
    watcher = _Following(run, told)
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


class _Following:
    """Follows one submission of a run."""

    def __init__(self, run: RunFolder, told: int) -> None:
        self._run, self._before, self._told = run, told, told
        self._asks_slurm = bool(run.own_jobs(newest=1))
        self._began = time.time()
        self._console = console(width_in_pipe=80)
        self._last_line_at = time.monotonic()
        self._waiting_for = "starting"

    def follow(self) -> control.Overview:
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
                every_s = SLURM_S if self._asks_slurm and not control.is_over(events) else ENDING_S
                if self._run.done() is None and time.monotonic() - asked_slurm < every_s:
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

    def _ended(self, events: list[Event]) -> control.Overview | None:
        view = control.overviews([self._run])[0]
        if view.state == "waiting" and view.detail != self._waiting_for:
            self._waiting_for = view.detail
            self._console.print(f"{time.strftime('%H:%M:%S')} {one_line(view.detail)}", highlight=False, markup=False)
        return view if control.has_ended(view, events, since=self._began) else None


def _told(event: Event) -> str:
    words = [f"{event.at.astimezone():%H:%M:%S} {event.event}"]
    if (rank := event.details.get("rank")) is not None:
        words[0] += f" (rank {rank} on {event.details.get('node')}, exit code {event.details.get('code')})"
    words += [str(event.details[key]) for key in ("reason", "error") if event.details.get(key)]
    if (seconds := event.details.get("seconds_since_stop_request")) is not None:
        words.append(f"{seconds:.1f} s after the stop was asked for")
    return ": ".join(words)


def _report(run: RunFolder, view: control.Overview, events: list[Event]) -> int:
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
    return control.exit_code_of(view, events)


def _starts_and_stops(events: list[Event]) -> tuple[int, int]:
    names = [event.event for event in events]
    return names.count(EventName.ATTEMPT_STARTED), names.count(EventName.STOP_REQUESTED)


def _final_digest(run: RunFolder) -> str | None:
    from slurmft.supervisor.observations import tail

    for path in reversed(control.oldest_first(run.attempts.glob("*/rank-0.log"))):
        for line in (tail(path) or "").splitlines()[-20:]:
            if line.startswith("final weights sha256: "):
                return line.removeprefix("final weights sha256: ").strip()
    return None
