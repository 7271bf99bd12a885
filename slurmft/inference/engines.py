"""The engines behind a replica's driver: a server of its own, a service elsewhere, or a Python callable."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slurmft.config.inference import PORT_WORD, InferenceConfig
from slurmft.errors import LaunchError, UsageError
from slurmft.inference.retrying import Again
from slurmft.policy.inference.answers import Outcome, is_out_of_memory, outcome_of_status, retry_after_s
from slurmft.policy.inference.engines import counter_in, engine_kind
from slurmft.system.opening import read_text

if TYPE_CHECKING:
    import aiohttp

READY_LOOK_S = 0.1
READY_TRY_S = 5.0
METRICS_S = 5.0
MAX_ANSWER_BYTES = 64 << 20
MAX_TOKEN_BYTES = 64 << 10
MAX_TOLD = 2000
"""Characters of an error that are kept."""

Answer = dict[str, Any]
"""``{"response": {"status_code": ..., "body": ...}}``, or ``{"error": {"code": ..., "message": ...}}``."""


class OutOfMemory(Again):
    """A try failed for want of memory."""


class Engine(Protocol):
    """The driver's view of what answers requests."""

    at_once: int
    """Requests in one call of ``answer``: 1, or as many as there are slots for an engine that takes lists."""

    async def start(self) -> None:
        """Return when it can answer.

        Raises:
            SlurmftError: it ended, or cannot be started.
        """

    async def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """The answers to a list of requests (``id``, ``body``, and ``url`` where one is named).

        Raises:
            OutOfMemory: with fewer at a time it may work.
            Again: the next try may succeed.
        """

    async def tokens(self) -> float | None:
        """Tokens made so far; None where that is not known."""

    async def ended(self) -> int:
        """Return, with the exit code, when the engine has ended by itself; never for one that is not ours."""

    async def close(self) -> None:
        """Let go of it."""


def engine_of(config: InferenceConfig, replica: int, device: str) -> Engine:
    """The engine that the configuration names."""
    if config.engine.callable is not None:
        return CallableEngine(config.engine.callable, device, config.concurrency)
    return HttpEngine(config, replica)


