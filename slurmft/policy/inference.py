"""Decisions about replicas and requests: devices, slots, restarts, what follows the end of a try, who is to blame;
and engines that serve, with the paths of their requests.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import unquote

from slurmft.policy.symptoms import Remedy, signature_of
from slurmft.policy.verdict import EXIT_USAGE, Cause, Suspect, Verdict

# --- What follows the end of one try of a request: it is an answer, it is tried again, or its replica is to blame ---

RETRIED_STATUS = frozenset({408, 409, 425, 429})
"""Client errors of HTTP that a later try may not meet: time-out, conflict, too early, too many requests."""

NOT_IMPLEMENTED = 501
"""Whichever replica is asked, and however often."""

OUT_OF_MEMORY = ("out of memory", "outofmemoryerror", "cuda oom", "kv cache is full", "cannot allocate memory")
"""Words of engines and frameworks, in lower case."""

_GATEWAY = frozenset({502, 503, 504})
_LOADING = re.compile(
    r"not (?:yet )?(?:ready|loaded|initiali[sz]ed)|(?:still|is|being) (?:loading|loaded|starting|initiali[sz]ing)"
    r"|(?:starting|warming) up", re.IGNORECASE,
)  # fmt: skip


class TryOutcome(StrEnum):
    """The meaning of one try."""

    ANSWER = "answer"
    """Final, be it a result or an error of the request's own."""

    RETRY = "retry"
    """The next try may succeed."""

    SMALLER = "smaller"
    """The replica was out of memory: fewer requests at a time, and again."""


def outcome_of_status(status: int, text: str = "") -> TryOutcome:
    """The meaning of an HTTP answer with this status; ``text`` is the body of an error.

    A client error (4xx) is final and says nothing about the replica. Where it or a server error names missing memory,
    the replica had too much to do.
    """
    if 200 <= status < 300:
        return TryOutcome.ANSWER
    if status >= 500 and is_out_of_memory(text):
        return TryOutcome.SMALLER
    is_passing = status in RETRIED_STATUS or (status >= 500 and status != NOT_IMPLEMENTED)
    return TryOutcome.RETRY if is_passing else TryOutcome.ANSWER


def is_good(answer: Mapping[str, Any]) -> bool:
    """Whether it is an engine's answer, and none that refuses the request."""
    return 200 <= int(answer.get("response", {}).get("status_code", 0)) < 300


