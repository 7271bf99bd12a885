"""Decisions of an endpoint: who gets a request, second tries, less for each in need, handovers and updates; and answers
that go on where another engine stopped.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any, TypeGuard
from urllib.parse import urlsplit, urlunsplit

from slurmft.policy.stop import SLURM_JITTER_S

# --- streams ---
# Answers that go on where another engine stopped: whether they can, how that is asked for, and how they are joined.
#
# As of the engines' own sources in 2026: each that completes texts goes on from a prompt that ends with what was
# generated; vLLM, SGLang and llama.cpp go on with the last message of a chat by ``continue_final_message: true`` and
# ``add_generation_prompt: false``, as far as the model's chat template writes it as the model did. vLLM and SGLang tell
# the tokens so far with each piece of a stream (``stream_options.continuous_usage_stats``), which others ignore.

LEAST_TOKENS = 64
"""A request that may generate fewer is not worth a stream."""

PLAIN = frozenset({
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k",
    "min_p", "stop_token_ids", "seed", "ignore_eos", "user", "logit_bias", "metadata", "priority",
})  # fmt: skip
"""Parameters that mean the same in the middle of an answer as at its beginning, or are written anew."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,), "logprobs": (False,), "stop": ([], ""),
    "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "repetition_penalty": (1, 1.0), "suffix": ("",),
}  # fmt: skip
"""Others, and what they may be beside null: penalties and grammars remember what was generated, the beginning of a stop
string is held back, and several choices are several answers."""


class Form(StrEnum):
    """What a request asks for; the value is ``object`` of its answer."""

    TEXT = "text_completion"
    CHAT = "chat.completion"


