"""Simulated agents, many in one process: ``agents.py PORT SECRET_FILE COUNT RANKS INTERVAL_S NOTES``.

They speak the agents' protocol with its own classes: they start, report, answer each call, and a kill ends their
workers. On SIGUSR1 rank 0 of the last node dies. ``NOTES`` gets a line of JSON for each moment that is measured; the
clock is the machine's, so that the supervisor's process can compare.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from slurmft.ipc.channel import BadMessage, Channel, Fields, connect, encoded
from slurmft.ipc.messages import (
    AskSections,
    Done,
    EvidenceReply,
    Hello,
    Kill,
    Port,
    ProgressReport,
    RankEvidence,
    Rescued,
    RescueState,
    ReservedPort,
    SectionsReply,
    Shutdown,
    Started,
    StartWorkers,
    TakeEvidence,
    WorkerExited,
    WorkerFacts,
    WorkerSections,
    parse_call,
)
from slurmft.ipc.pages import MAX_FRAMES, State
from slurmft.policy.judge import COLLECTIVE_DOING, Where

CONNECTING_AT_ONCE = 32
DYING_S = 0.5
"""From a kill to the first report of an end, evenly spread over as long: on real nodes all die at once, but here
one process would still be about the ends of the first when the kill of the last comes."""

STACK = tuple(f"/home/user/train/model/layers/transformer.py:{line} in forward" for line in range(MAX_FRAMES))


def facts_of(rank: int, step: int) -> WorkerFacts:
    return WorkerFacts(
        rank=rank, state=State.TRAINING, attached=True, step=step, until=10**6, saved=0, durable=0, resumed=0,
        first_step_at=1.0, answered=-1, metric=2.5, first_step_s=1.0, longest_step_s=0.1, saves=3, save_failures=0,
        save_errno=0, save_s=0.5, save_cost_s=0.1, saving_s=0.0, since_saved_s=12.0,
    )  # fmt: skip


def evidence_of(rank: int) -> RankEvidence:
    return RankEvidence(
        rank=rank, pid=1000 + rank, kind=Where.COLLECTIVE, doing=COLLECTIVE_DOING, process="S", wchan="futex_wait",
        attached=True, state=State.TRAINING, step=7, tick=7, sections=("step",), python_top=STACK, exit_code=None,
        killed=False,
    )  # fmt: skip


def sections_of(rank: int) -> WorkerSections:
    return WorkerSections(
        rank=rank, attached=True, age_s=100.0, quiet_s=0.1, sections=(("step", 0.2),), elsewhere=(), step=7,
        own_work=3, stopped=False, holding=False, warming_up=False, heartbeat_s=0.1,
    )  # fmt: skip


class Moments:
    """When the first and the last agent got a call of each kind."""

    def __init__(self, path: Path, agents: int) -> None:
        self._file, self._agents, self._seen = path.open("a", buffering=1), agents, Counter[str]()

    def note(self, what: str, **more: Any) -> None:
        self._file.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")

    def got(self, kind: str) -> None:
        self._seen[kind] += 1
        if self._seen[kind] in (1, self._agents):
            self.note(f"{'first' if self._seen[kind] == 1 else 'last'} {kind}")


class Agent:
    """One of them."""

    def __init__(self, node: int, ranks: int, moments: Moments) -> None:
        self.node, self._per_node, self._moments = node, ranks, moments
        self.channel: Channel | None = None
        self.generation = 0
        self._ranks: list[int] = []
        self._evidence = self._sections = DONE
        self.step = 0

    def report(self) -> None:
        if self.channel is not None:
            self.step += 1
            told = tuple(facts_of(rank, self.step) for rank in self._ranks)
            self.channel.send(ProgressReport(ranks=told, ready=True, generation=self.generation))

    def die(self, rank: int, code: int, *, killed: bool) -> None:
        if self.channel is not None and rank in self._ranks:
            facts = asdict(facts_of(rank, self.step))
            end = WorkerExited(code=code, killed=killed, generation=self.generation, **facts)
            self.channel.send(end)

    def _all_die(self) -> None:
        for rank in self._ranks:
            self.die(rank, -signal.SIGKILL, killed=True)
        self._ranks = []

    def forget(self, rank: int) -> None:
        self._ranks.remove(rank)

    async def live(self, channel: Channel) -> None:
        self.channel = channel
        while (line := await channel.receive_line()) is not None:
            number, call = parse_call(line)
            self._moments.got(getattr(call, "kind", ""))
            send_text(channel, number, self._answer(call))
            if isinstance(call, StartWorkers):
                self.report()
            if isinstance(call, Kill):
                delay_s = DYING_S * (1 + random.random())
                asyncio.get_running_loop().call_later(delay_s, self._all_die)
            if isinstance(call, Shutdown):
                channel.close()

    def _answer(self, call: Any) -> str:
        if isinstance(call, StartWorkers):
            self._ranks = list(range(call.first_rank, call.first_rank + self._per_node))
            self.generation = call.generation
            self._evidence = text_of(EvidenceReply(ranks=tuple(map(evidence_of, self._ranks))))
            self._sections = text_of(SectionsReply(workers=tuple(map(sections_of, self._ranks)), more=False))
            return text_of(Started())
        if isinstance(call, Port):
            return text_of(ReservedPort(port=29500))
        return {TakeEvidence: self._evidence, AskSections: self._sections, RescueState: RESCUED}.get(type(call), DONE)


def text_of(reply: Fields) -> str:
    """A reply as JSON, without what comes before it on its way: real agents make theirs at the same time."""
    return encoded(reply)[1:].decode()


def send_text(channel: Channel, number: int, text: str) -> None:
    """As ``Channel.send``, of a reply that is JSON already."""
    body = f'{{"kind":"reply","id":{number}{"," * (text != "}")}{text}'.encode()
    channel._writer.write(channel._mac(channel._mine, channel._sent, body) + b" " + body + b"\n")
    channel._sent += 1


DONE, RESCUED = text_of(Done()), text_of(Rescued(step=7))


async def connected(agent: Agent, port: int, secret: bytes, few: asyncio.Semaphore) -> None:
    async with few:
        while True:
            try:
                channel = await connect("127.0.0.1", port, secret)
                break
            except (OSError, BadMessage):
                await asyncio.sleep(0.2)
        channel.send(Hello(node=agent.node, host=f"n{agent.node}", pid=1))
    await agent.live(channel)


async def reports(agents: list[Agent], interval_s: float) -> None:
    """Each agent's in its turn, evenly: what hundreds of agents with clocks of their own come to."""
    order = random.sample(agents, len(agents))
    while True:
        for number, agent in enumerate(order):
            agent.report()
            if number % 8 == 7:
                await asyncio.sleep(8 * interval_s / len(order))


async def main(port: int, secret: bytes, count: int, ranks: int, interval_s: float, notes: Path) -> None:
    moments, few = Moments(notes, count), asyncio.Semaphore(CONNECTING_AT_ONCE)
    agents = [Agent(node, ranks, moments) for node in range(count)]

    def rank_dies() -> None:
        moments.note("death")
        agents[-1].die((count - 1) * ranks, -signal.SIGKILL, killed=False)
        agents[-1].forget((count - 1) * ranks)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, rank_dies)
    reporting = asyncio.create_task(reports(agents, interval_s))
    await asyncio.gather(*(connected(agent, port, secret, few) for agent in agents))
    reporting.cancel()


if __name__ == "__main__":
    where, secret_file, *numbers, interval, path = sys.argv[1:]
    few_or_many, of_each = map(int, numbers)
    asyncio.run(main(int(where), Path(secret_file).read_bytes(), few_or_many, of_each, float(interval), Path(path)))