def is_loading(status: int, text: str) -> bool:
    """Whether an engine says that it cannot serve yet: by 503, or what stands in front of it by 502 or 504; another
    error of a server has to name that. Some answer 500 to any request that they do not understand.
    """
    return status in _GATEWAY or (status >= 500 and _LOADING.search(text) is not None)


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text names missing memory, of the device or the host."""
    lower = text.lower()
    return any(words in lower for words in OUT_OF_MEMORY)


def retry_after_s(header: str | None, *, longest_s: float) -> float | None:
    """Seconds of a ``Retry-After`` header (RFC 9110, 10.2.3), at most ``longest_s``; None without a usable one.

    A date is not taken: the clocks of an engine and of its client need not agree.
    """
    try:
        seconds = float(header) if header is not None else math.nan
    except ValueError:
        return None
    return min(seconds, longest_s) if math.isfinite(seconds) and seconds >= 0 else None


EXIT_NODE = 70
"""EX_SOFTWARE of sysexits.h: trials fail for what their node has."""


class TrialEnd(StrEnum):
    """The meaning of the end of a process that was started for one request."""

    RESULT = "result"
    STOPPED = "stopped"
    """It has saved, or was cut off: it goes on elsewhere."""

    NODE = "node"
    """The node, or a device of it, is to blame."""

    FAILED = "failed"
    """By itself."""


def end_of_trial(code: int, *, has_result: bool, is_stopping: bool, text: str) -> TrialEnd:
    """What follows from an exit code (negative: a signal) and the end of its output.

    During a stop a process that ends without a result has saved, with any exit code.
    """
    if code == 0 and (has_result or not is_stopping):
        return TrialEnd.RESULT
    if is_stopping:
        return TrialEnd.STOPPED
    row = signature_of(text)
    return TrialEnd.NODE if row is not None and row.remedy is Remedy.ELSEWHERE else TrialEnd.FAILED


_NAMED = re.compile(r"\{(\w[\w.]*)\}")


def filled_with(word: str, values: Mapping[str, Any]) -> str:
    """A word in which each ``{name}`` is that value, texts as they are and others in JSON; unknown names stay."""

    def value_of(match: re.Match[str]) -> str:
        value = values.get(match[1], match[0])
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _NAMED.sub(value_of, word)


# --- Which GPUs a replica sees ---


def devices_of(visible: Sequence[str], replica: int, per_replica: int) -> tuple[str, ...]:
    """The GPUs of replica number ``replica`` of a node: its share, in order; all where ``per_replica`` is 0 or none is.

    Raises:
        ValueError: the node has too few.
    """
    if not visible or per_replica == 0:
        return tuple(visible)
    first = replica * per_replica
    if first + per_replica > len(visible):
        raise ValueError(
            f"replica {replica} needs GPUs {first} to {first + per_replica - 1}, but there are {len(visible)} on the "
            "node: inference.replicas_per_node times inference.gpus_per_replica is too much"
        )
    return tuple(visible[first : first + per_replica])


def all_down(phases: Collection[str], *, least: int) -> bool:
    """Whether every replica has given up: at least so many have reported, and no engine but those of other nodes, of
    which a replica is a member, is in another phase."""
    return len(phases) >= least > 0 and {*phases} - {"member"} == {"down"}


# --- Which nodes have one engine together ---


def gangs_of(
    gangs: Sequence[tuple[int, ...]], nodes: Collection[int], *, size: int, most: int, jobs: Mapping[int, str]
) -> list[tuple[int, ...]]:  # fmt: skip
    """The gangs of which all nodes are left, and new ones of nodes that are in none and of one of the ``jobs``, where
    that has them (others are of one), each with its head first."""
    whole = [gang for gang in gangs if set(gang) <= set(nodes)]
    left = sorted(set(nodes).difference(*whole))
    for job in sorted({jobs.get(node, "") for node in left}):
        free = [node for node in left if jobs.get(node, "") == job]
        while len(whole) < most and len(free) >= size:
            whole, free = [*whole, tuple(free[:size])], free[size:]
    return whole


# --- Which node is suspected when engines die: one where that happens again and again, while others work ---

WINDOW_S = 3600.0
"""Deaths further apart have nothing to do with each other: an endpoint lives for weeks."""

DEATHS = 3
"""Of engines of one node in the window, without a request that explains them, before it is suspected."""

TIMES_OTHERS = 3
"""It has so many times the deaths of any other node: where all have them the engine is to blame, or its requests."""


@dataclass(frozen=True, slots=True)
class NodeDeaths:
    """Deaths of engines by node."""

    deaths: tuple[tuple[str, float], ...] = ()
    """Node and time, seconds; those within the window."""

    def died(self, node: str, now_s: float, *, in_flight: int) -> NodeDeaths:
        """One more. With a single request in flight that is more likely the request's fault."""
        kept = tuple(each for each in self.deaths if now_s - each[1] <= WINDOW_S)
        return NodeDeaths(kept if in_flight == 1 else (*kept, (node, now_s)))

    def forgiven(self, node: str) -> NodeDeaths:
        """Begin anew with this node, whose deaths have been held against it."""
        return NodeDeaths(tuple(each for each in self.deaths if each[0] != node))

    def suspect(self, nodes: Collection[str], now_s: float) -> str | None:
        """The node of ``nodes``, those that serve, that is suspected now; None without one, or without others."""
        counts = Counter(node for node, at_s in self.deaths if now_s - at_s <= WINDOW_S and node in nodes)
        if len(set(nodes)) < 2 or not counts:
            return None
        (node, most), *others = counts.most_common(2)
        second = others[0][1] if others else 0
        return node if most >= max(DEATHS, TIMES_OTHERS * second) else None


# --- Requests that kill engines: a death makes suspects of all that were in flight, and only those alone are proof ---

KILLS = 2
"""Replicas that a request must have killed while it was alone on them."""

COMPANY = 2
"""Deaths in company after which any request is a suspect; where many stall engines all are in company twice."""

Turn = tuple[tuple[int, int], int]
"""Of a suspect that waits to be tried alone: its ``suspicion``, and the negative of its number."""

SOON_S = 30.0
"""One that was near a single death is tried alone where its turn comes within so long; the others go on as before.
Engines die of other things as well, and where answers take minutes most would wait in vain."""

OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that come from outside of an engine."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a replica while a request was in flight on it."""

    replica: str
    """One life of a replica: a restart is another one."""

    alone: bool
    """Nothing else was in flight."""

    how: str
    """The end, in words: signal, exit code or hang."""

    near: bool = True
    """It was one of the ``likeliest``."""


Each = TypeVar("Each")


