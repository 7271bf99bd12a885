"""Engines known by name: where they say that they are ready, take requests, and count the tokens they made.

Paths and metric names as of the engines' own documentation in 2026: vLLM (Production metrics), SGLang (Production
metrics), Text Generation Inference (Monitoring), llama.cpp (server README). A configuration may name others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What the driver of a replica has to know of an engine."""

    name: str
    ready_path: str = "/health"
    request_path: str = "/v1/chat/completions"
    metrics_path: str = ""
    progress_metric: str = ""
    """A counter that grows while the engine makes tokens; empty where there is none."""

    counts_pieces: bool = False
    """It tells the tokens so far with each piece of a stream, so that an answer can be cut and joined exactly."""


KNOWN = (
    EngineKind("vllm", metrics_path="/metrics", progress_metric="vllm:generation_tokens_total", counts_pieces=True),
    EngineKind("sglang", metrics_path="/metrics", progress_metric="sglang:generation_tokens_total", counts_pieces=True),
    EngineKind("text-generation-launcher", metrics_path="/metrics", progress_metric="tgi_request_generated_tokens_sum"),
    EngineKind("llama-server", metrics_path="/metrics", progress_metric="llamacpp:tokens_predicted_total"),
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
