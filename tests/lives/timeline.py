"""Time, processes and connections that are simulated: an event loop whose clock jumps to the next thing that happens.

Everything that runs belongs to a *process*. Nothing of a dead one runs any more, not even its clean-up, as after a
SIGKILL; nothing of a stopped one does until it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
import threading
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

RESOLUTION_S = 1e-6
PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Stuck(AssertionError):
    """Nothing will ever happen again, or not before the life's last moment."""


class Process:
    """Whatever can be killed or stopped as one."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.alive, self.stopped = True, False
        self.connections: list[End] = []
        self.waiting: list[Callable[[], object]] = []
        """What is due while it is stopped."""

    def kill(self) -> None:
        """SIGKILL: its connections are reset, and nothing of it runs any more."""
        self.alive = False
        for end in self.connections:
            end.abort()

    def end(self) -> None:
        """It is gone; what it has said to others of its node before arrives."""
        self.alive = False
        for end in self.connections:
            end.close()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT: all that was due meanwhile happens now, in its order."""
        self.stopped = False
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each()


class Handle:
    """A call that is due, of the process around whoever asked for it. asyncio's own does the same in twice the time."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_owner")

    def __init__(self, callback: Any, args: tuple[Any, ...], context: contextvars.Context | None) -> None:
        self._callback, self._args, self._cancelled = callback, args, False
        self._owner = PROCESS.get() if context is None else context.get(PROCESS)
        self._context = contextvars.copy_context() if context is None else context

    def cancel(self) -> None:
        """As of asyncio's."""
        self._cancelled, self._args = True, ()

    def run(self, loop: Timeline) -> None:
        """Call it, unless its process is dead; one that is stopped does it when it goes on."""
        owner = self._owner
        if owner is not None and owner.stopped:
            again = Handle(self._callback, self._args, self._context.copy())
            owner.waiting.append(lambda: loop._ready.append(again))
        elif owner is None or owner.alive:
            try:
                self._context.run(self._callback, *self._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException:  # noqa: BLE001 - as an exception handler that does nothing
                pass


class Timer(float):
    """A call that is due at this time."""

    __slots__ = ("handle", "is_scheduled", "loop")
    handle: Handle
    is_scheduled: bool
    loop: Timeline

    def cancel(self) -> None:
        """As of asyncio's."""
        if not self.handle._cancelled:
            self.handle.cancel()
            self.loop._timer_cancelled_count += self.is_scheduled

    def when(self) -> float:
        """The loop's time at which it is due."""
        return float(self)


class Timeline(asyncio.BaseEventLoop):
    """An event loop in which waiting takes no time. Call ``end`` with it.

    Args:
        until_s: a life that goes on for longer is ``Stuck``.
    """

    _ready: deque[Handle]
    _scheduled: list[Timer]
    _timer_cancelled_count: int
    _stopping: bool
    _closed: bool

    def __init__(self, *, until_s: float) -> None:
        super().__init__()
        self.now_s, self.until_s = 1000.0, 1000.0 + until_s
        self.answer_s: Callable[[], float] = lambda: 0.01
        """How long a thread takes for what it is asked."""

        self.may_sleep: Callable[[], bool] = lambda: False
        """Whether what a thread is asked for may wait: it is a real thread then."""

        self.tasks: list[asyncio.Task[Any]] = []
        self.set_task_factory(_as_part_of_a_process)  # type: ignore[arg-type]
        self.set_exception_handler(lambda _loop, _context: None)

    def run_until_complete(self, future: Any) -> Any:
        """As of any loop; what is left of a wait that was broken off stops no other."""
        ready = [handle for handle in self._ready if handle._callback is not base_events._run_until_complete_cb]  # type: ignore[attr-defined]
        self._ready.clear()
        self._ready.extend(ready)
        return super().run_until_complete(future)

    def _run_once(self) -> None:
        """As ``BaseEventLoop._run_once``, but that it jumps to the next timer instead of waiting for it."""
        timers, ready = self._scheduled, self._ready
        if len(timers) > 100 and self._timer_cancelled_count / len(timers) > 0.5:
            timers[:] = [timer for timer in timers if not self._forget(timer)]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0].handle._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(timers).is_scheduled = False
        if not ready and not self._stopping:
            if not timers:
                raise Stuck("nothing will ever happen again")
            self.now_s += max(0.0, timers[0] - self.now_s)
        if self.now_s > self.until_s:
            raise Stuck("the life goes on for too long")
        end_s = self.now_s + RESOLUTION_S
        while timers and timers[0] < end_s:
            timer = heapq.heappop(timers)
            timer.is_scheduled = False
            ready.append(timer.handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle.run(self)

    def _forget(self, timer: Timer) -> bool:
        if timer.handle._cancelled:
            timer.is_scheduled = False
        return timer.handle._cancelled

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def time(self) -> float:
        """Seconds."""
        return self.now_s

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        """Nothing: signals of a life are calls."""

    def end(self) -> None:
        """Close what is left of all tasks, so that nothing of them runs when they are collected; and the loop."""
        for task in self.tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                for _ in range(9):  # each clean-up that awaits refuses once
                    with contextlib.suppress(BaseException):
                        task.get_coro().close()  # type: ignore[union-attr]
                        break
        self.close()

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        """As of any loop, for the process around it."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        """As of any loop, for the process around it."""
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        """As of any loop, for the process around it."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        timer = Timer(when)
        timer.handle, timer.is_scheduled, timer.loop = Handle(callback, args, context), True, self
        heapq.heappush(self._scheduled, timer)
        return timer

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """A thread's work, done at once when its time has passed."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            if self.may_sleep():
                Thread(self, func, args, future).go_on()
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
                future.set_exception(error)

        self.call_later(self.answer_s(), work)
        return future


class Thread:
    """A thread of a life, which runs only while the timeline waits for it: ``sleep`` gives the turn back."""

    present: Thread | None = None

    def __init__(
        self, timeline: Timeline, func: Callable[..., Any], args: tuple[Any, ...], future: asyncio.Future[Any]
    ) -> None:
        self._timeline, self._future = timeline, future
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._process = PROCESS.get()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, func, args), daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Run it until it sleeps or ends."""
        before, Thread.present = Thread.present, self
        self._mine.release()
        self._theirs.acquire()
        Thread.present = before

    def sleep(self, seconds: float) -> None:
        """Called in the thread."""
        with inside(self._process):
            self._timeline.call_later(seconds, self.go_on)
        self._theirs.release()
        self._mine.acquire()

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._mine.acquire()
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
            if not self._future.done():
                self._future.set_exception(error)
        except BaseException:  # noqa: BLE001 - its process was killed
            pass
        else:
            if not self._future.done():
                self._future.set_result(result)
        finally:
            self._theirs.release()


def _as_part_of_a_process(loop: Timeline, coroutine: Coroutine[Any, Any, Any], **kwargs: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **kwargs)
    loop.tasks.append(task)  # all of them: one that is collected would run its clean-up
    return task


@contextmanager
def inside(process: Process | None) -> Iterator[None]:
    """What is begun in here belongs to that process."""
    token = PROCESS.set(process)
    try:
        yield
    finally:
        PROCESS.reset(token)


class End:
    """One end of a connection; used as an ``asyncio.StreamWriter`` is."""

    def __init__(self, network: Network, address: str, node: str) -> None:
        self._network, self.address, self.node = network, address, node
        self.reader = asyncio.StreamReader(limit=1 << 18, loop=network.timeline)
        self.peer: End = self
        self.transport = self
        self._arrives_s = 0.0
        self._held: deque[bytes | None] = deque()
        self._closed = False

    def write(self, data: bytes) -> None:
        """Send, in order, unless the connection has ended."""
        if not self._closed:
            self._send(data)

    def close(self) -> None:
        """Close this end; the other reads what was sent before, then its end."""
        if not self._closed:
            self._closed = True
            self.reader.feed_eof()
            self._send(None)

    def abort(self) -> None:
        """Reset the connection: what is on its way is lost."""
        for end in (self, self.peer):
            end._held.clear()
            if not end._closed:
                end._closed = True
                end.reader.feed_eof()

    def is_closing(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._closed

    async def drain(self) -> None:
        """Return at once: there is room."""

    def get_extra_info(self, name: str) -> Any:
        """Addresses, and a socket on which options can be set."""
        return {"peername": (self.peer.node, 1), "sockname": (self.node, 1), "socket": self}.get(name)

    def setsockopt(self, *_: Any) -> None:
        """Nothing; the network's own patience counts."""

    def tear(self) -> None:
        """This end is gone, and the other one hears nothing of it; what is on its way still arrives."""
        if not self._closed:
            self._closed = True
            self.reader.feed_eof()

    def _send(self, data: bytes | None) -> None:
        is_remote = self.node != self.peer.node
        if is_remote and (self._network.is_cut(self.node) or self._network.is_cut(self.peer.node)):
            self._held.append(data)
            return
        self._arrives_s = max(
            self._arrives_s + 1e-6, self._network.timeline.now_s + self._network.latency_s(self.node, self.peer.node)
        )
        with inside(None):
            self._network.timeline.call_at(self._arrives_s, self._arrive, data)

    def _arrive(self, data: bytes | None) -> None:
        peer = self.peer
        if peer._closed:
            if data is not None and not self._closed:  # as TCP answers data for a connection that is not there: a reset
                self.tear()
            return
        if data is None:
            peer.reader.feed_eof()
        else:
            peer.reader.feed_data(data)

    def flush(self) -> None:
        """Send what was held back while a node was cut off."""
        held, self._held = self._held, deque()
        for each in held:
            self._send(each)


class Network:
    """Connections between nodes: latency, resets, and nodes that are cut off for a while or for good."""

    PATIENCE_S = 20.0
    """A node that is cut off for longer has lost its connections when it comes back (``ipc.channel.keep_alive``)."""

    def __init__(self, timeline: Timeline, chance: random.Random) -> None:
        self.timeline, self._chance = timeline, chance
        self._ends: list[End] = []
        self._cut: dict[str, float] = {}
        self.listeners: dict[int, tuple[Process, Callable[[Any, Any], Coroutine[Any, Any, None]]]] = {}
        self.on_change: Callable[[], object] = lambda: None
        self.unserved: list[Any] = []
        """Of listeners at which connections wait."""

        self.slow: dict[str, float] = {}
        """By how many seconds messages of a node are late."""

        self.healed_s: dict[str, float] = {}
        self.sockets: dict[str, tuple[Process, Callable[[Any, Any], Coroutine[Any, Any, None]]]] = {}
        """By their paths, those that listen within a node."""

    def latency_s(self, *nodes: str) -> float:
        """Of one message between these nodes; within one, none is slow."""
        slow_s = sum(self.slow.get(node, 0.0) for node in nodes) if len({*nodes}) > 1 else 0.0
        return self._chance.uniform(0.0002, 0.003) + slow_s

    def delay(self, node: str, late_s: float, seconds: float) -> None:
        """Have messages of the node be late for so long."""

        def end() -> None:
            self.on_change()
            self.slow.pop(node, None)

        self.on_change()
        self.slow[node] = late_s
        self.timeline.call_later(seconds, end)

    def is_cut(self, node: str) -> bool:
        """Whether nothing gets to the node, or from it."""
        return node in self._cut

    def cut(self, node: str) -> None:
        """Drop all packets of the node."""
        self.on_change()
        self._cut.setdefault(node, self.timeline.now_s)

    @property
    def is_whole(self) -> bool:
        """Whether no node is cut off or slow."""
        return not self._cut and not self.slow

    def heal(self, node: str) -> None:
        """Let packets of the node pass again."""
        self.on_change()
        since_s = self._cut.pop(node, None)
        if since_s is None:
            return
        self.healed_s[node] = self.timeline.now_s
        is_late = self.timeline.now_s - since_s > self.PATIENCE_S
        for end in self._ends:
            if end.node != end.peer.node and node in (end.node, end.peer.node):
                end.abort() if is_late else end.flush()

    def reset(self, node: str) -> None:
        """Reset all connections of the node."""
        self.on_change()
        for end in self._ends:
            if end.node == node and not end.is_closing():
                end.abort()

    def tear(self, node: str) -> None:
        """Break the connections that the node has made, of which the other side hears nothing."""
        self.on_change()
        for end in self._ends[::2]:
            if end.node == node and not end.is_closing():
                end.tear()

    async def dial(self, host: str, port: int, own: str) -> tuple[asyncio.StreamReader, End]:
        """Connect from the node ``own``, as the present process.

        Raises:
            OSError: nothing listens there, or the node is cut off.
        """
        await asyncio.sleep(self.latency_s())
        if own != host and (self.is_cut(own) or self.is_cut(host)):
            await asyncio.sleep(10.0)
            raise TimeoutError
        return self._connect(self.listeners.get(port), own, host)

    async def dial_here(self, path: str) -> tuple[asyncio.StreamReader, End]:
        """Connect with a process of the same node, as the present one.

        Raises:
            OSError: nothing listens there.
        """
        return self._connect(self.sockets.get(path), "", "")

    def _connect(self, listener: Any, own: str, host: str) -> tuple[asyncio.StreamReader, End]:
        process, serve = listener or (None, None)
        if process is None or not process.alive:
            raise ConnectionRefusedError
        mine, theirs = End(self, own, own), End(self, host, host)
        mine.peer, theirs.peer = theirs, mine
        self._ends += [mine, theirs]
        process.connections.append(theirs)
        if (own_process := PROCESS.get()) is not None:
            own_process.connections.append(mine)
        with inside(process):
            self.timeline.create_task(serve(theirs.reader, theirs))
        return mine.reader, mine
