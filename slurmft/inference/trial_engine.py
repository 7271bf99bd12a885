"""The engine of a sweep: each request is a trial, which a fresh process runs in a folder of its own.

The folder is the same on every node and in every try: ``parameters.json``, ``log.txt`` (before it ``log.1.txt``), the
trial's own files, and ``result.json`` at the end. What a trial leaves running ends with it. A file ``cancel`` there is
the user's wish that it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmft.config.inference import InferenceConfig
from slurmft.inference.trials import CANCEL, folder_of_trial
from slurmft.ipc.pages import STOP_SIGNAL_VARIABLE
from slurmft.policy.inference import TrialEnd, end_of_trial, filled_with
from slurmft.system.background import end_child
from slurmft.system.files import open_regular, read_part, replace_atomically
from slurmft.system.processes import adopt_orphans, die_with_parent, kill_left, reap_adopted, session_members, view

MAX_RESULT_BYTES = 1 << 20
MAX_VARIABLE_BYTES = 100_000
"""Linux has 128 KiB for one word of an environment."""

TAIL_BYTES = 16 << 10
MAX_TOLD = 2000
OUTSIDE_S = 5.0
"""So long after the end of a trial that had a signal to stop, a stop of the whole run explains it."""

SIGNALLED_S = 10.0
"""So long after a signal to all processes of the job, this one included, a trial's end may be due to it."""

CANCEL_LOOK_S, CANCEL_S = 1.0, 30.0
"""How often it is looked whether a trial is cancelled, and what it has to save then."""

CANCELLED: Mapping[str, Any] = {"error": {"code": "cancelled", "message": "by the user"}}

LEFT_S, OUTPUT_S = 10.0, 2.0
"""For what a trial leaves running to be gone, and for the end of its output."""

EXIT_NODE = 70
"""EX_SOFTWARE of sysexits.h: trials fail for what their node has."""

log = logging.getLogger(__name__)


class Stopped(Exception):
    """The trial has no end: it goes on elsewhere, in the same folder."""


