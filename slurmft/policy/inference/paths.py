"""Which paths of an engine its clients, and the lines of a batch, may use: those that ask it for something.

As of the engines' own sources and documents in 2026. All others, among them those that load, unload, sleep, reset or
profile, and those of a later version, stay closed until the configuration names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

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