PATHS = {"/v1/completions": Form.TEXT, "/v1/chat/completions": Form.CHAT}


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of an answer."""

    text: str = ""
    tokens: int = 0
    """As its engine counted them."""

    prompt_tokens: int | None = None
    """Of the request itself, where an engine has told; a continuing one counts this beginning with them."""


def continued_forms(setting: str) -> frozenset[Form]:
    """What is asked for as a stream, to be continued (``continue_from_prefix``).

    Not by itself: an engine may divide the text so far into other tokens than those that it had made, and then goes on
    differently, whatever the rules for a cut.
    """
    return frozenset(Form if setting == "always" else ())


def form_of(path: str, body: Mapping[str, Any]) -> Form | None:
    """The form of a request that may be continued; None for any other.

    A text must have a limit of tokens, since engines differ in what they do without one. A seed must not matter:
    random numbers would begin anew in the middle.
    """
    form = PATHS.get(path)
    if form is None or not all(_is_harmless(name, value) for name, value in body.items()):
        return None
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if len(limits) > 1 or any(not is_count(each) or each < LEAST_TOKENS for each in limits):
        return None
    if body.get("min_tokens") is not None and not is_count(body["min_tokens"]):
        return None
    if body.get("seed") is not None and body.get("temperature") not in (0, 0.0):
        return None
    if form is Form.TEXT:
        return form if limits and isinstance(body.get("prompt"), str) else None
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, Mapping) for each in messages):
        return None
    return None if messages[-1].get("role") == "assistant" else form


def streaming(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request, answered piece by piece."""
    return {**body, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def continuing(body: Mapping[str, Any], form: Form, prefix: Prefix) -> dict[str, Any] | None:
    """The request for the rest of an answer, as a stream; None where nothing is left to be generated."""
    asked = streaming(body)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if asked.get(name) is not None:
            asked[name] = max(0, asked[name] - prefix.tokens)
            if not asked[name] and name != "min_tokens":
                return None
    if form is Form.TEXT:
        return {**asked, "prompt": asked["prompt"] + prefix.text}
    messages = [*asked["messages"], {"role": "assistant", "content": prefix.text}]
    return {**asked, "messages": messages, "add_generation_prompt": False, "continue_final_message": True}


class JoinedAnswer:
    """An answer that comes as a stream of OpenAI's pieces, behind what is there already.

    Args:
        prefix: what the request for this stream was continued from.
    """

    def __init__(self, form: Form, prefix: Prefix) -> None:
        self._form, self._prefix = form, prefix
        self._pieces = [prefix.text] if prefix.text else []
        self._last = prefix.text[-1:]
        self._tokens = 0
        """Of this stream, so far."""

        self._cut, self._cut_tokens = len(self._pieces), prefix.tokens
        self._is_text_only = True
        self._head: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """The next piece, which is no error.

        Raises:
            ValueError: it is none of OpenAI's pieces.
        """
        choices, usage = event.get("choices"), event.get("usage")
        if not isinstance(choices, list) or not all(isinstance(each, Mapping) for each in choices):
            raise ValueError("a piece of the stream has no list of choices")
        if not self._head:
            self._head = {name: value for name, value in event.items() if name not in ("choices", "usage")}
        before = self._tokens
        if isinstance(usage, Mapping):
            self._usage = dict(usage)
            counted = usage.get("completion_tokens")
            self._tokens = counted if is_count(counted) else before
        if not choices:
            return
        choice = choices[0]
        piece = self._text_of(choice)
        if not piece:
            return
        if not isinstance(usage, Mapping):
            self._tokens += 1
        if self._is_good_cut(piece):
            self._cut, self._cut_tokens = len(self._pieces), self._prefix.tokens + before
        self._pieces.append(piece)
        self._last = piece[-1]

    @property
    def is_complete(self) -> bool:
        """The engine has said why it ended."""
        return self._choice.get("finish_reason") is not None

    @property
    def continuable(self) -> Prefix:
        """The longest beginning that an engine can go on from as if it had generated it itself.

        It ends where the next token began with a blank: there a tokenizer divides the text as the engine had done, and
        chat templates, which strip messages, take nothing away.
        """
        if not self._is_text_only:
            return Prefix()
        known = self._prefix.prompt_tokens
        if known is None and self._usage is not None and not self._prefix.text:
            known = self._usage.get("prompt_tokens")
        prompt_tokens = known if is_count(known) else None
        return Prefix("".join(self._pieces[: self._cut]), self._cut_tokens, prompt_tokens)

    def body(self) -> dict[str, Any]:
        """The whole answer, as an engine that does not stream would have given it at once."""
        text = "".join(self._pieces)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, **self._choice}
        if self._form is Form.TEXT:
            choice["text"] = text
        else:
            choice["message"] = {"role": "assistant", **self._message, "content": text}
        body = {**self._head, "object": self._form.value, "choices": [choice]}
        return body if self._usage is None else {**body, "usage": joined_usage(self._usage, self._prefix)}

    def _text_of(self, choice: Mapping[str, Any]) -> str:
        for name, value in choice.items():
            if name not in ("text", "delta") and (value is not None or name not in self._choice):
                self._choice[name] = value
        if self._form is Form.TEXT:
            text = choice.get("text")
            return text if isinstance(text, str) else ""
        delta = choice.get("delta")
        if not isinstance(delta, Mapping):
            return ""
        for name, value in delta.items():
            if name == "content" or value is None or value == []:
                continue
            if name == "role":
                self._message[name] = value
                continue
            self._is_text_only = False  # thoughts or calls of tools: a message with text alone does not hold them
            known = self._message.get(name)
            self._message[name] = known + value if isinstance(known, str) and isinstance(value, str) else value
        content = delta.get("content")
        return content if isinstance(content, str) else ""

    def _is_good_cut(self, piece: str) -> bool:
        if not self._last or self._last.isspace() or self._last == "\ufffd" or not piece[0].isspace():
            return False
        return self._form is Form.TEXT or not self._pieces[0][0].isspace()


def error_in(event: Mapping[str, Any]) -> tuple[int, str] | None:
    """Status and text of an error that comes within a stream; None for an ordinary piece."""
    error = event.get("error") if event.get("object") != "error" else event
    if error is None:
        return None
    code = error.get("code") if isinstance(error, Mapping) else None
    return (code if is_count(code) and 400 <= code < 600 else 500), str(error)


def joined_usage(usage: Mapping[str, Any], prefix: Prefix) -> dict[str, Any]:
    """The usage of a whole answer, of that of an engine that continued it.

    What the continuing engine took for a part of the prompt was generated before.

    It may have divided that into other tokens, so what is known of the request itself is better than a difference.
    """
    joined = dict(usage)
    prompt, completion = joined.get("prompt_tokens"), joined.get("completion_tokens")
    if prefix.tokens and is_count(prompt) and is_count(completion):
        known = prefix.prompt_tokens
        joined["prompt_tokens"] = max(0, prompt - prefix.tokens) if known is None else known
        joined["completion_tokens"] = completion + prefix.tokens
        joined["total_tokens"] = joined["prompt_tokens"] + joined["completion_tokens"]
    return joined