class TrialEngine:
    """Runs one trial at a time.

    Args:
        owner: names the replica and its life, so that no two tries share a result.
    """

    request_path = ""
    at_once = 1

    def __init__(self, config: InferenceConfig, run_folder: Path, owner: str) -> None:
        assert config.engine.process is not None
        self._config, self._command, self._run_folder, self._owner = config, config.engine.process, run_folder, owner
        self._stop_signal = signal.Signals[os.environ.get(STOP_SIGNAL_VARIABLE, "SIGTERM")]
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._is_cut_off = self._is_cancelled = False
        self._signalled_s = -SIGNALLED_S
        self._tries = 0
        self._node_failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Nothing is to be started before the first trial."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in {self._stop_signal, signal.SIGTERM}:
            loop.add_signal_handler(number, self._note_signal)

    async def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The results of trials, or why they have none.

        Raises:
            Stopped: the run stops, or the lease is void.
        """
        return [await self._run(request) for request in requests]

    async def tokens(self) -> float:
        """A trial may be silent for hours; that this process answers shows that it is looked after."""
        return time.monotonic()

    async def ended(self) -> int:
        """Return when trials fail for what this node has."""
        return await self._node_failed

    async def close(self) -> None:
        """End the trial."""
        await self._end_all()

    def stop(self) -> None:
        """Ask the trial to save and end, where it has a handler for that; another one may come to its end in time."""
        self._stopping.set()
        self._ask_to_save()

    def _ask_to_save(self) -> bool:
        """Whether the trial, or a process of it, has a handler for the signal, which it gets."""
        able = list[int]()
        if self._process is not None and self._process.returncode is None:
            leader = self._process.pid
            members = [view(pid) for pid in sorted(session_members(leader))]
            able = [each.pid for each in members if each is not None and each.catches(self._stop_signal)]
            for pid in [leader] if leader in able else able:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, self._stop_signal)
        return bool(able)

    def cut_off(self) -> None:
        """Another lease is to run the trial anew: end it now."""
        if self._process is not None and self._process.returncode is None:
            self._is_cut_off = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _note_signal(self) -> None:
        self._signalled_s = time.monotonic()

    async def _watch_cancel(self, path: Path) -> None:
        await asyncio.sleep(CANCEL_LOOK_S)
        while not await asyncio.to_thread(path.exists):
            await asyncio.sleep(CANCEL_LOOK_S)
        self._is_cancelled = True
        if self._ask_to_save():
            await asyncio.sleep(CANCEL_S)
        self.cut_off()

    async def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name, began_s = request.get("trial", request["id"]), time.monotonic()
        folder = folder_of_trial(self._run_folder, name)
        for failed in range(self._config.max_retries + 1):
            self._is_cut_off = self._is_cancelled = False
            if self._stopping.is_set():
                raise Stopped
            self._tries += 1
            result = folder / f".result-{self._owner}-{self._tries}.json"
            if await asyncio.to_thread((folder / CANCEL).exists):
                return dict(CANCELLED)
            watching = asyncio.create_task(self._watch_cancel(folder / CANCEL))
            try:
                code, text, last = await self._try(name, folder, result, request["body"])
            finally:
                watching.cancel()
            is_signalled = -code == self._stop_signal or time.monotonic() - self._signalled_s < SIGNALLED_S
            if is_signalled and not result.exists() and not self._stopping.is_set():  # that comes before its reason
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), OUTSIDE_S)
            is_asked = self._stopping.is_set() or self._is_cut_off or self._is_cancelled
            end = end_of_trial(code, has_result=result.exists(), is_stopping=is_asked, text=text)
            why = _how(code, text)
            if end is TrialEnd.RESULT:
                try:
                    value = _result_in(result, last)
                except ValueError as error:
                    why = f"its result cannot be taken: {error}"
                else:
                    seconds = round(time.monotonic() - began_s, 3)
                    body = {"result": value, "seconds": seconds, "node": socket.gethostname()}
                    return {"response": {"status_code": 200, "body": body}}
            elif end is TrialEnd.STOPPED:
                if not self._is_cancelled:
                    raise Stopped
                return dict(CANCELLED)
            elif end is TrialEnd.NODE:
                log.error("trial %s: %s", name, why)
                if not self._node_failed.done():
                    self._node_failed.set_result(EXIT_NODE)
                await asyncio.Event().wait()
            log.info("try %d of trial %s: %s", failed + 1, name, why)
        return {"error": {"code": "trial_failed", "message": why[:MAX_TOLD]}}

    async def _try(self, name: str, folder: Path, result: Path, parameters: Mapping[str, Any]) -> tuple[int, str, str]:
        """The exit code of one process, the end of its output, and the last line of its standard output."""
        text = json.dumps(parameters, ensure_ascii=False)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        await asyncio.to_thread(replace_atomically, folder / "parameters.json", text)
        environment = {
            **os.environ, "SLURMFT_TRIAL_NAME": name, "SLURMFT_TRIAL_FOLDER": str(folder),
            "SLURMFT_TRIAL_RESULT": str(result), "SLURMFT_TRIAL_PARAMETERS": str(folder / "parameters.json"),
            "SLURMFT_CHECKPOINT_DIR": str(folder / "checkpoints"),
        }  # fmt: skip
        if len(text.encode(errors="replace")) < MAX_VARIABLE_BYTES:
            environment["SLURMFT_TRIAL"] = text
        words = {"trial_name": name, "trial_folder": str(folder), **parameters}
        argv = [filled_with(word, words) for word in self._command]
        kept = _KeptOutput(folder / "log.txt", self._config.engine.log_bytes)
        # pipes of our own: asyncio takes a process for running while others hold the pipes that it has made
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        pumps = [await _pumped(kept, out, is_stdout=True), await _pumped(kept, err)]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=to_out, stderr=to_err, start_new_session=True,
                preexec_fn=die_with_parent, env=environment,
            )  # fmt: skip
        except (OSError, ValueError) as error:  # also a parameter with a null character
            return 127, f"cannot start {argv[0]!r}: {getattr(error, 'strerror', None) or error}", ""
        finally:
            os.close(to_out)
            os.close(to_err)
        try:
            async with asyncio.timeout(self._limit_s):
                code = await self._process.wait()
        except TimeoutError:
            await self._end_all()
            code = -signal.SIGKILL
            kept.note(f"slurmft: it took longer than {self._limit_s:g} s (trials.timeout_s)")
        finally:
            await self._end_all()
            await asyncio.wait(pumps, timeout=OUTPUT_S)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            kept.close()
        return code, kept.tail, kept.last_line

    @property
    def _limit_s(self) -> float | None:
        is_given = "request_timeout_s" in self._config.model_fields_set
        return self._config.request_timeout_s if is_given else None

    async def _end_all(self) -> None:
        """End the trial's process and everything that comes from it, in any session."""
        if (process := self._process) is None:
            return
        if process.returncode is None:
            await end_child(process, LEFT_S)
        await asyncio.to_thread(kill_left, {process.pid: ""}, LEFT_S, ())
        reap_adopted(())
        self._process = None


