"""Streams to a client that go on where their engine stopped, so that it sees one.

Of the events that have gone out all is kept until the stream's end, as it came, and looked into only when an engine is
lost. The request for the rest asks for what follows behind the text that the client has. The events of its answer are
written anew: with the first engine's ``id``, ``created`` and ``model``, no second role, and a usage that counts all.

In contrast to an answer that is computed for a file (``continuation``), what the client has seen cannot be taken back:
the rest begins behind it wherever that is, also in the middle of a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slurmft.policy.inference.continuation import Form, Prefix, continuing, error_in, form_of, is_count, joined_usage
from slurmft.policy.inference.kept_streams import KeptStreams

MAX_KEPT_BYTES = 4 << 20
"""Of the events of one stream; a longer one is not continued."""

MAX_EVENT_BYTES = 1 << 20
TOO_LONG = "it is too long to be continued"

END = b"[DONE]"
DONE = b"data: [DONE]\n\n"
CONTINUED = "X-Slurmft-Continued"
"""Header of a stream: the forms that can be continued."""

OF_A_STREAM = frozenset({"stream", "stream_options", "stop"})
"""Parameters that are looked at here, and not with those of an answer that comes as a whole."""


class Unjoinable(Exception):
    """The stream cannot go on; the text says why."""


def joinable_form(path: str, body: Mapping[str, Any]) -> Form | None:
    """The form of a request for a stream that may be continued; None for any other.

    As ``form_of``, but any number of tokens is worth it, and stop strings may be given: what engines hold back of them
    the client has not seen, and is generated again.
    """
    if body.get("stream") is not True or not _are_stops(body.get("stop")):
        return None
    if body.get("stream_options") is not None and not isinstance(body["stream_options"], Mapping):
        return None
    plain = {name: value for name, value in body.items() if name not in OF_A_STREAM}
    return form_of(path, plain, least_tokens=1)


class JoinedStream:
    """One stream as its client sees it: engines' bytes in, whole events out.

    Args:
        path: of the request.
        body: of the request, as it came; it is looked into only when an engine is lost.
        forms: those that engines can continue.
        kept: the account of all streams; ``end`` gives back what this one keeps.
    """

    def __init__(self, path: str, body: bytes, forms: frozenset[Form], *, kept: KeptStreams | None = None) -> None:
        self._path, self._raw_body, self._forms = path, body, forms
        self._kept, self._forgotten = kept, ""
        """The account, and why nothing is kept any more."""

        self._held = b""
        """The beginning of an event whose end has not come."""

        self._parts: list[bytes] = []
        """All that has gone out before the first seam, and has not been read."""

        self._kept_bytes = 0
        self.is_ended = False
        """``[DONE]``, or an error of the engine's own, has gone out."""

        # all that follows is known from the first look back on
        self.seams = 0
        self._body: dict[str, Any] = {}
        self._form: Form | None = None
        self._head: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        """The last event with a piece of text."""

        self._text: list[str] = []
        self._since = ""
        """The text since the seam, as long as a stop string may lie across that."""

        self._tokens = 0
        """Of all engines so far, as they counted them; one for each piece where they do not."""

        self._before = Prefix()
        """What the present engine goes on from."""

        self._reason: object = None
        self._again = ""
        """What the present engine says again of what the client has: blanks that a chat template takes away."""

        self._has_usage = self._is_text_only = False

    @property
    def is_closed(self) -> bool:
        """It has been continued, and is at its end."""
        return self.seams > 0 and self.is_ended

    def take(self, part: bytes) -> bytes:
        """What may go to the client now that this has come.

        Raises:
            Unjoinable: the engine that was to continue the stream sends something else.
        """
        data = self._held + part if self._held else part
        if data.endswith(b"\n\n"):
            whole, self._held = data, b""
        else:
            end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
            whole, self._held = (data[:end], data[end:]) if end > 2 else (b"", data)
            if len(self._held) > MAX_EVENT_BYTES:  # whatever this is
                whole, self._held = data, b""
                self._give_up(TOO_LONG)
        if not whole:
            return b""
        if self.seams:
            return b"".join(self._rewritten(whole))
        if not self._forgotten:
            self._parts.append(whole)
            self._keep(len(whole))
        self.is_ended = self.is_ended or whole[-20:].rstrip().endswith((b"data: [DONE]", b"data:[DONE]"))
        return whole

    def is_whole(self) -> bool:
        """Whether the engine has said that it is at the end; otherwise an orderly end of its connection is none."""
        if not self.is_ended:
            try:
                self._look_back()
            except Unjoinable:
                return True  # nothing is known of it
        return self.is_ended or self._reason is not None

    def left_over(self) -> bytes:
        """What is no whole event at the end of a stream that its engine has ended."""
        rest, self._held = self._held, b""
        return rest

    def rest(self) -> tuple[dict[str, Any] | None, bytes]:
        """At a seam: the request for what is missing, or None where nothing is, with the bytes that end the stream.

        Raises:
            Unjoinable: it cannot go on.
        """
        self._held = b""
        self._look_back()
        if self.is_ended:
            return None, b""
        text = "".join(self._text)
        if text and not self._is_text_only:
            raise Unjoinable("it has more than text")
        self.seams += 1
        self._text, self._since = [text], ""
        self._before = Prefix(text, self._tokens, self._before.prompt_tokens)
        self._again = text[len(text.rstrip()) :] if self._form is Form.CHAT else ""
        if self._reason is not None:
            return None, self._ending(None)
        if not text:
            return self._body, b""
        assert self._form is not None
        if self._again:  # about a token, which is generated anew
            self._before = Prefix(text.rstrip(), max(0, self._tokens - 1), self._before.prompt_tokens)
            self._tokens = self._before.tokens
        asked = continuing(self._body, self._form, self._before)
        if asked is None:
            return None, self._ending("length")
        del asked["stream_options"]  # its usage is told in the form that the client has asked for
        return {**asked, **{name: self._body[name] for name in ("stream_options",) if name in self._body}}, b""

    # What has gone out

    def _keep(self, more_bytes: int) -> None:
        if self._forgotten:
            return
        self._kept_bytes += more_bytes
        if self._kept_bytes > MAX_KEPT_BYTES:
            self._give_up(TOO_LONG)
        elif self._kept is not None:
            self._kept.keep(self, more_bytes)

    def _give_up(self, why: str) -> None:
        self.end()
        self.forget(why)

    def forget(self, why: str) -> None:
        """Let go of what is kept: what comes is passed on, and cannot be continued."""
        self._forgotten, self._parts, self._text = why, [], []

    def end(self) -> None:
        """The client has all that it gets."""
        if self._kept is not None:
            self._kept.end(self)

    def _look_back(self) -> None:
        """Read what has gone out before the first seam.

        Raises:
            Unjoinable: it cannot be continued.
        """
        if self._form is None:
            try:
                body = json.loads(self._raw_body)
            except (ValueError, RecursionError):
                body = None
            form = joinable_form(self._path, body) if isinstance(body, dict) else None
            if form is None:
                raise Unjoinable("a request like this is not continued")
            if form not in self._forms:
                raise Unjoinable("inference.engine.continue_from_prefix does not say that this engine goes on")
            self._body, self._form, self._is_text_only = body, form, True
        if self._forgotten:
            raise Unjoinable(self._forgotten)
        parts, self._parts = self._parts, []
        for data in _events(b"".join(parts)):
            if data == END:
                self.is_ended = True
                return
            self._note(_object(data))

    def _note(self, event: dict[str, Any]) -> str:
        """Learn from an event; returns the text in it."""
        if error_in(event) is not None:
            self.is_ended = True
            return ""
        choices, usage = event.get("choices"), event.get("usage")
        if not isinstance(choices, list) or len(choices) > 1 or not all(isinstance(each, dict) for each in choices):
            raise Unjoinable("an event of it is not understood")
        self._head = self._head or {name: value for name, value in event.items() if name not in ("choices", "usage")}
        text = self._text_of(choices[0]) if choices else ""
        if text:
            if not self._forgotten:
                self._text.append(text)
            self._last = event
            self._tokens += 1
        if isinstance(usage, dict):
            self._has_usage = self._has_usage or not choices
            counted, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
            if is_count(counted):
                self._tokens = self._before.tokens + counted
            if not self.seams and is_count(prompt):
                self._before = Prefix(prompt_tokens=prompt)
        if self.seams:
            self._keep(len(text))
        return text

    def _text_of(self, choice: dict[str, Any]) -> str:
        if choice.get("finish_reason") is not None:
            self._reason = choice["finish_reason"]
        if choice.get("logprobs") is not None:
            self._is_text_only = False
        if self._form is Form.TEXT:
            text = choice.get("text")
        else:
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                raise Unjoinable("an event of it is not understood")
            # thoughts or calls of tools: a message with text alone does not hold them
            self._is_text_only = self._is_text_only and not any(
                value for name, value in delta.items() if name not in ("content", "role")
            )
            text = delta.get("content")
        return text if isinstance(text, str) else ""

    # What is written anew

    def _rewritten(self, whole: bytes) -> Iterator[bytes]:
        for data in _events(whole):
            if self.is_ended:
                return
            if data == END:
                self.is_ended = True
                yield DONE
                return
            event = _object(data)
            if self._again:
                self._leave_out(event)
            last, text = self._last, self._note(event)
            if self.is_ended or not self._is_text_only:
                self.is_ended = False
                raise Unjoinable(f"what was to go on sent an error, or more than text: {data[:200]!r}")
            if text and self._is_stopped(text):
                self._last = last
                yield self._ending("stop")
                return
            yield from self._as_ours(event, text, last)

    def _leave_out(self, event: dict[str, Any]) -> None:
        """Take away from an event what the client has already."""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict) or not isinstance(text := delta.get("content"), str) or not text:
                continue
            if self._again.startswith(text):
                self._again, delta["content"] = self._again[len(text) :], ""
            else:
                delta["content"], self._again = text.removeprefix(self._again), ""

    def _as_ours(self, event: dict[str, Any], text: str, last: Mapping[str, Any]) -> Iterator[bytes]:
        """The event as the first engine would have written it; nothing for one that only begins a message again."""
        choices = event["choices"]
        if self._form is Form.CHAT and choices:
            delta, before = choices[0]["delta"], last["choices"][0]["delta"] if last else {}
            if "role" in delta and self._before.text and "role" not in before:
                choices[0]["delta"] = {name: value for name, value in delta.items() if name != "role"}
                if not text and self._reason is None:
                    return
        if isinstance(event.get("usage"), dict):
            event["usage"] = joined_usage(event["usage"], self._before)
        yield _as_event({**event, **self._head})

    def _is_stopped(self, text: str) -> bool:
        """Whether a stop string is complete that began before the seam: no engine has seen both parts of it."""
        given = self._body.get("stop") or []
        stops = [given] if isinstance(given, str) else given
        longest = max((len(each) for each in stops), default=0)
        if len(self._since) >= longest - 1:
            return False
        tail = self._before.text[-(longest - 1) :]
        self._since += text
        seen = tail + self._since
        places = [(seen.find(each), len(each)) for each in stops if each]
        return any(0 <= place < len(tail) < place + length for place, length in places)

    def _ending(self, reason: str | None) -> bytes:
        """The last events of a stream for which nothing is left to be generated.

        Args:
            reason: why it ends, where the client does not know that yet.

        Raises:
            Unjoinable: the client wants to know the usage, and no engine has told it.
        """
        self.is_ended = True
        prompt, made = self._before.prompt_tokens, self._tokens
        usage = None
        if prompt is not None:
            usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        found = b""
        if reason is not None:
            choice: dict[str, Any] = self._last["choices"][0] if self._last else {"index": 0}
            said: dict[str, Any] = {"text": ""}
            if self._form is Form.CHAT:
                said = {"delta": {**choice.get("delta", {}), "content": ""}}
            event = {**self._last, **self._head, "choices": [{**choice, **said, "finish_reason": reason}]}
            found += _as_event({**event, "usage": usage} if isinstance(event.get("usage"), dict) else event)
        if (self._body.get("stream_options") or {}).get("include_usage") and not self._has_usage:
            if usage is None:
                raise Unjoinable("its usage is not known")
            found += _as_event({**self._head, "choices": [], "usage": usage})
        return found + DONE


def _events(content: bytes) -> Iterator[bytes]:
    """The data of each event; comments and other fields are passed over."""
    for block in content.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
        if lines:
            yield b"\n".join(lines)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unjoinable("an event of it is not understood") from error
    if not isinstance(value, dict):
        raise Unjoinable("an event of it is not understood")
    return value


def _as_event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _are_stops(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    )