def _is_harmless(name: str, value: Any) -> bool:
    if value is None or name in PLAIN:
        return True
    return any(type(value) is type(each) and value == each for each in NEUTRAL.get(name, ()))


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is a whole number from 0 on, and no truth value."""
    return type(value) is int and value >= 0


# --- An endpoint with too few replicas does less for each request, instead of failing all of them ---

BACK_ABOVE = 1.2
"""Degradation ends at this multiple of the share at which it begins: a replica that comes and goes changes nothing."""


LIMITS = {
    "/v1/completions": ("max_tokens",), "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",), "/v1/messages": ("max_tokens",),
}  # fmt: skip
"""What limits the tokens of an answer, by the request's path; the first one where none is given."""


def cheaper(path: str, body: bytes, max_tokens: int | None, model: str | None) -> tuple[bytes, str]:
    """A request for an answer with these limits, and what is another than it asked for; any other body as it is."""
    try:
        request = json.loads(body) if path in LIMITS else None
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        return body, ""
    now = dict(request)
    if max_tokens is not None:
        asked = [name for name in LIMITS[path] if request.get(name) is not None]
        for name in (*(asked or LIMITS[path][:1]), *(["min_tokens"] if "min_tokens" in request else [])):
            if is_count(given := request.get(name)) or given is None:  # else the engine refuses it
                now[name] = max_tokens if given is None else min(given, max_tokens)
    if model is not None:
        now["model"] = model
    told = ", ".join(f"{name}={value}" for name, value in sorted(now.items()) if value != request.get(name))
    return (json.dumps(now).encode(), told) if told else (body, "")


@dataclass(frozen=True, slots=True)
class GracefulDegradation:
    """Degrades below a share of the capacity, and comes back with hysteresis.

    Args:
        below: share of the expected replicas; with fewer that are ready the endpoint is degraded. 0: never.
        concurrency: requests at a time for each replica, when all is well.
    """

    below: float = 0.5
    concurrency: int = 32
    degraded: bool = False

    def saw(self, ready: int, expected: int) -> GracefulDegradation:
        """The state when so many replicas of those expected are ready."""
        share = ready / expected if expected else 1.0
        limit = min(1.0, self.below * BACK_ABOVE) if self.degraded else self.below
        return replace(self, degraded=share < limit)

    @property
    def slots(self) -> int:
        """Requests at a time for each replica, from now on."""
        return max(1, self.concurrency // 2) if self.degraded else self.concurrency

    @property
    def timeout_factor(self) -> float:
        """Of time limits that the client has not chosen itself."""
        return 2.0 if self.degraded else 1.0


# --- When an endpoint is handed over to a successor job, and what its owner does about that successor ---

STARTUP_FACTOR = 1.5
"""Engines of the successor load while those of this job still work, perhaps from the same filesystem."""

MARGIN_S = 60.0
"""For the queue, the agents' start, and the last requests of this job."""

MAX_TRIES = 3
PAUSE_S = 30.0
"""Between a successor that was lost and the next one."""

SETTLE_S = 10.0
"""How long after a stop has begun a successor may take to get nodes before the drain begins without it."""

DRAIN_SHARE, LEAST_DRAIN_S = 0.3, 5.0
"""Of the time of a stop, what is kept for requests in flight while a successor is awaited."""


class Successor(StrEnum):
    """The successor job, as far as it is known."""

    NONE = "not submitted"
    UNKNOWN = "Slurm did not answer"
    WAITING = "in the queue"
    ALIVE = "has nodes"
    GONE = "has ended"


class Step(StrEnum):
    """What the owner does next."""

    WAIT = "wait"
    SUBMIT = "submit a successor"
    REPLACE = "cancel the successor, which does not become ready, and try again"
    GIVE_UP = "go on without a handover"


def lead_s(configured: float | None, *, startup_s: float | None, stop_s: float) -> float | None:
    """Seconds before the time limit at which the successor is submitted; None where that cannot be known yet.

    Args:
        startup_s: measured from the first agent to the last replica; None before that.
        stop_s: the lead of Slurm's signal, after which this job drains.
    """
    if configured is not None:
        return configured
    if startup_s is None:
        return None
    return stop_s + SLURM_JITTER_S + STARTUP_FACTOR * startup_s + MARGIN_S


def due_s(lead: float | None, *, owned_since_s: float, ends_s: float | None) -> float | None:
    """When the handover begins; None where the job has no end, or the lead is not known.

    Not in the first half of what this job has: a limit shorter than the lead would only start jobs all the time.
    """
    if lead is None or ends_s is None:
        return None
    return max(ends_s - lead, owned_since_s + (ends_s - owned_since_s) / 2)


def next_step(
    successor: Successor, *, now_s: float, due_s: float | None, alive_since_s: float | None, start_limit_s: float,
    tries: int, again_s: float,
) -> Step:  # fmt: skip
    """What the owner does about the handover; all times in seconds of one clock.

    Args:
        due_s: when it is to begin; None: at no time that is known.
        alive_since_s: since when the successor has nodes.
        start_limit_s: how long it may take from then on until it is ready.
        tries: successors submitted so far in this job.
        again_s: not before then is another one submitted.
    """
    match successor:
        case Successor.UNKNOWN | Successor.WAITING:
            return Step.WAIT
        case Successor.ALIVE:
            since_s = now_s if alive_since_s is None else alive_since_s
            return Step.REPLACE if now_s - since_s > start_limit_s else Step.WAIT
    if due_s is None or now_s < max(due_s, again_s):
        return Step.WAIT
    return Step.SUBMIT if tries < MAX_TRIES else Step.GIVE_UP


def waits_for(successor: Successor, *, since_s: float, left_s: float, whole_s: float) -> bool:
    """Whether a stop goes on serving instead of draining, since a successor may take over in time.

    Args:
        since_s: seconds since the stop began.
        left_s: seconds that are left of it.
        whole_s: seconds that it had.
    """
    if left_s <= max(LEAST_DRAIN_S, DRAIN_SHARE * whole_s):
        return False
    return successor is Successor.ALIVE or (successor is not Successor.GONE and since_s < SETTLE_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """The replicas and routers of a candidate."""

    ready: int
    down: int
    """Replicas that have given up."""

    expected: int
    routers: int
    routers_wanted: int

    def suffices(self, least_share: float) -> bool:
        """Whether it can take over: all are ready, but for those that have given up, if enough are left."""
        if self.routers < self.routers_wanted or self.ready == 0:
            return False
        return self.ready + self.down >= self.expected and self.ready >= least_share * self.expected


# --- Which headers of HTTP a router passes on, and what some of them mean ---

HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length",
})  # fmt: skip
"""For one connection alone (RFC 9110, 7.6.1); a length is set anew for each."""