class _KeptOutput:
    """The end of what a trial writes: half of the limit in one file, as much before it in another; and the very end of
    it in memory. A disk that takes nothing costs the log, and not the trial."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path, self._half = path, limit_bytes // 2
        self._tail, self._out = bytearray(), bytearray()
        self._stream: io.FileIO | None = None
        self._size = 0

    @property
    def tail(self) -> str:
        return self._tail.decode(errors="replace")

    @property
    def last_line(self) -> str:
        return (self._out.decode(errors="replace").strip().splitlines() or [""])[-1]

    async def take(self, reader: asyncio.StreamReader, pipe: asyncio.BaseTransport, *, is_stdout: bool) -> None:
        """All of a pipe, which is closed then."""
        with contextlib.closing(pipe):
            while part := await reader.read(1 << 16):
                self._add(part)
                if is_stdout:
                    self._out += part
                    del self._out[:-TAIL_BYTES]

    def note(self, line: str) -> None:
        self._add(f"\n{line}\n".encode())

    def close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()

    def _opened(self) -> io.FileIO:
        return io.FileIO(open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, follow=False), "a")

    def _add(self, part: bytes) -> None:
        self._tail += part
        del self._tail[:-TAIL_BYTES]
        with contextlib.suppress(OSError):
            if self._stream is None:
                self._stream = self._opened()
                self._size = os.fstat(self._stream.fileno()).st_size
            if self._size > self._half:
                self._stream.close()
                self._path.replace(self._path.with_name("log.1.txt"))
                self._stream, self._size = self._opened(), 0
            self._size += self._stream.write(part)


async def _pumped(kept: _KeptOutput, descriptor: int, *, is_stdout: bool = False) -> asyncio.Task[None]:
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), io.FileIO(descriptor)
    )
    return asyncio.create_task(kept.take(reader, pipe, is_stdout=is_stdout))


def _result_in(path: Path, last_line: str) -> Any:
    """The value in a file that a trial has written; without one, its last line where that is JSON.

    Raises:
        ValueError: it is no JSON, or too long.
    """
    if not path.exists():
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(last_line, parse_constant=_refuse_constant)
        return None
    try:
        if path.stat().st_size > MAX_RESULT_BYTES:
            raise ValueError(f"more than {MAX_RESULT_BYTES >> 20} MiB; keep what is larger in a file of the trial")
        value = json.loads(read_part(path, 0, MAX_RESULT_BYTES).decode(), parse_constant=_refuse_constant)
        path.replace(path.with_name("result.json"))
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON; write null, or a text")


def _how(code: int, text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}; its last words: {lines[-1][:500]}" if lines else how