def likeliest(ordered: Sequence[Each]) -> list[Each]:
    """Of all that an engine had when it stopped, in the order in which they may be the reason: the first quarter."""
    return list(ordered[: max(4, len(ordered) // 4)])


def is_suspect(deaths: Sequence[Death]) -> bool:
    """Whether a request is tried with nothing beside it from now on.

    One that was near a single death is tried so where its turn comes within ``SOON_S``.
    """
    return len(deaths) > COMPANY or any(death.alone for death in deaths) or sum(death.near for death in deaths) > 1


def suspicion(deaths: Sequence[Death]) -> tuple[int, int]:
    """The greater, the more suspected."""
    return sum(death.alone for death in deaths), sum(death.near for death in deaths)


def next_alone(line: Sequence[Turn], *, in_vain_s: float, well_s: float) -> Turn:
    """Which of the suspects in line is tried alone next.

    The most suspected one, the first of several, so that it is proved soon; but once more time was spent on those that
    held up their engine again, or crashed it, than on those that were answered, the least suspected one. However many
    stall engines, the others have half of the time.
    """
    return (max if in_vain_s <= well_s else min)(line)


def is_poison(deaths: Sequence[Death]) -> bool:
    """Whether the request killed ``KILLS`` replicas alone: it is not tried again."""
    return len({death.replica for death in deaths if death.alone}) >= KILLS


EXIT_CODE = "exit code"


def how_it_ended(code: int) -> str:
    """An exit code in words; negative, or above 128: a signal."""
    number = -code if code < 0 else code - 128
    if code < 0 or 128 < code < 160:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(number).name}"
    return f"{EXIT_CODE} {code}"


def has_crashed(code: int) -> bool:
    """Whether an engine ended by its own fault, perhaps that of a request; ``code`` as ``Popen.returncode``."""
    return code != 0 and -code not in OUTSIDE


def evidence_of(deaths: Sequence[Death]) -> str:
    """The deaths in one sentence, for the request's error record."""
    alone = [death for death in deaths if death.alone]
    told = "; ".join(f"{death.replica}: {death.how}" for death in alone)
    return f"the engine died {len(alone)} times while it worked on this request alone ({told})"


# --- Restarts of one replica: how many without a success, and after which pause ---


@dataclass(frozen=True, slots=True)
class Restarts:
    """The failures of a replica, or of a router, that count."""

    max_restarts: int
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    window_s: float | None = None
    """Those of so many seconds count, whatever was completed in between: an engine that answers a while and dies again
    and again is no endpoint. None: those since a request was completed last."""

    failed_at: tuple[float, ...] = ()
    """Seconds of any one clock."""

    def failed(self, now_s: float) -> Restarts:
        """One more end that it has to answer for itself."""
        counts = (each for each in self.failed_at if self.window_s is None or each > now_s - self.window_s)
        return replace(self, failed_at=(*counts, now_s))

    def succeeded(self) -> Restarts:
        """It completed a request: the count begins anew, where there is no window."""
        return replace(self, failed_at=()) if self.failed_at and self.window_s is None else self

    @property
    def failures(self) -> int:
        """How many count."""
        return len(self.failed_at)

    @property
    def delay_s(self) -> float | None:
        """Seconds before the next start: none after the first failure, then doubled each time up to the longest; None:
        it stays down."""
        if self.failures > self.max_restarts:
            return None
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(self.failures - 2, 30)) * (self.failures > 1)


# --- How many requests a replica gets at a time: halved when it runs out of memory, raised again slowly ---

RAISE_AFTER = 20
"""Requests that must end well, for each slot there is, before one slot is added."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Additive increase, multiplicative decrease (Chiu and Jain, 1989), as in TCP's congestion control."""

    limit: int
    """Never more than these; the configured concurrency."""

    now: int
    good: int = 0
    """Requests that ended well since the last change."""

    @classmethod
    def full(cls, limit: int) -> Slots:
        """As many as are configured."""
        return cls(limit=limit, now=limit)

    def out_of_memory(self) -> Slots:
        """Half as many, at least one."""
        return replace(self, now=max(1, self.now // 2), good=0)

    def ended_well(self, count: int = 1) -> Slots:
        """One slot more after ``RAISE_AFTER`` requests for each slot."""
        if self.now >= self.limit:
            return self
        good = self.good + count
        if good < RAISE_AFTER * self.now:
            return replace(self, good=good)
        return replace(self, now=self.now + 1, good=0)


# --- engines ---
# Engines known by name: where they say that they are ready, take requests, and show that they work on an answer; how
# long a request may take, and which is the smallest one that proves that an engine works.
#
# Paths and metric names as of the engines' own documentation and sources in 2026. A configuration may name others.

ORDINARY_BYTES, ORDINARY_TOKENS = 1 << 16, 1024
"""A request up to this size has ``hang_timeout_s``; a larger one as much more as it is larger."""

MOST_PATIENCE = 10.0

PROVABLE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
}
"""The smallest request of a path, but for the model."""

_TOKENS = re.compile(
    rb'"(?:max_tokens|max_completion_tokens|max_new_tokens|max_output_tokens|n_predict)"\s*:\s*(\d{1,9})'
)
_STREAMED = re.compile(rb'"stream"\s*:\s*true')
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\\x00-\x1f\x7f-\xff]{1,512})"')


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What the driver of a replica has to know of an engine."""

    name: str
    ready_path: str = "/health"
    request_path: str = "/v1/chat/completions"
    metrics_path: str = ""
    progress_metric: str = ""
    """A counter that grows while an answer is made, not only at its end; empty where there is none."""

    tried: str = ""
    """With which version it was seen to grow so; what is empty is as the engine's sources have it."""


