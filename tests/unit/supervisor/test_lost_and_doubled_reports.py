"""Agents' reports are state: whatever connections lose, double or delay, the supervisor comes to know the same."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict
from rank_facts import training

from slurmft.ipc.messages import (
    Hello,
    Lasting,
    LimitReport,
    NoticeReport,
    ProgressReport,
    RehearsalReport,
    Report,
    SignalReport,
    WorkerExited,
)
from slurmft.policy import life
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.agents import AgentLink, AgentPool
from slurmft.supervisor.attempt import AttemptRunner
from slurmft.supervisor.observations import Observations
from slurmft.supervisor.stops import Machine

GENERATION, NODES = 3, 2
NOTICE = NoticeReport(source="cloud", what="maintenance", ends=False, left_s=60.0, at=1.0)


def script(node: int) -> list[Report]:
    """What an agent comes to know, one after the other."""
    steps = [training(rank=node, step=step, saved=step - step % 4) for step in range(1, 10)]
    progress: list[Report] = [ProgressReport(ranks=(facts,), ready=True, generation=GENERATION) for facts in steps]
    end = WorkerExited(code=node, killed=False, generation=GENERATION, **asdict(steps[-1]))
    lasting = [
        LimitReport(what="no file of it"), NOTICE, RehearsalReport(took_s=1.5),
        SignalReport(name="SIGUSR1", count=1, at=2.0),
    ]  # fmt: skip
    return [*progress[:3], *lasting, *progress[3:], end]


@dataclass
class Supervised:
    """The supervisor's part of an attempt, with what it has done about reports."""

    folder: Path
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        journal: Any = SimpleNamespace(append=lambda event, **facts: self.done.append(f"{event} {facts}"))
        run = RunFolder(self.folder)
        self.seen = Observations(run, journal, Attempt(job="1", restart=0), NODES, workload="", history=())
        self.pool = AgentPool(b"", NODES)
        self.pool.generation = GENERATION
        self.runner = AttemptRunner.__new__(AttemptRunner)

        def note(link: AgentLink, report: Report) -> None:
            self.done.append(f"{link.host} {report}")

        stops: Any = Machine(life.Rules(), {
            life.NoteFailure: lambda note: self.done.append(f"{note.end.rank} failed"), life.EndPeers: lambda _: None,
            life.AskCause: lambda ask: self.done.append(f"{ask.name}: asks why"),
        })  # fmt: skip
        stops.on_signal = lambda name, host: stops.feed(life.Signalled(name, host))
        parts: dict[str, Any] = {
            "_pool": self.pool, "_seen": self.seen, "_journal": journal, "stops": stops,
            "_crew": SimpleNamespace(note=note), "_reclaimed": SimpleNamespace(note=note, broken={}),
            "_background": SimpleNamespace(start=lambda work: work.close()),
        }  # fmt: skip
        for name, part in parts.items():
            setattr(self.runner, name, part)

    def connect(self, node: int) -> AgentLink:
        """Another connection of the node's agent."""
        link = AgentLink(None, Hello(node=node, host=f"n{node}", pid=1, birth="b:1"))
        if (old := self.pool.links.get(node)) is not None:
            link.told = old.told
        self.pool.links[node] = link
        return link

    def knows(self) -> tuple[object, ...]:
        """What follows from the reports that have come."""

        async def handle() -> None:
            handling = asyncio.create_task(self.runner._handle_events())
            while not self.pool.events.empty():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            handling.cancel()

        asyncio.run(handle())
        ended = {rank: (end.code, end.step) for rank, end in self.seen.ends.items()}
        stops = self.runner.stops
        return ended, self.seen.saved(), self.seen.reached(), sorted(self.done), stops.over.is_set(), stops.state


def as_told(folder: Path) -> tuple[object, ...]:
    """What is known where nothing goes wrong."""
    one = Supervised(folder)
    for node in range(NODES):
        link = one.connect(node)
        for report in script(node):
            one.pool._take(link, report)
    return one.knows()


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_lost_doubled_and_late_reports_change_nothing(data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("run")
    one = Supervised(folder)
    for node in range(NODES):
        reports = script(node)
        cuts = sorted(data.draw(st.sets(st.integers(1, len(reports) - 1), max_size=3), label=f"cuts of n{node}"))
        late: list[tuple[AgentLink, Report]] = []
        for begin, end in zip([0, *cuts], [*cuts, len(reports)], strict=True):
            link, is_last = one.connect(node), end == len(reports)
            repeated = [report for report in reports[:begin] if isinstance(report, Lasting)]
            sent = [*repeated, *reports[begin:end]]
            arrive = len(sent) if is_last else data.draw(st.integers(0, len(sent)), label="how many arrive")
            for report in sent[:arrive]:
                one.pool._take(link, report)
                if data.draw(st.booleans(), label="twice"):
                    one.pool._take(link, report)
            for old, report in late:
                one.pool._take(old, report)
            late = [(link, report) for report in sent[arrive:]] if data.draw(st.booleans(), label="late") else []
    assert one.knows() == as_told(folder)
