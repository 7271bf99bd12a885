"""The process beside a supervisor that publishes its run's metrics and tells its events.

It is a process of its own, so that a long journal, a slow scraper, a dead webhook or a silent filesystem costs the
supervisor nothing. It ends when its standard input does, which the supervisor holds open: however that one ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.config.sections import NotifyConfig
from slurmft.errors import StorageError, UsageError
from slurmft.reporting import metrics
from slurmft.reporting.metrics import RunMetrics, families
from slurmft.storage.journal import Entry, JournalTail, Place
from slurmft.storage.run_folder import RunFolder
from slurmft.system import processes
from slurmft.system.authentication import token_in
from slurmft.system.exposition import Family
from slurmft.system.files import read_json, read_text, write_json
from slurmft.system.foreign_text import one_line

# --- notify ---
# Messages about chosen events of a run: to a command, or to a webhook. In a process of its own, which may wait.
#
# Each event is told once, also over requeues: ``notify.json`` in the run folder has how far the journal was told. A
# process that is killed between a message and that file tells it twice.

STATE_FILE = "notify.json"
MAX_URL_BYTES = 4096
MAX_REASON = 1000
FIRST_PAUSE_S = 1.0
HOUR_S = 3600.0
NEWS_S = 86_400.0
"""An older event is no news: of a run that got this section later, or a journal that was put in another's place."""


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


# --- The process beside a supervisor that publishes its run's metrics and tells its events ---

LOOK_S = 1.0
AGAIN_S = 30.0
"""Pause before a port that is in use is tried again: the companion of an attempt before may still have it."""

log = logging.getLogger(__name__)


def accompany(config: RunConfig, environment: Mapping[str, str], stdin: int = 0) -> int:
    """Publish and tell until ``stdin`` ends, and the last news after that; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends the job's signals to all of its processes
    run, ended = RunFolder(config.run_folder), threading.Event()
    turn = _Turn(run)
    threading.Thread(target=_wait_for_end, args=(stdin, ended), daemon=True, name="end").start()
    publisher = None
    if config.metrics.is_on:
        publisher = threading.Thread(target=_Publisher(config, run, turn).publish, args=(ended,), name="publisher")
        publisher.start()
    if config.notify.is_on:
        _tell(config, run, turn, environment, ended)
    ended.wait()
    if publisher is not None:
        publisher.join(LOOK_S)
    # not by the interpreter's own end, which waits for threads that a filesystem may hold
    logging.shutdown()
    os._exit(0)


def _wait_for_end(stdin: int, ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(stdin, 4096):
            pass
    ended.set()


class _Turn:
    """Whether the supervisor that started this process owns the run: in a handover two jobs have a companion each."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._supervisor = run, (processes.me().host, os.getppid())

    def is_ours(self) -> bool:
        try:
            owner = self._run.owner()
        except (OSError, StorageError):
            return True
        return owner is None or (owner.host, owner.pid) == self._supervisor


def _tell(
    config: RunConfig, run: RunFolder, turn: _Turn, environment: Mapping[str, str], ended: threading.Event
) -> None:
    def pause(seconds: float) -> bool:
        return ended.wait(seconds) and config.notify.last_s <= seconds

    notifier: Notifier | None = None
    said = ""
    while True:
        is_last = ended.wait(LOOK_S)
        try:
            if not turn.is_ours():
                notifier = None
            else:
                # made anew after another companion's turn, which has moved on in the journal
                notifier = notifier or Notifier(run.path, config.notify, environment, clock=time.time, pause=pause)
                notifier.tell_news()
        except UsageError as error:
            log.error("no messages are sent: %s", error)
            return
        except (OSError, StorageError) as error:
            if str(error) != said:
                log.warning("messages wait: %s", error)
            said = str(error)
        if is_last:
            return


class _Publisher:
    def __init__(self, config: RunConfig, run: RunFolder, turn: _Turn) -> None:
        self._settings, self._run, self._turn = config.metrics, run, turn
        self._metrics = RunMetrics(run)
        self._told: set[str] = set()
        self._scrapes: metrics.Scrapes | None = None
        self._try_at_s = 0.0
        self._lock = threading.Lock()

    def publish(self, ended: threading.Event) -> None:
        """Write the file now and then, and answer scrapes, until ``ended``."""
        path = None
        try:
            while True:
                if self._turn.is_ours():
                    self._open_port()
                    path = self._write(path)
                if ended.wait(self._settings.interval_s if self._scrapes is not None or path else LOOK_S):
                    return
        finally:
            is_ours = self._turn.is_ours()
            if self._scrapes is not None and is_ours:
                metrics.forget_port(self._run)
            if path is not None and is_ours:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _families(self) -> list[Family]:
        with self._lock:
            try:
                return families([self._metrics.look()])
            except (OSError, StorageError) as error:
                self._warn(f"the run cannot be read: {error}")
                return []

    def _write(self, before: Path | None) -> Path | None:
        if self._settings.textfile_folder is None or not (found := self._families()):
            return before
        labels = next(iter(found)).samples[0].labels
        path = metrics.textfile_of(self._settings.textfile_folder, labels["user"], labels["run"])
        try:
            metrics.write_textfile(path, found)
        except OSError as error:
            self._warn(f"{path} cannot be written: {error.strerror}")
            return before
        return path

    def _open_port(self) -> None:
        settings = self._settings
        if settings.port is None or self._scrapes is not None or time.monotonic() < self._try_at_s:
            return
        self._try_at_s = time.monotonic() + AGAIN_S
        try:
            token = "" if settings.token_file is None else token_in(settings.token_file)
            self._scrapes = metrics.Scrapes(settings.address, settings.port, self._families, token=token)
            metrics.note_port(self._run, settings.address, self._scrapes.port)
        except (OSError, UsageError) as error:
            self._warn(f"no metrics on {settings.address}, port {settings.port}: {error}")

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)
