"""Messages about chosen events of a run: to a command, or to a webhook. In a process of its own, which may wait.

Each event is told once, also over requeues: ``notify.json`` in the run folder has how far the journal was told. A
process that is killed between a message and that file tells it twice.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from slurmft.config.notify import NotifyConfig
from slurmft.errors import StorageError, UsageError
from slurmft.storage.history.journal_tail import Entry, JournalTail, Place
from slurmft.system.files import read_json, write_json
from slurmft.system.foreign_text import one_line
from slurmft.system.opening import read_text

STATE_FILE = "notify.json"
MAX_URL_BYTES = 4096
MAX_REASON = 1000
FIRST_PAUSE_S = 1.0
HOUR_S = 3600.0
NEWS_S = 86_400.0
"""An older event is no news: of a run that got this section later, or a journal that was put in another's place."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """One event, in words that are safe to show."""

    run: str
    event: str
    text: str
    at: float
    """Unix time of the event."""

    attempt: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    left_out: int = 0
    """Messages before this one that the limit of an hour kept back."""

    def as_json(self) -> dict[str, Any]:
        """For a command or a webhook; the format only grows."""
        return {"format": 1, **asdict(self)}

    def as_slack(self) -> dict[str, Any]:
        """A message of Slack, in which nothing of a run is a link, a mention or markup."""
        more = f" ({self.left_out} earlier messages were left out)" if self.left_out else ""
        return {"text": _slack(f"slurmft: {self.run}: {self.text}{more}"), "mrkdwn": False, "unfurl_links": False}


def _slack(text: str) -> str:
    # https://api.slack.com/reference/surfaces/formatting#escaping; a zero-width space takes markup its meaning, also
    # in Mattermost, which knows @all and @channel without brackets
    for sign, instead in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(sign, instead)
    return "".join(f"\u200b{each}\u200b" if each in "*_~`@#[]!|" else each for each in text)


def message_of(run: str, entry: Entry, chosen: frozenset[str]) -> Message | None:
    """The message about an event, where it is one of the ``chosen``."""
    facts = entry.details
    kinds = [str(facts.get(name, "")) for name in ("action", "cause")]
    if not chosen & {entry.name, *(f"{entry.name}: {kind}" for kind in kinds if kind)}:
        return None
    kind = next((kind for kind in kinds if kind), "")
    reason = one_line(str(facts.get("reason") or facts.get("error") or ""), MAX_REASON)
    where = ", ".join(map(str, facts["nodes"])) if isinstance(facts.get("nodes"), list) else facts.get("node")
    text = one_line(entry.name, 80) + f": {one_line(kind, 80)}" * bool(kind) + f": {reason}" * bool(reason)
    text += f" ({one_line(str(where), 200)})" if where else ""
    small = {name: facts[name] for name in ("job", "rank", "node", "step", "in_a_row", "exit_code", "saved_step")
             if type(facts.get(name)) in (int, float, str)}  # fmt: skip
    shown = {name: one_line(value, 200) if isinstance(value, str) else value for name, value in small.items()}
    return Message(run=one_line(run, 200), event=one_line(entry.name, 80), text=text, at=entry.at,
                   attempt=one_line(entry.attempt, 200), facts=shown)  # fmt: skip


def webhook_url(config: NotifyConfig, environment: Mapping[str, str]) -> str:
    """The URL, from its file or variable; empty where there is none.

    Raises:
        UsageError: it cannot be read, others can read it, or it is none; the message does not repeat it.
    """
    if config.webhook_variable is not None:
        url, where = environment.get(config.webhook_variable, ""), f"the variable {config.webhook_variable}"
    elif config.webhook_file is not None:
        path = config.webhook_file
        url, where = _url_in(path), str(path)
    else:
        return ""
    if not url.startswith(("https://", "http://")) or any(sign.isspace() or not sign.isprintable() for sign in url):
        raise UsageError(f"{where} does not hold one URL", hint="one line that begins with https://")
    return url