KNOWN = (
    EngineKind("vllm", metrics_path="/metrics", progress_metric="vllm:generation_tokens_total"),
    # those of SGLang, TGI and llama.cpp that count tokens by name grow at a request's end
    EngineKind("sglang", metrics_path="/metrics", progress_metric="sglang:inter_token_latency_seconds_count"),
    EngineKind("text-generation-launcher", metrics_path="/metrics", progress_metric="tgi_batch_inference_count"),
    EngineKind("llama-server", metrics_path="/metrics", progress_metric="llamacpp:n_decode_total", tried="b11549"),
)
OTHER = EngineKind("another")


def engine_kind(command: Sequence[str]) -> EngineKind:
    """The engine that a command starts: by its program, or by the module behind ``-m``."""
    words = [word.rpartition("/")[2] for word in command]
    for kind in KNOWN:
        modules = (kind.name, f"{kind.name}.")
        if any(word == kind.name or word.startswith(modules[1]) for word in words[:4]):
            return kind
    return OTHER


def patience_for(body: bytes) -> float:
    """By how much longer than ``hang_timeout_s`` an engine may be silent over a request: without a counter that grows
    meanwhile, a long answer and a long prompt look like a hang.
    """
    ends = _ends(body)
    asked = [] if _STREAMED.search(ends) else [int(each) for each in _TOKENS.findall(ends)]
    return min(MOST_PATIENCE, max(1.0, len(body) / ORDINARY_BYTES, max(asked, default=0) / ORDINARY_TOKENS))


def model_in(body: bytes) -> str:
    """The model that a request names; empty where none is seen."""
    found = _MODEL.search(_ends(body))
    return found[1].decode() if found is not None else ""


def _ends(body: bytes) -> bytes:
    """Where the parameters of a long request are: before or behind its prompt."""
    return body if len(body) <= 2 * ORDINARY_BYTES else body[:ORDINARY_BYTES] + body[-ORDINARY_BYTES:]


def smallest(path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The smallest request of the same kind, with the same model; None for a path that is not of OpenAI's interface."""
    return {"model": body["model"], **PROVABLE[path]} if path in PROVABLE and "model" in body else None


def counter_in(text: str, name: str) -> float | None:
    """The sum of a counter over all its labels in Prometheus' text format; None when it is not there."""
    total, found = 0.0, False
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            value = line.rpartition("}")[2] if "{" in line else line[len(name) :]
            try:
                total, found = total + float(value.split()[0]), True
            except (ValueError, IndexError):
                continue
    return total if found else None


def with_another_path(words: Sequence[str], path: str, by: str) -> tuple[str, ...]:
    """The words of a command with ``by`` in place of a path, also of one from which others begin: ``/a`` is in
    ``--model=/a`` and ``/a/b``, and not in ``/a-b`` or ``/c/a``."""
    whole = re.compile(rf"(?<![\w./-]){re.escape(path.rstrip('/'))}(?![\w.-])")
    return tuple(whole.sub(lambda _: by, word) for word in words)


# --- Which paths of an engine its clients, and the lines of a batch, may use: those that ask it for something ---
# As of the engines' own sources and documents in 2026. All others, among them those that load, unload, sleep, reset or
# profile, and those of a later version, stay closed until the configuration names them.

OPENAI = (
    "GET /v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/v1/rerank", "/v1/score", "/v1/moderations", "/v1/audio", "/v1/images", "/tokenize", "/detokenize", "GET /health",
    "GET /ping", "GET /version",
)  # fmt: skip
"""Of any engine. ``GET`` in front: to be read (GET, HEAD, OPTIONS), and not to be changed."""

OF_ENGINES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("/pooling", "/classify", "/score", "/rerank", "/v2/rerank", "/v2/embed", "/invocations",
             "/inference/v1/generate"),
    "sglang": ("/generate", "/encode", "/classify", "/v1/classify", "/v1/tokenize", "/v1/detokenize", "/invocations",
               "/vertex_generate", "/parse_function_call", "/separate_reasoning", "GET /health_generate",
               "GET /model_info", "GET /get_model_info", "/api/chat", "/api/generate"),
    "text-generation-launcher": ("/generate", "/generate_stream", "/chat_tokenize", "/invocations", "GET /info"),
    "llama-server": ("/completion", "/completions", "/chat/completions", "/embedding", "/embeddings", "/infill",
                     "/rerank", "/reranking", "/v1/reranking", "/apply-template", "GET /v1/health"),
}  # fmt: skip
"""What those of ``KNOWN`` have beside them."""


