"""The guardian of a life: the product's own, from the end of a supervisor to the next one, among simulated processes.

What a killed supervisor has started is its guardian's from then on: to end, or to spare for the next supervisor, which
finds it by the process ids, listens at its port, and takes it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pytest

from lives.timeline import PROCESS, Network, Process, inside
from slurmft.supervisor import agents as agents_module
from slurmft.supervisor import guardian
from slurmft.supervisor.agents import outliving
from slurmft.system import processes

if TYPE_CHECKING:
    from lives.nodes import Agent
    from lives.world import World

START_S = (0.2, 0.8)
"""How long a guardian takes to become the next supervisor: it loads the program again."""

LOOK_S = 0.5
KILLED = 128 + signal.SIGKILL


class Execs(BaseException):
    """The guardian has become the program that acts in the place of the supervisor."""


class Exits(BaseException):
    """The guardian has ended."""

    def __init__(self, code: int) -> None:
        self.code = code


class Child(Protocol):
    """What has started agents, or is one."""

    name: str
    pid: int
    agents: Any

    @property
    def returncode(self) -> int | None:
        """None while it lives."""

    def signal(self, number: int) -> None:
        """As the kernel does."""


Begun = TypeVar("Begun", bound=Child)


class Guarding:
    """The guardian of the present start, and what supervisors have started."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.kept: list[int] = []
        """Signals that have come while there was no supervisor."""

        self.spared: list[Agent] = []
        """Agents that it has left to the present supervisor."""

        self.taken: set[int] = set()
        """Ports that other programs have as soon as they can."""

        self.has_given_up = False
        self._process: Process | None = None
        self._pid, self._host = 0, ""
        self._children: list[tuple[Process, Child]] = []
        self._spares: Callable[[int], bool] = outliving(world.config)

    # its life

    def begin(self, host: str) -> None:
        """The batch script begins."""
        self._process, self._pid, self._host = self._world.process("guardian", host), self._world.next_pid(), host
        self.has_given_up = False
        self.kept.clear()
        self.spared.clear()
        self._children.clear()  # those of an earlier one, which has given up, are nobody's
        for name in (guardian._LOSSES_VARIABLE, guardian._LOST_VARIABLE):
            os.environ.pop(name, None)

    def begin_child(self) -> processes.Process:
        """It forks a supervisor, which gets the signals that it has kept."""
        os.environ[guardian._GUARD_VARIABLE] = str(self._pid)
        while self.kept:
            guardian._note(self.kept.pop(0), None)
        pid = self._world.next_pid()
        return processes.Process(self._host, pid, f"born {pid}")

    def variables(self) -> dict[str, str]:
        """What a supervisor finds in its environment."""
        return {guardian._LOST_VARIABLE: os.environ.get(guardian._LOST_VARIABLE, "")}

    def recover(self, lost: int) -> int | None:
        """What follows the end of a supervisor by a signal: None where it acts in its place, else its exit code."""
        from lives.world import Killed

        if self._process is None or not self._process.alive:
            return KILLED
        try:
            with inside(self._process):
                guardian._recover(["slurmft"], self._spares, lost, signal.SIGKILL)
        except Execs:
            left = (each for by, each in self._children if not by.alive and each.returncode is None)
            self.spared = [
                agent for each in left for agent in each.agents if not self._world.network.is_cut(agent.host)
            ]
        except Exits as end:
            self.has_given_up = True
            self._world.check_left_behind(agent for _, each in self._children for agent in each.agents)
            return end.code
        except Killed:
            return KILLED
        try:
            with inside(self._process):
                self._world.pass_time(self._world.chance.uniform(*START_S))
        except Killed:
            return KILLED
        return None

    def end(self) -> None:
        """The batch script has ended."""
        self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.alive = False

    @property
    def losses(self) -> int:
        """Supervisors that it has lost."""
        return int(os.environ.get(guardian._LOSSES_VARIABLE) or "0")

    @property
    def lives_on(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.alive

    @property
    def is_alone(self) -> bool:
        """Whether it runs, and no supervisor does."""
        supervisor = self._world.supervisor
        return self.lives_on and (supervisor is None or not supervisor.alive)

    def pass_time(self, seconds: float) -> bool:
        """Whether it is the guardian that sleeps: the world goes on meanwhile."""
        from lives.world import Killed

        timeline = self._world.timeline
        if self._process is None or PROCESS.get() is not self._process or timeline.is_running():
            return False
        until_s = timeline.now_s + seconds
        while self._process.alive and (left_s := until_s - timeline.now_s) > 0:
            with inside(None), contextlib.suppress(RuntimeError):  # the loop was stopped for a supervisor
                timeline.run_until_complete(asyncio.sleep(left_s))
        if not self._process.alive:
            raise Killed
        return True

    # processes

    def began(self, child: Begun) -> Begun:
        """The supervisor has started this."""
        parent = PROCESS.get()
        assert parent is not None
        self._children.append((parent, child))
        return child

    def children_of(self, parent: int) -> list[tuple[int, str]]:
        """As ``processes.children_of``, of the guardian."""
        assert parent == self._pid
        return [(each.pid, each.name) for by, each in self._children if not by.alive and each.returncode is None]

    def words_of(self, pid: int) -> list[str]:
        """As ``processes.words_of``."""
        return [] if self._living(pid) is None else ["slurmft", "agent", str(self._world.run.config)]

    def birth_of(self, pid: int) -> str:
        """As ``processes.birth_of``."""
        return "" if self._living(pid) is None else f"born {pid}"

    def lives(self, pid: int, birth: str) -> bool:
        """As ``processes.lives``."""
        there = [(each.pid, each.birth) for each in (self._world.me(), *self._world.living())]
        return (pid, birth) in there or (bool(birth) and self.birth_of(pid) == birth)

    def signal(self, pid: int, number: int) -> None:
        """As ``os.kill``."""
        from lives.world import Killed

        if self._world.is_gone():
            raise Killed
        child = self._living(pid)
        if child is None:
            raise ProcessLookupError
        self._world.note(f"{signal.Signals(number).name} for {child.name} of {[each.host for each in child.agents]}")
        if self._world.config.inference is not None:
            from lives.batches import check_spared

            check_spared(self._world, child.agents)
        child.signal(number)

    def own_pid(self) -> int:
        """As ``os.getpid``, of the guardian or its child."""
        return self._pid if PROCESS.get() is self._process else self._world.me().pid

    def _living(self, pid: int) -> Child | None:
        return next((each for _, each in self._children if each.pid == pid and each.returncode is None), None)


class Listener:
    """A socket that listens. Who connects before somebody serves it waits for that, or for its end."""

    def __init__(self, network: Network, process: Process, port: int) -> None:
        self._network, self._process, self._port = network, process, port
        self._served = asyncio.Event()
        self._serve: Callable[[Any, Any], Coroutine[Any, Any, None]] | None = None
        network.listeners[port] = process, self._accept
        network.unserved.append(self._accept)

    def getsockname(self) -> tuple[str, int]:
        """Where."""
        return "", self._port

    def serve(self, serve: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> int:
        """Have connections served from now on; returns the port."""
        self._serve = serve
        self._served.set()
        self._network.listeners[self._port] = self._process, serve
        return self._port

    def close(self) -> None:
        """Nothing listens any more."""
        gone = Process("nobody", "")
        gone.alive = False
        self._network.listeners[self._port] = gone, self._accept
        self._served.set()

    async def _accept(self, reader: Any, writer: Any) -> None:
        await self._served.wait()
        if self._serve is None:
            writer.abort()
        else:
            await self._serve(reader, writer)


def simulate_guardian(world: World, patch: pytest.MonkeyPatch) -> None:
    """Put the life's processes, and their guardian, in the place of real ones."""
    guarding, own_pid = world.guarding, os.getpid

    def listening_socket(_: str | None, port: int = 0) -> Listener:
        process, _serve = world.network.listeners.get(port, (None, None))
        if port in guarding.taken or port == 0 or (process is not None and process.alive):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        mine = PROCESS.get()
        assert mine is not None
        return Listener(world.network, mine, port)

    def execv(*_: Any) -> None:
        raise Execs

    def leave(code: int) -> None:
        raise Exits(code)

    def waitpid(*_: Any) -> None:
        raise ChildProcessError

    for name in (guardian._GUARD_VARIABLE, guardian._LOSSES_VARIABLE, guardian._LOST_VARIABLE):
        patch.setenv(name, "")
    for function, value in {
        "kill": guarding.signal, "execv": execv, "_exit": leave, "waitpid": waitpid,
        "getppid": lambda: guarding._pid,
        "getpid": lambda: own_pid() if PROCESS.get() is None else guarding.own_pid(),
    }.items():  # fmt: skip
        patch.setattr(os, function, value)
    for module in (agents_module, guardian):
        patch.setattr(module, "children_of", guarding.children_of)
    for name in ("words_of", "birth_of", "lives"):
        patch.setattr(agents_module, name, getattr(guarding, name))
    patch.setattr(agents_module, "listening_socket", listening_socket)
    told = SimpleNamespace(write=lambda text: world.note(text.strip()), flush=lambda: None)
    patch.setattr(guardian, "sys", SimpleNamespace(stderr=told))
