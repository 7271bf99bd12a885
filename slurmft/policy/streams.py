"""Answers that go on where another engine stopped: whether they can, how that is asked for, and how they are joined.

As of the engines' own sources in 2026: each that completes texts goes on from a prompt that ends with what was
generated; vLLM, SGLang and llama.cpp go on with the last message of a chat by ``continue_final_message: true`` and
``add_generation_prompt: false``, as far as the model's chat template writes it as the model did. vLLM and SGLang tell
the tokens so far with each piece of a stream (``stream_options.continuous_usage_stats``), which others ignore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

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


def form_of(path: str, body: Mapping[str, Any], *, least_tokens: int = LEAST_TOKENS) -> Form | None:
    """The form of a request that may be continued; None for any other.

    A text must have a limit of tokens, since engines differ in what they do without one. A seed must not matter:
    random numbers would begin anew in the middle.
    """
    form = PATHS.get(path)
    if form is None or not all(_is_harmless(name, value) for name, value in body.items()):
        return None
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if len(limits) > 1 or any(not is_count(each) or each < least_tokens for each in limits):
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
