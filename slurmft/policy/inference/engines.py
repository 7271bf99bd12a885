"""Engines known by name: where they say that they are ready, take requests, and show that they work on an answer; how
long a request may take, and which is the smallest one that proves that an engine works.

Paths and metric names as of the engines' own documentation and sources in 2026. A configuration may name others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