TO_THE_ROUTER = frozenset({
    "authorization", "api-key", "x-api-key", "expect", "x-request-timeout", "x-priority",
})  # fmt: skip
"""Of requests: what clients tell the router, and engines need not know."""

HOST = re.compile(r"(\[[\da-f:.]+\]|[\w.~!$&'()*+;=%-]*)(:\d*)?", re.ASCII | re.IGNORECASE)
"""What ``Host`` may be (RFC 9110, 7.2)."""

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost", "0.0.0.0"})  # noqa: S104 - names in answers of engines


def end_to_end(headers: Iterable[tuple[str, str]], *, to_engine: bool = False) -> list[tuple[str, str]]:
    """The headers that are passed on, in their order; ``to_engine``: those of a request."""
    given = list(headers)
    named = {
        word.strip().lower() for name, value in given if name.lower() == "connection" for word in value.split(",")
    }  # fmt: skip
    dropped = HOP_BY_HOP | named | (TO_THE_ROUTER if to_engine else frozenset())
    return [(name, value) for name, value in given if name.lower() not in dropped]


def token_shown(headers: Mapping[str, str]) -> str:
    """The token of a request: as a bearer, or as the clients of Anthropic (``x-api-key``) and Azure show it."""
    scheme, _, shown = headers.get("Authorization", "").partition(" ")
    if scheme:
        return shown.strip(" ") if scheme.lower() == "bearer" else ""
    return headers.get("x-api-key") or headers.get("api-key") or ""


def request_id(given: str | None) -> str:
    """The id of a request: its client's, where that can stand in a log and in a header; else a new one."""
    return given if given is not None and re.fullmatch(r"[\w.:/+=@-]{1,128}", given, re.ASCII) else uuid.uuid4().hex


def target_of(raw: str) -> tuple[str, str]:
    """Path and query of a request's target, and the host where it is an absolute address (RFC 9112, 3.2.2)."""
    found = re.fullmatch(r"https?://([^/?#@]+)(.*)", raw, re.IGNORECASE)
    if found is None:
        return raw, ""
    return found[2] if found[2].startswith("/") else f"/{found[2]}", found[1]