def _url_in(path: Path) -> str:
    try:
        if path.stat().st_mode & 0o077:
            raise UsageError(f"others may read the URL in {path}", hint=f"chmod 600 {path}")
        return read_text(path, owners={os.geteuid()}, limit_bytes=MAX_URL_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The messages of a run go where its owner said."""

    def redirect_request(self, *_arguments: Any, **_more: Any) -> None:
        return None


def post(url: str, body: Mapping[str, Any], timeout_s: float) -> str:
    """Post JSON; returns what went wrong, or nothing. Never says where: the URL is a secret."""
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        # in here: what is no URL raises with the URL in its words
        request = urllib.request.Request(  # noqa: S310 - its scheme was looked at
            url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        with opener.open(request, timeout=timeout_s) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        error.close()
        return f"it answered {error.code}"
    except urllib.error.URLError as error:
        reason = error.reason
        return getattr(reason, "strerror", None) or type(reason).__name__
    except (OSError, ValueError, HTTPException) as error:
        return getattr(error, "strerror", None) or type(error).__name__
    return ""


def run_command(words: tuple[str, ...], body: Mapping[str, Any], timeout_s: float) -> str:
    """Run a command with the message as JSON on its standard input; returns what went wrong, or nothing."""
    try:
        ended = subprocess.run(
            words, input=json.dumps(body).encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{words[0]} took longer than {timeout_s:g} s"
    except (OSError, ValueError) as error:
        return f"{words[0]}: {getattr(error, 'strerror', None) or error}"
    return f"{words[0]} ended with {ended.returncode}" if ended.returncode else ""


class Notifier:
    """Tells the chosen events of one run.

    Args:
        pause: waits so many seconds; True: there is no time for another try.
    """

    def __init__(
        self, run_folder: Path, config: NotifyConfig, environment: Mapping[str, str],
        *, clock: Callable[[], float], pause: Callable[[float], bool],
    ) -> None:  # fmt: skip
        self._folder, self._config, self._clock, self._pause = run_folder, config, clock, pause
        self._chosen = frozenset(config.events)
        self._url = webhook_url(config, environment)
        self._tail = JournalTail(run_folder, self._read())
        self._told_at: deque[float] = deque()
        self._left_out = 0

    def tell_news(self) -> None:
        """Tell each chosen event that is new; returns when each was taken, or given up.

        Raises:
            OSError: the journal, or the state file, cannot be read or written.
        """
        before = self._tail.place.offset
        for entry in self._tail.news():
            if self._clock() - entry.at > NEWS_S:
                continue
            if (message := message_of(self._folder.name, entry, self._chosen)) is not None:
                if self._may_tell():
                    self._tell(message)
                self._write()
        if self._tail.place.offset != before:
            self._write()

    def _may_tell(self) -> bool:
        now = self._clock()
        while self._told_at and now - self._told_at[0] > HOUR_S:
            self._told_at.popleft()
        if len(self._told_at) >= self._config.per_hour:
            self._left_out += 1
            return False
        self._told_at.append(now)
        return True

    def _tell(self, message: Message) -> None:
        message = Message(**{**asdict(message), "left_out": self._left_out})
        ways = [("webhook", self._post)] if self._url else []
        ways += [("command", self._run)] if self._config.command else []
        for name, way in ways:
            problem, pause_s = way(message), FIRST_PAUSE_S
            for _ in range(self._config.retries):
                if not problem or self._pause(pause_s):
                    break
                problem, pause_s = way(message), 2 * pause_s
            if problem:
                log.warning("the %s did not take a message about %r: %s", name, message.event, problem)
        self._left_out = 0

    def _post(self, message: Message) -> str:
        body = message.as_slack() if self._config.form == "slack" else message.as_json()
        return post(self._url, body, self._config.timeout_s)

    def _run(self, message: Message) -> str:
        return run_command(self._config.command, message.as_json(), self._config.timeout_s)

    def _read(self) -> Place | None:
        try:
            facts = read_json(self._folder / STATE_FILE)
        except StorageError:
            facts = None
        if facts is None:
            return None
        offset, head = facts.get("offset"), facts.get("head")
        return Place(offset, head) if type(offset) is int and offset >= 0 and isinstance(head, str) else None

    def _write(self) -> None:
        write_json(self._folder / STATE_FILE, asdict(self._tail.place), durable=False)