def normal(path: str) -> str | None:
    """The path as an engine may understand it, however it is written; None where it can be understood in two ways.

    A slash that is written as ``%2F``, as in the name of a model, is one, as most servers have it. One that does not
    see it as such sees a longer name behind the same beginning, or nothing that it knows.

    Args:
        path: of a request, still with its percent signs, without the query.
    """
    plain = unquote(path)
    if "%" in plain or "\\" in plain or not plain.startswith("/") or re.search(r"[\x00-\x20\x7f;?#]", plain):
        return None
    parts = plain.split("/")[1:]
    return None if any(part in (".", "..") for part in parts) or "" in parts[:-1] else plain


def is_open(method: str, path: str, allowed: Iterable[str]) -> bool:
    """Whether a path, as ``normal`` returned it, is one of ``allowed``, or below one of them."""
    is_read = method in ("GET", "HEAD", "OPTIONS")
    for each in allowed:
        verb, _, beginning = each.rpartition(" ")
        if (is_read or not verb) and (path == beginning or path.startswith(beginning.rstrip("/") + "/")):
            return True
    return False


# --- The verdict on an attempt of a batch, a sweep or an endpoint; a step is a request ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What the supervisor knows at the end of an attempt."""

    first: int = 0
    """Requests that were answered when it began."""

    done: int = 0
    """Requests that are answered now."""

    planned: Cause | None = None
    """Why it was stopped; None where it was not."""

    planned_reason: str = ""
    outside: tuple[Cause, str] | None = None
    """Why Slurm ends the job."""

    lost: Mapping[str, bool] = field(default_factory=dict)
    """Nodes whose agents are gone, and whether they closed the connections themselves: such a node lives."""

    works: bool = True
    """Agents are left, and enough of them for an engine."""

    all_down: bool = False
    """No replica is left."""

    is_hopeless: bool = False
    """The last engine that did not start cannot be started, wherever it is tried."""

    asking_failed: str = ""
    """Why ``trials.next`` cannot be asked for more, on any node."""

    problem: str = ""
    """Why it ended by itself."""


def judge(told: str, seen: Circumstances) -> Verdict:
    """Why an attempt has ended; ``told``: what has come of all requests, empty where some are still open."""
    facts: dict[str, Any] = {"first_step": seen.first, "last_step": seen.done, "saved_step": seen.done}
    if told:
        return Verdict(cause=Cause.FINISHED, reason=told, **facts)
    verdict = Verdict(cause=Cause.LAUNCH_FAILURE, reason=seen.problem or "unknown", **facts)
    if seen.outside is not None and (seen.planned is None or seen.outside[0] in (Cause.CANCELLED, Cause.REQUEUED)):
        verdict = replace(verdict, cause=seen.outside[0], reason=seen.outside[1])
    elif seen.planned is not None:
        verdict = replace(verdict, cause=seen.planned, reason=seen.planned_reason)
    elif seen.lost and not seen.works:
        reason = f"the agents are gone: {', '.join(seen.lost)}; {seen.problem}"
        living = tuple(host for host, has_closed in seen.lost.items() if has_closed) or None
        suspects = tuple(Suspect(node=host) for host in seen.lost)
        verdict = replace(verdict, cause=Cause.NODE_LOST, reason=reason, suspects=suspects, living=living)
    elif seen.all_down:
        code = EXIT_USAGE if seen.is_hopeless else 1
        verdict = replace(verdict, cause=Cause.WORKER_ERROR, reason=seen.problem, exit_code=code)
    if seen.asking_failed and seen.planned is None:
        return replace(verdict, cause=Cause.WORKER_ERROR, reason=seen.asking_failed, exit_code=EXIT_USAGE)
    return verdict
