"""A Python callable as an engine: a function, a class, or a generator that tells what it has so far."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slurmft.errors import UsageError
from slurmft.inference.request_checkpoints import NOTE_S, RequestCheckpointer
from slurmft.inference.retrying import MAX_TOLD, Again, Answer, OutOfMemory
from slurmft.policy.inference.answers import is_out_of_memory


class CallableEngine:
    """A function, or an object of a class, in this process; it runs in a thread of its own, one list at a time.

    A generator yields what is new of each answer, takes what they begin with as ``prefixes``, and returns them whole.
    """

    request_path = ""

    def __init__(self, name: str, device: str, at_once: int, partials: RequestCheckpointer | None = None) -> None:
        self.at_once = at_once
        self._partials, self._pieces = partials, 0
        self._is_generator = False
        self._name, self._device = name, device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._call: Any = None

    async def start(self) -> None:
        """Import it, and build it where it is a class."""
        self._call = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """One call."""
        bodies = [request["body"] for request in requests]
        loop = asyncio.get_running_loop()
        try:
            if self._is_generator:
                values = await self._generated([request.get("key", request["id"]) for request in requests], bodies)
            else:
                values = await loop.run_in_executor(self._thread, self._call, bodies)
        except Exception as error:
            kind = type(error).__name__
            text = f"{kind}: {error}"[:MAX_TOLD]
            if isinstance(error, MemoryError) or is_out_of_memory(text):
                raise OutOfMemory(text) from error
            raise Again(text) from error
        return [{"response": {"status_code": 200, "body": value}} for value in self._checked(values, len(bodies))]

    async def _generated(self, keys: Sequence[str], bodies: Sequence[Any]) -> Any:
        loop, partials = asyncio.get_running_loop(), self._partials
        known = [partials.take(key) if partials is not None else None for key in keys]
        prefixes = [prefix.text if prefix is not None else "" for prefix in known]

        def note(texts: Sequence[str]) -> None:
            for key, text in zip(keys, texts, strict=True):
                if partials is not None:
                    partials.note(key, text)

        def run() -> Any:
            made = [[prefix] for prefix in prefixes]
            noted_s, pieces = time.monotonic(), self._call(bodies, prefixes=list(prefixes))
            try:
                while True:
                    new = next(pieces)
                    for parts, piece in zip(made, self._pieces_in(new, len(bodies)), strict=True):
                        parts.append(piece)
                    if time.monotonic() - noted_s > NOTE_S:
                        noted_s = time.monotonic()
                        loop.call_soon_threadsafe(note, ["".join(parts) for parts in made])
            except StopIteration as end:
                return end.value
            except BaseException:
                loop.call_soon_threadsafe(note, ["".join(parts) for parts in made])
                raise

        note(prefixes)
        values = await loop.run_in_executor(self._thread, run)
        for key in keys:
            if partials is not None:
                partials.forget(key)
        return values

    def _pieces_in(self, new: Any, count: int) -> Sequence[str]:
        if not isinstance(new, list) or len(new) != count or not all(isinstance(each, str) for each in new):
            raise TypeError(f"{self._name} must yield lists of {count} texts, what is new of each answer")
        self._pieces += 1
        return new

    def _checked(self, values: Any, count: int) -> list[Any]:
        if not isinstance(values, list) or len(values) != count:
            found = f"a list of {len(values)}" if isinstance(values, list) else f"a {type(values).__name__}"
            raise Again(
                f"{self._name} must return a list of {count} answers, one for each request; it returned {found}"
            )
        try:
            json.dumps(values, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise Again(f"an answer of {self._name} cannot be written as JSON: {error}") from error
        return values

    async def tokens(self) -> float:
        """Of a generator, how often it has yielded."""
        return self._pieces

    async def ended(self) -> int:
        """It is this process."""
        await asyncio.Event().wait()
        return 0

    async def close(self) -> None:
        """Nothing: it ends with this process."""

    def _load(self) -> Any:
        module, _, path = self._name.partition(":")
        if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - as python itself would
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"inference.engine.callable: cannot load {self._name}: {error}") from error
        is_class = inspect.isclass(found)
        built: Any = found(self._device) if is_class else found
        if not callable(built):
            raise UsageError(f"inference.engine.callable: {self._name} cannot be called")
        call = built if inspect.isroutine(built) else built.__call__
        self._is_generator = inspect.isgeneratorfunction(call)
        if self._is_generator and "prefixes" not in inspect.signature(call).parameters:
            raise UsageError(
                f"inference.engine.callable: {self._name} is a generator and must take the keyword prefixes",
                hint="a list of what the answers begin with; see docs/how-to/batch-inference.md",
            )
        return built
