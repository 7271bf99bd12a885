"""Engines that serve, and the paths of their requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

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
"""What those of ``engines.KNOWN`` have beside them."""


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