def within(place: str, host: str) -> str:
    """A ``Location`` of an engine as its clients can follow it: without a host that is theirs or the engine's own."""
    try:
        parts = urlsplit(place)
        is_ours = parts.netloc.lower() == host.lower() or parts.hostname in LOOPBACK
    except ValueError:
        return place
    if not parts.netloc or not is_ours or parts.scheme not in ("", "http", "https"):
        return place
    return urlunsplit(("", "", "/" + parts.path.lstrip("/"), parts.query, parts.fragment))


def seconds_asked(header: str | None) -> float | None:
    """Seconds of ``X-Request-Timeout``; None without a usable one."""
    try:
        seconds = float(header) if header is not None else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


# --- Whose weights are new enough ---


@dataclass(frozen=True, order=True, slots=True)
class Served:
    """Weights as a trainer has published them, and as an engine that took them has them."""

    branch: int
    """Of the trainer's life; a later one begins again from a checkpoint."""

    version: int


def within_lag(served: Served | None, newest: Served | None, max_lag: int | None) -> bool:
    """Whether an engine's weights are at most ``max_lag`` versions behind the newest publication (None: any number).

    Those of an earlier branch never are, also with a higher version: their steps were given up. ``served`` is None
    for weights that were never published, and may be newer than ``newest``, which is read from time to time.
    """
    if newest is None or (served is not None and served >= newest):
        return True
    if served is None:
        return max_lag is None
    return served.branch == newest.branch and (max_lag is None or newest.version - served.version <= max_lag)


# --- Which replica gets a request, and whether one that comes may wait for a replica ---

FAILURES_TO_AVOID = 5
"""Failures in a row, with nothing else in between, after which a replica is avoided."""

AVOIDED_S = 5.0


@dataclass(frozen=True, slots=True)
class Load:
    """One replica in the rotation, as a router sees it."""

    name: str
    in_flight: int
    """Of all routers, as far as this one knows."""

    avoided: bool = False
    """It fails what it gets, although it lives."""

    kept: bool = False
    """For a request that may have killed engines, and is to be alone on it."""

    taken: bool = False
    """By a suspect of this router, which is alone on it or waits for that."""

    proven: bool = True
    """It has answered something."""

    stale: bool = False
    """Its weights are too old, or of steps that are not done any more."""


def choose_replica(loads: Sequence[Load], *, limit: int, without: Collection[str] = ()) -> str | None:
    """The replica with the fewest requests in flight, the first of several; None where none has room.

    One of ``without``, where the request has failed before, is taken where no other has room; one that is avoided only
    where the rotation has no other: a wait for a good one is better than another failure. One that is stale never is.
    """
    fresh = [each for each in loads if not each.stale]
    able = [each for each in fresh if not each.avoided] or fresh
    free = [each for each in able if each.in_flight < limit and not each.kept]
    best = [each for each in free if each.name not in without] or free
    return min(best, key=lambda each: each.in_flight).name if best else None


