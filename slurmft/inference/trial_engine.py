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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurmft.config.inference import InferenceConfig
from slurmft.inference.gang import Asks, Ended, Head, Starts, Tries, TryEnded, free_port
from slurmft.inference.requests import refuse_constant
from slurmft.inference.trials import CANCEL, folder_of_trial
from slurmft.ipc.channel import Channel, read
from slurmft.ipc.pages import STOP_SIGNAL_VARIABLE
from slurmft.policy.inference import EXIT_NODE, TrialEnd, end_of_trial, filled_with
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

log = logging.getLogger(__name__)


class Stopped(Exception):
    """The trial has no end: it goes on elsewhere, in the same folder."""


class TrialEngine:
    """Runs one trial at a time.

    Args:
        owner: names the replica and its life, so that no two tries share a result.
        head: gathers the other nodes of trials that have several.
    """

    request_path = ""
    at_once = 1
    is_here = False

    def __init__(self, config: InferenceConfig, run_folder: Path, owner: str, head: Head | None = None) -> None:
        self._config, self._run_folder, self._owner, self._head = config, run_folder, owner, head
        self._part, self._address = _Part(config, run_folder), "127.0.0.1"
        self._stopping = asyncio.Event()
        self._is_cut_off = self._is_cancelled = False
        self._signalled_s = -SIGNALLED_S
        self._tries = 0
        self._node_failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Nothing is to be started before the first trial, once all of its nodes are there."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in {self._part.stop_signal, signal.SIGTERM}:
            loop.add_signal_handler(number, self._note_signal)
        if self._head is not None:
            self._address = (await self._head.gather())["{head}"]

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
        """Return when trials fail for what this node has, or another node of theirs is gone."""
        waits: list[asyncio.Future[int]] = [self._node_failed, *([] if self._head is None else [self._head.broken])]
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return next(each for each in waits if each in done).result()

    async def close(self) -> None:
        """End the trial."""
        if self._head is not None:
            self._head.close()
        await self._part.end_all()

    def stop(self) -> None:
        """Ask the trial to save and end, where it has a handler for that; another one may come to its end in time."""
        self._stopping.set()
        self._ask_to_save()

    def _ask_to_save(self) -> bool:
        """Whether the trial, or a process of it on this node, has a handler for the signal, which it gets."""
        if self._head is not None:
            self._head.ask(save=True)
        return self._part.ask_to_save()

    def cut_off(self) -> None:
        """Another lease is to run the trial anew: end it now."""
        self._is_cut_off = True
        self._part.kill()
        if self._head is not None:
            self._head.ask(save=False)

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
            is_signalled = -code == self._part.stop_signal or time.monotonic() - self._signalled_s < SIGNALLED_S
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

    async def _try(self, name: str, folder: Path, result: Path, parameters: Mapping[str, Any]) -> _End:
        """How it ended on all of its nodes, of which none has anything left of it then."""
        text = json.dumps(parameters, ensure_ascii=False)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        await asyncio.to_thread(replace_atomically, folder / "parameters.json", text)
        port, members = free_port(""), list[asyncio.Future[TryEnded]]()
        if self._head is not None:
            members = self._head.begin_try(self._tries, name, port)
        own = asyncio.create_task(self._part.run(name, self._address, port, result))
        parts, first = list[asyncio.Future[Any]]([own, *members]), -1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limit_s):
                    first = await _first_to_fail(parts, lambda end: end.code)
        finally:
            if self._head is not None:
                self._head.ask(save=False)
            own.cancel()
            await asyncio.wait(parts, timeout=2 * LEFT_S)
        if first < 0:
            told = f"slurmft: it took longer than {self._limit_s:g} s (trials.timeout_s)"
            with contextlib.closing(_KeptOutput(folder / "log.txt", self._config.engine.log_bytes)) as kept:
                kept.note(told)
            return _End(-signal.SIGKILL, told)
        if first == 0:
            return own.result()
        return _End(parts[first].result().code, parts[first].result().text)

    @property
    def _limit_s(self) -> float | None:
        is_given = "request_timeout_s" in self._config.model_fields_set
        return self._config.request_timeout_s if is_given else None


class _End(NamedTuple):
    """How ranks ended: the code of the first that failed, or 0; the end of its output; and the last line of rank 0's
    standard output."""

    code: int
    text: str
    last: str = ""


async def _first_to_fail(parts: Sequence[asyncio.Future[Any]], code: Callable[[Any], int]) -> int:
    """Which of these ends with another code than 0 first; 0 when none does, and all have ended."""
    waiting = set(parts)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for number, part in enumerate(parts):
            if part in done and code(part.result()):
                return number
    return 0


async def follow(channel: Channel, starts: Starts, node: int, config: InferenceConfig, run_folder: Path) -> None:
    """A member's side: its ranks of one try after the other, until the head is gone."""
    adopt_orphans()
    part, trying = _Part(config, run_folder, node), None
    for number in {part.stop_signal, signal.SIGTERM}:  # the head hears of a stop
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)

    async def run(tries: Tries) -> None:
        end = _End(1, "")
        try:
            end = await part.run(tries.trial, starts.head, tries.head_port)
        except (OSError, ValueError) as error:
            end = _End(1, str(error))
        finally:
            meaning = end_of_trial(end.code, has_result=False, is_stopping=False, text=end.text)
            ended = TryEnded(number=tries.number, code=end.code, text=end.text[-MAX_TOLD:])
            channel.send(Ended(code=EXIT_NODE) if meaning is TrialEnd.NODE else ended)

    try:
        while (told := await channel.receive()) is not None:
            match read(told, Tries | Asks, "what the head says"):
                case Tries() as tries:
                    if trying is not None:  # its end took longer than the head waits
                        await asyncio.wait({trying})
                    trying = asyncio.create_task(run(tries))
                    await asyncio.sleep(0)  # one that is cancelled before it begins would say nothing
                case Asks(save=True):
                    part.ask_to_save()
                case Asks() if trying is not None and not trying.cancelling():  # twice would cut its end short
                    trying.cancel()
    finally:
        if trying is not None:
            if not trying.cancelling():
                trying.cancel()
            await asyncio.wait({trying})


