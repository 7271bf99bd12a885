"""The measured values of a run, and the process beside a supervisor that publishes them and tells its run's events.

    run = RunMetrics(folder)
    text = exposition.text(families([run.look()]))       # reads what is new in the journal

``docs/how-to/monitoring.md`` lists all names. A run has at most ``MAX_SERIES`` series: no label is a step, a rank or
a text, and jobs and nodes are labels of the one ``slurmft_run_info``.

The process that publishes is one of its own, so that a long journal, a slow scraper, a dead webhook or a silent
filesystem costs the supervisor nothing. It ends when its standard input does, which the supervisor holds open:
however that one ends.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import slurmft
from slurmft.config.run import RunConfig
from slurmft.config.sections import NotifyConfig
from slurmft.errors import StorageError, UsageError
from slurmft.inference.endpoint import HighAvailabilityCluster
from slurmft.policy.values import Strangers
from slurmft.policy.verdict import PLANNED, Cause, steps_at_risk
from slurmft.scheduler.slurm import configured_cluster
from slurmft.storage import run_folder
from slurmft.storage.journal import Event, EventName, JournalPosition, JournalTail
from slurmft.storage.run_folder import LOCAL_PREFIX, Progress, RunFolder, progress_of, user_name
from slurmft.system import processes
from slurmft.system.exposition import COUNTER, GAUGE, Family, Sample, encoded, text
from slurmft.system.files import checked_url, read_json, replace_atomically, token_in, url_in, write_json
from slurmft.system.foreign_text import one_line

# --- What is counted of a run, from its journal alone: so counts survive requeues and never go back ---

QUEUE, START, WORK, BETWEEN = "queue", "start", "work", "between attempts"
SPANS = (QUEUE, START, WORK, BETWEEN)
"""Where the time of a run goes: it waits for nodes, gets to its first step, works, or is between two attempts."""

OTHER = "other"

_BEGINS: Mapping[str, str | None] = {
    EventName.SUBMITTED: QUEUE, EventName.REQUEUED: QUEUE, EventName.RESUBMITTED: QUEUE, EventName.RESCUING: QUEUE,
    EventName.ATTEMPT_STARTED: START, EventName.FIRST_STEP: WORK, EventName.REQUESTS_OPENED: WORK,
    EventName.ENDPOINT_OPENED: WORK, EventName.VERDICT: BETWEEN, EventName.CANCELLED: None,
    EventName.SUBMISSION_FAILED: None, EventName.NOT_CONTINUED: None,
}  # fmt: skip
"""Event -> the span that begins with it; None: the run waits for nothing."""

_COUNTED: Mapping[str, tuple[str, str]] = {
    EventName.ATTEMPT_STARTED: ("attempts", "Attempts that were started."),
    EventName.REQUEUED: ("requeues", "Times that the run's job was requeued."),
    EventName.RESUBMITTED: ("resubmissions", "Successors that were submitted."),
    EventName.WORKER_FAILED: ("worker_failures", "Ranks that failed."),
    EventName.WORKER_HUNG: ("hangs", "Hangs that were found."),
    EventName.AGENT_LOST: ("nodes_lost", "Nodes whose agent fell silent."),
    EventName.SAVE_FAILED: ("saves_failed", "Saves that failed."),
    EventName.STRAGGLER_DETECTED: ("stragglers", "Slow nodes that were found."),
    EventName.FAULT_INJECTED: ("faults_injected", "Faults that were injected on purpose."),
    EventName.SUPERVISOR_LOST: ("supervisors_lost", "Supervisors that were killed."),
    EventName.REPLICA_DIED: ("replicas_died", "Replicas that ended or hung."),
    EventName.REQUEST_GIVEN_UP: ("requests_given_up", "Requests that killed engines."),
}  # fmt: skip
"""Event -> name and meaning of its count."""

NAMES = frozenset(map(str, (*_COUNTED, *_BEGINS, EventName.DECISION, EventName.REPLICA_READY, EventName.REPLICA_DOWN)))
"""The events that change a count; no other need be read."""

ABOUT: Mapping[str, str] = dict(_COUNTED.values())
_CAUSES = frozenset(each.value for each in Cause)


class RunCounts:
    """The counts of one run so far, and what it is doing by its journal."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter(dict.fromkeys(ABOUT, 0))
        """By the names of ``ABOUT``."""

        self.ends: Counter[str] = Counter()
        """Verdicts, by cause."""

        self.span_s: dict[str, float] = dict.fromkeys(SPANS, 0.0)
        """Seconds of spans that have ended."""

        self.lost_steps = 0
        """Steps that had to be done again."""

        self.span: str | None = None
        """The span that goes on."""

        self.since: float | None = None
        """When it began, as Unix time."""

        self.job = self.nodes = self.attempt = ""
        self.ready_replicas: set[tuple[str, str]] = set()

    def take(self, entries: Iterable[Event]) -> None:
        """Count these events; those of a newer slurmft, and values that do not fit, are left out."""
        for entry in entries:
            self._take(entry)

    def _take(self, entry: Event) -> None:
        if (counted := _COUNTED.get(entry.event)) is not None:
            self.events[counted[0]] += 1
        if entry.event in _BEGINS:
            self._begin(_BEGINS[entry.event], entry.seconds())
        match entry.event:
            case EventName.ATTEMPT_STARTED:
                self.attempt, self.job = entry.attempt, entry.attempt.partition(".")[0]
                self.nodes = str(entry.details.get("nodes") or entry.details.get("host") or "")
                self.ready_replicas.clear()
            case EventName.VERDICT:
                self._judge(entry.details)
            case EventName.DECISION if entry.details.get("action") in ("stop", "finish"):
                self._begin(None, entry.seconds())
            case EventName.REPLICA_READY:
                self.ready_replicas.add(_replica(entry.details))
            case EventName.REPLICA_DIED | EventName.REPLICA_DOWN:
                self.ready_replicas.discard(_replica(entry.details))

    def _judge(self, facts: Mapping[str, Any]) -> None:
        cause = str(facts.get("cause", ""))
        self.ends[cause if cause in _CAUSES else OTHER] += 1
        first, last, saved = (facts.get(name) for name in ("first_step", "last_step", "saved_step"))
        if type(first) is int and type(last) is int:
            self.lost_steps += steps_at_risk(first, last, saved if type(saved) is int else None)

    def _begin(self, span: str | None, at: float) -> None:
        if self.span == span == QUEUE:
            return  # submitted, and then requeued: one wait
        if self.span is not None and self.since is not None:
            self.span_s[self.span] += max(0.0, at - self.since)  # clocks of two hosts differ
        self.span, self.since = span, at