class HttpEngine:
    """A server that speaks HTTP: started here (``command``), or one that is there already (``url``)."""

    at_once = 1

    def __init__(self, config: InferenceConfig, replica: int) -> None:
        engine, kind = config.engine, engine_kind(config.engine.command or ())
        self._config, self._replica = config, replica
        self._ready_path = engine.ready_path or kind.ready_path
        self._request_path = engine.request_path or kind.request_path
        self._metrics_path = engine.metrics_path or kind.metrics_path
        self._metric = engine.progress_metric or kind.progress_metric
        self._base = engine.url or ""
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Start the server and wait until it is ready; its limit is the agent's."""
        try:
            import aiohttp
        except ImportError as error:
            raise UsageError("engines that speak HTTP need the package aiohttp",
                             hint="pip install 'slurmft[inference]'") from error  # fmt: skip
        headers = {}
        if self._config.engine.token_file is not None:
            headers["Authorization"] = f"Bearer {_token_in(self._config.engine.token_file)}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=self._config.request_timeout_s),
            headers=headers,
            trust_env=False,
        )
        if self._config.engine.command is not None:
            port = _free_port()
            self._base = f"http://127.0.0.1:{port}"
            words = {PORT_WORD: str(port), "{replica}": str(self._replica)}
            argv = [_filled(word, words) for word in self._config.engine.command]
            try:
                self._process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL)
            except OSError as error:
                raise UsageError(f"cannot start the engine {argv[0]!r}: {error.strerror or error}") from error
        while not await self._is_ready():
            if self._process is not None and self._process.returncode is not None:
                raise LaunchError(f"the engine ended with {self._process.returncode} before it was ready")
            await asyncio.sleep(READY_LOOK_S)

    async def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """One request, by POST."""
        return [await self._post(request) for request in requests]

    async def _post(self, request: Mapping[str, Any]) -> Answer:
        import aiohttp

        assert self._session is not None
        address = self._base + request.get("url", self._request_path)
        try:
            async with self._session.post(address, json=request["body"], allow_redirects=False) as response:
                status, content = response.status, await _content(response)
                after_s = retry_after_s(response.headers.get("Retry-After"), longest_s=self._config.max_delay_s)
        except TimeoutError as error:
            raise Again(f"no answer within {self._config.request_timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Again(f"no answer: {error or type(error).__name__}") from error
        text = content.decode(errors="replace")
        match outcome_of_status(status, text):
            case Outcome.ANSWER:
                return {"response": {"status_code": status, "body": _body_of(text)}}
            case Outcome.SMALLER:
                raise OutOfMemory(f"HTTP {status}: {text[:MAX_TOLD]}")
        raise Again(f"HTTP {status}: {text[:MAX_TOLD]}", after_s=after_s)

    async def tokens(self) -> float | None:
        """From the engine's metrics."""
        import aiohttp

        if not self._metric or not self._metrics_path or self._session is None:
            return None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            limit = aiohttp.ClientTimeout(total=METRICS_S)
            async with self._session.get(self._base + self._metrics_path, timeout=limit) as response:
                return counter_in((await _content(response)).decode(errors="replace"), self._metric)
        return None

    async def ended(self) -> int:
        """The server's exit."""
        if self._process is None:
            await asyncio.Event().wait()
        assert self._process is not None
        return await self._process.wait()

    async def close(self) -> None:
        """End the server: TERM, which most engines take for an orderly end; the agent kills what stays."""
        if self._session is not None:
            await self._session.close()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def _is_ready(self) -> bool:
        import aiohttp

        assert self._session is not None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            limit = aiohttp.ClientTimeout(total=READY_TRY_S)
            async with self._session.get(self._base + self._ready_path, timeout=limit) as response:
                return response.status == 200
        return False


class CallableEngine:
    """A function, or an object of a class, in this process; it runs in a thread of its own, one list at a time."""

    def __init__(self, name: str, device: str, at_once: int) -> None:
        self.at_once = at_once
        self._name, self._device = name, device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._call: Any = None

    async def start(self) -> None:
        """Import it, and build it where it is a class."""
        self._call = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """One call."""
        bodies = [request["body"] for request in requests]
        try:
            values = await asyncio.get_running_loop().run_in_executor(self._thread, self._call, bodies)
        except Exception as error:
            kind = type(error).__name__
            text = f"{kind}: {error}"[:MAX_TOLD]
            if isinstance(error, MemoryError) or is_out_of_memory(text):
                raise OutOfMemory(text) from error
            raise Again(text) from error
        return [{"response": {"status_code": 200, "body": value}} for value in self._checked(values, len(bodies))]

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

    async def tokens(self) -> float | None:
        """Not known."""
        return None

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
        return built


def default_device() -> str:
    """``cuda`` where torch is installed and sees a GPU, else ``cpu``."""
    if importlib.util.find_spec("torch") is None:
        return "cpu"
    return "cuda" if importlib.import_module("torch").cuda.is_available() else "cpu"


async def _content(response: aiohttp.ClientResponse) -> bytes:
    parts, room = [], MAX_ANSWER_BYTES
    async for part in response.content.iter_chunked(1 << 16):
        parts.append(part)
        room -= len(part)
        if room < 0:
            raise Again(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
    return b"".join(parts)


def _token_in(path: Path) -> str:
    """The token of a file that its owner alone can read.

    Raises:
        UsageError: others can, it is another user's, or it cannot be read.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise UsageError(f"inference.engine.token_file: others may read {path}", hint=f"chmod 600 {path}")
        return read_text(path, owners={os.geteuid()}, limit_bytes=MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"inference.engine.token_file: cannot read {path}: {error}") from error


def _body_of(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return {"text": text}


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _filled(word: str, words: Mapping[str, str]) -> str:
    for name, value in words.items():
        word = word.replace(name, value)
    return word


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