class _Part:
    """The ranks of one try on one node."""

    def __init__(self, config: InferenceConfig, run_folder: Path, node: int = 0) -> None:
        assert config.engine.process is not None
        self._command, self._engine = config.engine.process, config.engine
        self._run_folder, self._node = run_folder, node
        self.stop_signal = signal.Signals[os.environ.get(STOP_SIGNAL_VARIABLE, "SIGTERM")]
        self._processes: list[asyncio.subprocess.Process] = []

    async def run(self, name: str, head: str, port: int, result: Path | None = None) -> _End:
        """Run them until one fails, all have ended, or this is cancelled; nothing of them is left then.

        Args:
            head, port: where ranks find each other.
            result: for rank 0; what others write counts for nothing.
        """
        nodes, count, folder = self._engine.nodes, self._engine.nproc_per_node, folder_of_trial(self._run_folder, name)
        text = await asyncio.to_thread((folder / "parameters.json").read_text, encoding="utf-8")
        words = {"trial_name": name, "trial_folder": str(folder), **json.loads(text)}
        argv = [filled_with(word, words) for word in self._command]
        environment = {
            **os.environ, "SLURMFT_TRIAL_NAME": name, "SLURMFT_TRIAL_FOLDER": str(folder),
            "SLURMFT_TRIAL_PARAMETERS": str(folder / "parameters.json"),
            "SLURMFT_CHECKPOINT_DIR": str(folder / "checkpoints"),
        }  # fmt: skip
        if len(text.encode(errors="replace")) < MAX_VARIABLE_BYTES:
            environment["SLURMFT_TRIAL"] = text
        kept, pumps, codes = list[_KeptOutput](), list[asyncio.Task[None]](), list[asyncio.Task[int]]()
        first = 0
        try:
            for local in range(count):
                rank = self._node * count + local
                mine = {**environment, "SLURMFT_TRIAL_RESULT": str(result or folder / f"result-{rank}.json")}
                result = None
                if nodes * count > 1:
                    mine |= {"RANK": str(rank), "WORLD_SIZE": str(nodes * count), "LOCAL_RANK": str(local),
                             "LOCAL_WORLD_SIZE": str(count), "NODE_RANK": str(self._node), "MASTER_ADDR": head,
                             "MASTER_PORT": str(port)}  # fmt: skip
                kept.append(_KeptOutput(folder / (f"log-{rank}.txt" if rank else "log.txt"), self._engine.log_bytes))
                # pipes of our own: asyncio takes a process for running while others hold the pipes that it has made
                (out, to_out), (err, to_err) = os.pipe(), os.pipe()
                try:
                    pumps += [await _pumped(kept[-1], out, is_stdout=True), await _pumped(kept[-1], err)]
                    process = await asyncio.create_subprocess_exec(
                        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=to_out, stderr=to_err, start_new_session=True,
                        preexec_fn=die_with_parent, env=mine,
                    )  # fmt: skip
                except (OSError, ValueError) as error:  # also a parameter with a null character
                    why = getattr(error, "strerror", None) or error
                    return _End(127, f"cannot start {argv[0]!r}: {why}")
                finally:
                    os.close(to_out)
                    os.close(to_err)
                self._processes.append(process)
                codes.append(asyncio.create_task(process.wait()))
            first = await _first_to_fail(codes, int)
            code = codes[first].result()
        finally:
            await self.end_all()
            await asyncio.gather(*codes, return_exceptions=True)
            await asyncio.wait(pumps, timeout=OUTPUT_S)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in kept:
                each.close()
        return _End(code, kept[first].tail, kept[0].last_line)

    def ask_to_save(self) -> bool:
        """Whether a process of them has a handler for the signal of a stop, which it gets."""
        able = list[int]()
        for leader in [each.pid for each in self._processes if each.returncode is None]:
            members = [view(pid) for pid in sorted(session_members(leader))]
            catching = [each.pid for each in members if each is not None and each.catches(self.stop_signal)]
            able += [leader] if leader in catching else catching
        for pid in able:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self.stop_signal)
        return bool(able)

    def kill(self) -> None:
        """End them at once."""
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    async def end_all(self) -> None:
        """End them and everything that comes from them, in any session."""
        if not (processes := self._processes):
            return
        self.kill()
        for process in processes:
            if process.returncode is None:
                await end_child(process, LEFT_S)
        await asyncio.to_thread(kill_left, {each.pid: "" for each in processes}, LEFT_S, ())
        reap_adopted(())
        self._processes = []


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
                self._path.replace(self._path.with_suffix(".1.txt"))
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
            return json.loads(last_line, parse_constant=refuse_constant)
        return None
    try:
        if path.stat().st_size > MAX_RESULT_BYTES:
            raise ValueError(f"more than {MAX_RESULT_BYTES >> 20} MiB; keep what is larger in a file of the trial")
        value = json.loads(read_part(path, 0, MAX_RESULT_BYTES).decode(), parse_constant=refuse_constant)
        path.replace(path.with_name("result.json"))
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return value


def _how(code: int, text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}; its last words: {lines[-1][:500]}" if lines else how