def category_of(cause: str) -> str:
    """``planned``, ``finished`` or ``failure``."""
    if cause == Cause.FINISHED.value:
        return "finished"
    return "planned" if cause in {*(each.value for each in PLANNED), Cause.CANCELLED.value} else "failure"


def _replica(facts: Mapping[str, Any]) -> tuple[str, str]:
    return str(facts.get("node")), str(facts.get("replica"))


# --- The measured values of a run: counts from its journal, and what its supervisor last wrote of the living run ---

MAX_SERIES = 60
_GAUGES: Mapping[str, str] = {
    "active": "1 from the start of an attempt to its verdict, by the journal.",
    "finished": "1 when the run is complete.",
    "waiting_since_timestamp_seconds": "Since when the run waits for nodes; missing while it does not.",
    "report_timestamp_seconds": "When the supervisor last wrote its progress.",
    "progress_timestamp_seconds": "When the newest step was reached (batch inference: the newest answer).",
    "save_timestamp_seconds": "When the newest save of this attempt was done.",
    "step": "Newest step (batch inference: requests that are answered).",
    "until_step": "Step at which the run is complete (batch inference: all requests).",
    "saved_step": "Newest step in a checkpoint of this attempt.",
    "loss": "The metric that the trainer reports.",
    "ranks": "Ranks of the attempt.",
    "failed_saves": "Saves that failed in a row.",
    "save_interval_steps": "Steps between two saves, where the configuration counts them in steps.",
    "heartbeat_age_seconds": "Age of the oldest sign of life of a rank, at the time of the report.",
    "hang_budget_used_ratio": "The largest part of a time limit that a rank's section has used up; at 1 it hangs.",
    "restarts_left": "Failures of one kind that the run survives yet without further progress; the least of all kinds.",
    "replicas_ready": "Inference: replicas that can answer.",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One run at one moment."""

    labels: Mapping[str, str]
    info: Mapping[str, str]
    gauges: Mapping[str, float]
    """By the names of ``_GAUGES``."""

    counts: Mapping[str, float]
    ends: Mapping[str, float]
    span_s: Mapping[str, float]


class RunMetrics:
    """One run's values, look after look."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._tail = run, JournalTail(run.path, names=NAMES)
        self._counts, self._begun = RunCounts(), 0
        self._shown: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """The greatest values that were shown: a journal that was cut or damaged does not make counts go back."""

    def look(self) -> Look:
        """Read what is new. What cannot be read is left out, as if it was not there.

        Raises:
            OSError: the journal cannot be read.
        """
        for entry in self._tail.news():
            if self._tail.begun != self._begun:
                self._counts, self._begun = RunCounts(), self._tail.begun
            self._counts.take((entry,))
        counts, shown = self._counts, self._shown
        return Look(
            labels=_labels(self._run, counts.attempt),
            info={"job": counts.job, "node": counts.nodes, "attempt": counts.attempt, "version": slurmft.__version__},
            gauges=dict(self._gauges()),
            counts=_grown(shown["counts"], {**counts.events, "lost_steps": counts.lost_steps}),
            ends=_grown(shown["ends"], counts.ends),
            span_s=_grown(shown["span_s"], counts.span_s),
        )

    def _gauges(self) -> Iterator[tuple[str, float]]:
        counts = self._counts
        is_active = counts.span in ("start", "work")
        finished = self._finished()
        yield "active", float(is_active and not finished)
        yield "finished", float(finished)
        if counts.span == "queue" and counts.since is not None and not finished:
            yield "waiting_since_timestamp_seconds", counts.since
        if is_active and counts.ready_replicas:
            yield "replicas_ready", float(len(counts.ready_replicas))
        progress = progress_of(self._run)
        if progress.attempt != counts.attempt and is_active:
            return  # of the attempt before: the new one has reported nothing yet
        yield from _of_progress(progress)
        view = run_folder.read(self._run.path)
        if is_active and view.attempt == counts.attempt:
            live = {"heartbeat_age_seconds": view.heartbeat_s, "hang_budget_used_ratio": view.hang_used,
                    "restarts_left": view.restarts_left, "save_interval_steps": view.save_interval_steps}  # fmt: skip
            yield from ((name, float(value)) for name, value in live.items() if value is not None)

    def _finished(self) -> bool:
        try:
            return self._run.done() is not None
        except StorageError:
            return False


def _of_progress(progress: Progress) -> Iterator[tuple[str, float]]:
    found = {
        "report_timestamp_seconds": progress.at, "progress_timestamp_seconds": progress.progressed_at,
        "save_timestamp_seconds": progress.saved_at, "step": progress.step, "until_step": progress.until,
        "saved_step": progress.saved_step, "loss": progress.metric, "ranks": progress.world_size,
    }  # fmt: skip
    if progress.until is None:  # an endpoint, which may have no requests for days
        found["progress_timestamp_seconds"] = None
    yield from ((name, float(value)) for name, value in found.items() if value is not None)
    if progress.at is not None:
        yield "failed_saves", float(progress.failed_saves or 0)


def families(looks: Sequence[Look]) -> list[Family]:
    """The values of these runs."""
    found = [
        Family("slurmft_run_info", "Where the run is: its newest job, nodes and attempt.", GAUGE,
               [Sample({**look.labels, **look.info}, 1.0) for look in looks]),
        *(
            Family(f"slurmft_run_{name}", about, GAUGE,
                   [Sample(look.labels, look.gauges[name]) for look in looks if name in look.gauges])
            for name, about in _GAUGES.items()
        ),
        *(
            Family(f"slurmft_run_{name}", about, COUNTER, [Sample(look.labels, look.counts[name]) for look in looks])
            for name, about in {**ABOUT, "lost_steps": "Steps that were lost and had to be done again."}.items()
        ),
        Family("slurmft_run_ends", "Ends of attempts, by their verdict.", COUNTER, [
            Sample({**look.labels, "cause": cause, "category": category_of(cause)}, count)
            for look in looks for cause, count in sorted(look.ends.items())
        ]),
        Family("slurmft_run_seconds", "Where the time went, in spans that have ended.", COUNTER, [
            Sample({**look.labels, "category": span}, seconds)
            for look in looks for span, seconds in look.span_s.items()
        ]),
    ]  # fmt: skip
    return [family for family in found if family.samples]


def looks_at(runs: Iterable[RunFolder]) -> tuple[list[Look], list[str]]:
    """All of these runs, and in words which of them could not be read. Of two runs with equal labels the first counts:
    a collector would refuse the whole file."""
    looks, problems = dict[tuple[str, ...], Look](), list[str]()
    for run in runs:
        try:
            look = RunMetrics(run).look()
        except (OSError, StorageError) as error:
            problems.append(f"{run.name}: {getattr(error, 'strerror', None) or error}")
            continue
        if looks.setdefault(tuple(look.labels.values()), look) is not look:
            problems.append(f"{run.path}: another run of this user has this name")
    return list(looks.values()), problems


def _labels(run: RunFolder, attempt: str) -> dict[str, str]:
    return {"run": run.path.name, "user": _user_of(run.path), "cluster": _cluster_of(run, attempt)}


def _user_of(path: Path) -> str:
    try:
        return user_name(path.stat().st_uid)
    except OSError:
        return user_name(os.getuid())


def _cluster_of(run: RunFolder, attempt: str) -> str:
    if attempt.startswith(LOCAL_PREFIX):
        return "local"
    return configured_cluster(os.environ) or os.environ.get("SLURM_CLUSTER_NAME") or "slurm"


def _grown(shown: dict[str, float], now: Mapping[str, float]) -> dict[str, float]:
    for name, value in now.items():
        if math.isfinite(value):
            shown[name] = max(shown.get(name, 0.0), float(value))
    return dict(shown)


# --- Where measured values go: a file for node_exporter's textfile collector, a port, and targets for Prometheus ---

PORT_FILE = "metrics.json"
REQUEST_S = 5.0
"""A scraper that is slower to send its request is cut off."""

MAX_SCRAPES, SCRAPES_PER_ADDRESS = 32, 8
"""Connections at one time; one more ends the oldest, of its own address first."""

log = logging.getLogger(__name__)


def write_textfile(path: Path, families: Iterable[Family]) -> None:
    """Replace the file, readable by all: the collector is another user.

    Raises:
        OSError: the old one is untouched.
    """
    replace_atomically(path, text(families), mode=0o644, durable=False)


def textfile_of(folder: Path, user: str, run: str) -> Path:
    """The file of one run, by a name that the collector takes."""
    return folder / f"slurmft-{re.sub(r'[^A-Za-z0-9_.-]', '_', f'{user}-{run}')[:200]}.prom"


class Scrapes:
    """``/metrics`` on a port, in threads of their own.

    Args:
        families: what is shown; called for each scrape, by one thread at a time.
        token: what scrapes must send as ``Authorization: Bearer``; empty: nothing.

    Raises:
        OSError: the address cannot be listened to.
    """

    def __init__(self, address: str, port: int, families: Callable[[], Iterable[Family]], *, token: str = "") -> None:
        lock, guard = threading.Lock(), threading.Lock()
        strangers: Strangers[socket.socket] = Strangers(MAX_SCRAPES, SCRAPES_PER_ADDRESS)
        expected = f"Bearer {token}".encode() if token else b""

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = REQUEST_S
            server_version, sys_version = "slurmft", ""

            def do_GET(self) -> None:
                given = self.headers.get("Authorization", "").encode(errors="replace")
                if expected and not hmac.compare_digest(given, expected):
                    self._answer(401, b"the token is missing or wrong\n", "text/plain")
                    return
                if expected:
                    with guard:
                        strangers.forget(self.connection)
                if self.path.partition("?")[0] != "/metrics":
                    self._answer(404, b"there is only /metrics\n", "text/plain")
                else:
                    with lock:
                        body, kind = encoded(families(), self.headers.get("Accept", ""))
                    self._answer(200, body, kind)

            def _answer(self, code: int, body: bytes, kind: str) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                log.debug("metrics: " + format, *arguments)

        class Server(http.server.ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            daemon_threads = True
            block_on_close = False

            def process_request(self, request: Any, client_address: Any) -> None:
                with guard:
                    for oldest in strangers.admit(request, str(client_address[0])):
                        with contextlib.suppress(OSError):
                            oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    with guard:
                        strangers.forget(request)

            def handle_error(self, request: Any, client_address: Any) -> None:
                log.debug("a scrape ended early", exc_info=True)

        self._server = Server((address, port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True, name="metrics").start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


def targets(runs: Iterable[RunFolder]) -> list[dict[str, Any]]:
    """For Prometheus' ``file_sd_configs``: supervisors and routers of the caller's own ones of these runs. What listens
    on a loopback address is a target on its own machine alone.

    The owner of a run chooses its hosts, and Prometheus sends its token to all of them: those of other users' runs are
    left out.
    """
    found: list[dict[str, Any]] = []
    for run in runs:
        with contextlib.suppress(OSError):
            if run.path.stat().st_uid != os.geteuid():
                continue
        labels = {"run": run.path.name}
        with contextlib.suppress(StorageError, OSError):
            facts = read_json(run.path / PORT_FILE, owners={os.geteuid()}) or {}
            if (target := _target(facts)) is not None:
                found.append({"targets": [target], "labels": {**labels, "__meta_slurmft_kind": "supervisor"}})
        with contextlib.suppress(StorageError, OSError):
            for router in HighAvailabilityCluster.read(run.path).routers:
                for url in router.urls[:1]:
                    scheme, _, at = url.partition("://")
                    kind = {"__meta_slurmft_kind": "router", **({"__scheme__": scheme} if router.tls else {})}
                    found.append({"targets": [at], "labels": {**labels, **kind}})
    return found


def _target(facts: dict[str, Any]) -> str | None:
    address, host, port = str(facts.get("address", "")), str(facts.get("host", "")), facts.get("port")
    if type(port) is not int or not re.fullmatch(r"[A-Za-z0-9.:_-]{1,255}", address):
        return None
    if address.startswith("127.") or address == "::1":
        if host != socket.gethostname():
            return None
    elif address in ("0.0.0.0", "::"):  # noqa: S104 - compared with, not listened on
        address = host
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def write_targets(path: Path, runs: Iterable[RunFolder]) -> None:
    """Replace the file for ``file_sd_configs``.

    Raises:
        OSError: the old one is untouched.
    """
    replace_atomically(path, json.dumps(targets(runs), indent=1) + "\n", mode=0o644, durable=False)


# --- notify ---
# Messages about chosen events of a run: to a command, or to a webhook. In a process of its own, which may wait.
#
# Each event is told once, also over requeues: ``notify.json`` in the run folder has how far the journal was told. A
# process that is killed between a message and that file tells it twice.

STATE_FILE = "notify.json"
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


def message_of(run: str, entry: Event, chosen: frozenset[str]) -> Message | None:
    """The message about an event, where it is one of the ``chosen``."""
    facts = entry.details
    kinds = [str(facts.get(name, "")) for name in ("action", "cause")]
    if not chosen & {entry.event, *(f"{entry.event}: {kind}" for kind in kinds if kind)}:
        return None
    kind = next((kind for kind in kinds if kind), "")
    reason = one_line(str(facts.get("reason") or facts.get("error") or ""), MAX_REASON)
    where = ", ".join(map(str, facts["nodes"])) if isinstance(facts.get("nodes"), list) else facts.get("node")
    text = one_line(entry.event, 80) + f": {one_line(kind, 80)}" * bool(kind) + f": {reason}" * bool(reason)
    text += f" ({one_line(str(where), 200)})" if where else ""
    small = {name: facts[name] for name in ("job", "rank", "node", "step", "in_a_row", "exit_code", "saved_step")
             if type(facts.get(name)) in (int, float, str)}  # fmt: skip
    shown = {name: one_line(value, 200) if isinstance(value, str) else value for name, value in small.items()}
    return Message(run=one_line(run, 200), event=one_line(entry.event, 80), text=text, at=entry.seconds(),
                   attempt=one_line(entry.attempt, 200), facts=shown)  # fmt: skip


def webhook_url(config: NotifyConfig, environment: Mapping[str, str]) -> str:
    """The URL, from its file or variable; empty where there is none.

    Raises:
        UsageError: it cannot be read, others can read it, or it is none; the message does not repeat it.
    """
    if config.webhook_variable is not None:
        return checked_url(environment.get(config.webhook_variable, ""), f"the variable {config.webhook_variable}")
    if (path := config.webhook_file) is None:
        return ""
    with contextlib.suppress(OSError):  # as the reading says
        if path.stat().st_mode & 0o077:
            raise UsageError(f"others may read the URL in {path}", hint=f"chmod 600 {path}")
    return url_in(path, owners={os.geteuid()})


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
            if self._clock() - entry.seconds() > NEWS_S:
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
        message = replace(message, left_out=self._left_out)
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

    def _read(self) -> JournalPosition | None:
        try:
            facts = read_json(self._folder / STATE_FILE)
        except StorageError:
            facts = None
        if facts is None:
            return None
        offset, head = facts.get("offset"), facts.get("head")
        return JournalPosition(offset, head) if type(offset) is int and offset >= 0 and isinstance(head, str) else None

    def _write(self) -> None:
        write_json(self._folder / STATE_FILE, asdict(self._tail.place), durable=False)


# --- The process beside a supervisor that publishes its run's metrics and tells its events ---

LOOK_S = 1.0
AGAIN_S = 30.0
"""Pause before a port that is in use is tried again: the companion of an attempt before may still have it."""


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
        self._settings, self._turn = config.metrics, turn
        self._metrics, self._port_file = RunMetrics(run), run.path / PORT_FILE
        self._told: set[str] = set()
        self._scrapes: Scrapes | None = None
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
            for left in (self._port_file if self._scrapes is not None else None, path):
                if left is not None and is_ours:
                    with contextlib.suppress(OSError):
                        left.unlink(missing_ok=True)

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
        path = textfile_of(self._settings.textfile_folder, labels["user"], labels["run"])
        try:
            write_textfile(path, found)
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
            self._scrapes = Scrapes(settings.address, settings.port, self._families, token=token)
            facts = {"address": settings.address, "host": socket.gethostname(), "port": self._scrapes.port}
            write_json(self._port_file, facts, durable=False)  # for ``targets``
        except (OSError, UsageError) as error:
            self._warn(f"no metrics on {settings.address}, port {settings.port}: {error}")

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)