def place_alone(loads: Sequence[Load], without: Collection[str]) -> str | None:
    """The replica on which a suspect is tried with nothing beside it: one that works, and is soon empty.

    Up to half of the replicas are kept for suspects, each for one at a time, whichever router has them: the others go
    on meanwhile. Where routers have kept more at the same moment, they go on with the first by name.
    """
    kept, most = sorted((each for each in loads if each.kept), key=lambda each: each.name), max(1, len(loads) // 2)
    able = [each for each in (loads if len(kept) < most else kept[:most])
            if not (each.avoided or each.taken or each.stale)]  # fmt: skip
    return min(able, key=lambda each: (each.name in without, not each.proven, each.in_flight)).name if able else None


@dataclass(frozen=True, slots=True)
class Breaker:
    """A living replica's failures in a row. What a client does wrong (4xx) is none of them."""

    failures: int = 0
    until_s: float = 0.0
    """It is avoided until then."""

    def failed(self, now_s: float) -> Breaker:
        """One more: no answer, or one that says that the replica cannot."""
        failures = self.failures + 1
        return Breaker(failures, now_s + AVOIDED_S if failures >= FAILURES_TO_AVOID else 0.0)

    def succeeded(self) -> Breaker:
        """Any answer of its own; it begins anew."""
        return Breaker() if self.failures else self

    def is_open(self, now_s: float) -> bool:
        """Whether the replica is avoided. Afterwards one request may try it; another failure opens it again."""
        return now_s < self.until_s


class Priority(IntEnum):
    """Of a request (``X-Priority``): one of a higher priority that waits is next."""

    HIGH = 0
    NORMAL = 1
    LOW = 2

    @classmethod
    def of(cls, header: str | None) -> Priority:
        """What a request asks for; ``NORMAL`` for what is not known."""
        return cls.__members__.get((header or "").strip().upper(), cls.NORMAL)

    def share_of(self, concurrency: int) -> int:
        """How many requests a replica may have when it gets one of these: low ones leave a quarter to others."""
        return max(1, concurrency - concurrency // 4) if self is Priority.LOW else concurrency


class Entry(StrEnum):
    """What becomes of a request that has come."""

    ADMITTED = "admitted"
    FULL = "full"
    """429: so many wait that this one would not be answered in time."""

    LOW_PRIORITY = "low priority"
    """503: what is left of the endpoint is for others."""

    CLOSED = "closed"
    """503: the endpoint goes away."""


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits in a router, and how fast it becomes less."""

    waiting: int
    """Of this priority and above."""

    most: int
    slots: int
    """Requests at a time, of all replicas together."""

    mean_s: float
    """How long a request takes, on the average of the last ones; 0 where none has ended yet."""

    has_room: bool
    """A replica can take one more at once."""

    @property
    def wait_s(self) -> float:
        """How long one more would wait, by Little's law; 0 where that is not known."""
        return (self.waiting + 1) * self.mean_s / self.slots if self.slots else 0.0


def entry_of(queue: Queue, *, left_s: float, priority: Priority, degraded: bool, closing: bool) -> Entry:
    """Whether a request with ``left_s`` seconds until its deadline is admitted.

    Overload never becomes a time-out: a request that would not get a replica in time is refused at once.
    """
    if closing:
        return Entry.CLOSED
    if priority is Priority.LOW and degraded:
        return Entry.LOW_PRIORITY
    if queue.has_room and not queue.waiting:
        return Entry.ADMITTED
    return Entry.FULL if queue.waiting >= queue.most or queue.wait_s > left_s else Entry.ADMITTED


# --- Whether a client's request that has failed on one replica is done on another one ---
# Only while no byte of an answer has gone to the client, and within the request's own deadline. What a lost replica
# leaves behind is redone in any case. Retries of failures of living replicas are a tenth of the requests: otherwise an
# endpoint whose replicas are all sick would get several times its load (Site Reliability Engineering, chapter 22).

SHARE = 0.1
"""Of the requests."""

MOST_SAVED = 20.0
"""Retries that quiet times may save up."""


class Failure(StrEnum):
    """How a try ended without an answer for the client."""

    LOST = "lost"
    """Its replica died, hung, or lost its node."""

    SICK = "sick"
    """Its replica lives, and gave no answer or one that asks for another try (429, 5xx)."""


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """Retries that may still be made: a tenth of one for each request, spent as a whole."""

    saved: float = MOST_SAVED / 2

    def came(self) -> RetryBudget:
        """A request has come."""
        return replace(self, saved=min(MOST_SAVED, self.saved + SHARE))

    def spent(self) -> RetryBudget:
        """A retry is made."""
        return replace(self, saved=self.saved - 1.0)

    @property
    def has_one(self) -> bool:
        """Whether a retry may be made."""
        return self.saved >= 1.0


@dataclass(frozen=True, slots=True)
class SecondTry:
    """What follows a failed try."""

    again: bool
    spends: bool = False
    """It counts against the budget."""

    pause_s: float = 0.0


def after_failure(
    failure: Failure, *, failed: int, max_retries: int, left_s: float, budget: RetryBudget,
    base_delay_s: float, max_delay_s: float, others: bool, asked_s: float | None = None,
) -> SecondTry:  # fmt: skip
    """What follows try number ``failed``, of whose answer no byte has gone to the client.

    Args:
        left_s: seconds until the request's deadline.
        others: another replica can take it, so that it need not wait for this one to recover.
        asked_s: the pause that the replica itself asks for.
    """
    if failed > max_retries or left_s <= 0:
        return SecondTry(again=False)
    if failure is Failure.LOST:
        return SecondTry(again=True)
    if not budget.has_one:
        return SecondTry(again=False)
    grown_s = base_delay_s * 2.0 ** min(failed - 1, 30)
    pause_s = 0.0 if others else min(max_delay_s, grown_s if asked_s is None else asked_s)
    return SecondTry(again=pause_s < left_s, spends=True, pause_s=pause_s)


# --- What an endpoint that serves may have replaced: its engine, and nothing else ---

ENGINE = "inference.engine."
OF_ROUTERS = frozenset({f"{ENGINE}{key}" for key in ("token_file", "allow_paths", "nodes")})
"""Settings of the engine that routers, or the supervisor, read when they start."""


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys, with their sections, whose values differ, sorted."""
    found: list[str] = []
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changed_keys(old, new, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}")
    return sorted(found)


def refused_keys(changed: list[str]) -> list[str]:
    """Those of them that a rolling update cannot change."""
    return [key for key in changed if not key.startswith(ENGINE) or key in OF_ROUTERS]


# --- How many replicas of an endpoint are to be on, by what its routers have to do ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What the configuration allows."""

    least: int
    most: int
    concurrency: int
    """Requests that a replica takes at a time."""

    idle_s: float
    """Fewer have to have been enough for so long before one is stopped."""

    def needed(self, requests: int) -> int:
        """So many that each request has a place, as far as there may be."""
        return min(self.most, max(self.least, math.ceil(requests / self.concurrency)))


@dataclass(frozen=True, slots=True)
class Scale:
    """What is wanted now, and what would have been enough lately."""

    wanted: int
    reason: str = ""
    since_s: float | None = None
    """Since when fewer would have been enough; None while they would not."""

    enough: int = 0
    """The most that were needed since then."""

    @property
    def lately(self) -> int:
        """The most that were needed since fewer than ``wanted`` would have been enough: more are not worth a loan."""
        return self.wanted if self.since_s is None else self.enough

    def saw(self, requests: int | None, bounds: Bounds, now_s: float) -> Scale:
        """What is wanted while so many requests wait or are worked on; None: not known, and nothing is stopped.

        It grows at once, and becomes no smaller than what was needed at any time of the last ``idle_s``.
        """
        if requests is None:
            return replace(self, since_s=None)
        needed = bounds.needed(requests)
        if needed > self.wanted:
            return Scale(needed, f"{requests} requests")
        if needed == self.wanted:
            return replace(self, since_s=None)
        if self.since_s is None:
            return replace(self, since_s=now_s, enough=needed)
        enough = max(self.enough, needed)
        if now_s - self.since_s < bounds.idle_s:
            return replace(self, enough=enough)
        return Scale(enough, f"no more were needed for {bounds.idle_s:g} s")


# --- Nodes that other jobs lend to an endpoint, each a job of its own, so that each can be given back alone ---

LOAN_WAIT_S, LOAN_PAUSE_S = 1800.0, 600.0
"""A job that has not lent its node after so long is cancelled, and none is submitted for so long then."""

MOST_LOANS = 8
"""Submitted at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loan:
    """A job that lends a node, or is to."""

    job: str
    since_s: float
    """When it was submitted, or had its node last."""

    has_node: bool
    """An agent is there."""

    serves: bool
    """A replica or a router is there, or still finishes what it has."""


@dataclass(frozen=True, slots=True)
class Lending:
    """What is done about loans."""

    borrow: int = 0
    give_back: tuple[str, ...] = ()
    give_up: tuple[str, ...] = ()
    """They have waited for too long."""


def lending(
    loans: Sequence[Loan], *, needed: int, wanted: int, own: int, hoped: int, now_s: float, again_s: float
) -> Lending:  # fmt: skip
    """What follows from so many loans.

    Of those that are too many, what waits goes first, the newest first; a node that serves stays until it does no more.

    Args:
        needed: nodes for what is lost, and for what the load needs.
        wanted: nodes for all that is to be on; more are too many, and not only for a moment.
        own: nodes that there are without these loans.
        hoped: those, and the lost ones that may come back.
        again_s: no job is submitted before then.
    """
    idle = sorted((each for each in loans if not each.serves), key=lambda each: (each.has_node, -each.since_s))
    back = [each.job for each in idle[: max(0, len(loans) - max(0, wanted - own))]]
    late = [each.job for each in loans if not each.has_node and now_s - each.since_s > LOAN_WAIT_S]
    lacking = 0 if late or now_s < again_s else max(0, needed - hoped - len(loans))
    return Lending(min(MOST_LOANS, lacking), tuple(back), tuple(each for each in late if each not in back))
