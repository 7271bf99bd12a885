"""``slurmft explain``: the history of a run."""

from __future__ import annotations

from collections.abc import Sequence

import click

from slurmft.cli.arguments import run_argument
from slurmft.cli.main import say, say_error, say_json
from slurmft.errors import StorageError
from slurmft.operations.status import account_of, story
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.live import look_told
from slurmft.supervisor.observations import saves_told
from slurmft.system.foreign_text import one_line

_IN_FULL: dict[str, frozenset[str]] = {
    EventName.VERDICT: frozenset({"rank", "node", "suspects", "rerun", "traceback", "evidence"}),
    EventName.LAST_LOOK: frozenset({"culprits", "victims", "ranks", "folder"}),
}
"""Details of the newest of these events that are shown below the history, and not in its line."""


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def explain(*, run: RunFolder, as_json: bool) -> int:
    """Show the run's history: each event, each decision and its reason, from the journal.

    Below it: the evidence from the newest look at all ranks before a kill (the culprit with its section and stack, its
    victims, and where the files lie), and the rank that the newest verdict blames, with suspects, evidence and the end
    of the traceback. Saves that keep failing (``checkpoint.max_failed_saves``) are named at the end.
    """
    told = story(run)
    if as_json:
        for event in told.events:
            line = {"at": event.at.isoformat(), "attempt": event.attempt, "event": event.event, **event.details}
            say_json({"format": 1, **line})
    else:
        _tell(told.events)
        _tell_rows("the newest look at the ranks", look_told(told.events))
        _tell_rows("the newest verdict", account_of(told.events))
        _tell_rows("SAVES KEEP FAILING", saves_told(told.events))
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
    if isinstance(value, float):
        return f"{value:.3f}"
    return " ".join(str(value).split()) if not isinstance(value, list) else ",".join(map(str, value))
