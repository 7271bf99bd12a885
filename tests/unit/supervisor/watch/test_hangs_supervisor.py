"""The supervisor's side of hang detection: all agents are asked once, and what sections took is remembered."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from slurmft.agent.hangs import facts_of
from slurmft.config.run import RunConfig
from slurmft.ipc.messages import AskSections, DurationsReport, HangReport, SectionsReply
from slurmft.policy.hangs import START_UP, WorkerLook
from slurmft.policy.judge import Blame, Named
from slurmft.storage import history
from slurmft.storage.journal import Journal
from slurmft.storage.patience import FolderThread
from slurmft.supervisor import hangs
from slurmft.supervisor.agents import AgentLost
from slurmft.supervisor.hangs import Hangs

REPORT = HangReport(rank=0, section="step", held_s=10.1, limit_s=10.0, why="rank 0 ...")


class Agent:
    """Answers as an agent would, one worker in a message."""

    def __init__(self, host: str, *workers: WorkerLook) -> None:
        self.host, self.workers, self.asked = host, workers, 0

    async def call(self, call: AskSections, *, timeout_s: float) -> SectionsReply:
        self.asked += 1
        await asyncio.sleep(0)
        first = call.first
        return SectionsReply(workers=(facts_of(self.workers[first]),), more=first + 1 < len(self.workers))


class Lost(Agent):
    async def call(self, call: AskSections, *, timeout_s: float) -> SectionsReply:
        raise AgentLost("gone")


def made(folder: Path, *agents: Agent, **settings: Any) -> Hangs:
    config = RunConfig.model_validate(
        {"command": "x", "run_folder": str(folder),
         "fault_tolerance": {"rank_section_timeouts": {"step": 10}, **settings}}
    )  # fmt: skip
    start = SimpleNamespace(
        run=SimpleNamespace(path=folder),
        journal=Journal(folder, attempt="1.0.0"),
        thread=FolderThread(),
        history=Journal(folder).read(),
    )
    return Hangs(config, start, SimpleNamespace(members=list(agents)))  # type: ignore[arg-type]


def stuck(rank: int, **facts: Any) -> WorkerLook:
    return WorkerLook(rank=rank, sections=(("step", 10.2),), **facts)


def test_the_culprit_may_be_on_another_node_than_the_one_that_told(tmp_path):
    agents = Agent("n1", stuck(0), stuck(1)), Agent("n2", stuck(2), stuck(3, stopped=True)), Lost("n3")
    found = made(tmp_path, *agents)
    hang = asyncio.run(found.investigate(agents[0], REPORT))  # type: ignore[arg-type]
    assert hang is not None
    assert (hang.ranks, hang.nodes, hang.victims) == ((3,), ("n2",), (0, 1, 2))
    assert set(found.overdue) == {0, 1, 2, 3}
    (event,) = Journal(tmp_path).read()
    assert event.event == "worker hung"
    assert {key: event.details[key] for key in ("rank", "node", "section", "limit_s", "victims")} == {
        "rank": 3, "node": "n2", "section": "step", "limit_s": 10.0, "victims": [0, 1, 2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("heartbeat", "Did not get subsequent heartbeat. Waited 171.92 seconds."),
        ("start-up", "Did not get initial heartbeat. Waited 171.92 seconds."), ("step", ""),
    ],
)  # fmt: skip
def test_a_heartbeat_that_does_not_come_is_told_in_nvrxs_words(section, line, tmp_path, caplog):
    agent = Agent("n1", stuck(0))
    report = replace(REPORT, section=START_UP if section == "start-up" else section, held_s=171.92)
    asyncio.run(made(tmp_path, agent).investigate(agent, report))  # type: ignore[arg-type]
    assert line in caplog.text and bool(line) == ("Did not get" in caplog.text)


async def test_the_reports_of_the_victims_change_nothing(tmp_path):
    agents = Agent("n1", stuck(0)), Agent("n2", stuck(1, stopped=True))
    found = made(tmp_path, *agents)
    hangs = await asyncio.gather(*(found.investigate(agent, REPORT) for agent in agents))
    assert [hang is None for hang in hangs] == [False, True]
    assert [agent.asked for agent in agents] == [1, 1]
    assert len(Journal(tmp_path).read()) == 1


def test_without_any_answer_the_one_that_was_reported_is_named(tmp_path):
    lost = Lost("n1")
    hang = asyncio.run(made(tmp_path, lost).investigate(lost, REPORT))  # type: ignore[arg-type]
    assert hang is not None
    assert (hang.ranks, hang.nodes, hang.section) == ((0,), ("n1",), "step")


def test_stacks_narrow_down_what_pages_leave_open(tmp_path):
    agent = Agent("n1", stuck(0), stuck(1))
    found = made(tmp_path, agent)
    found.narrow(Blame(culprits=(Named(rank=1, node="n1", reason="sleeps"),)))
    assert found.found is None
    asyncio.run(found.investigate(agent, REPORT))  # type: ignore[arg-type]
    found.narrow(Blame(undecided="nothing tells"))
    assert found.found is not None
    assert found.found.ranks == (0, 1)
    found.narrow(Blame(culprits=(Named(rank=1, node="n1", reason="sleeps"),)))
    assert found.found.ranks == (1,)


def told(**seconds: float) -> DurationsReport:
    return DurationsReport(sections=tuple(seconds.items()))


def test_limits_are_learned_kept_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(hangs, "SAMPLE_S", 0.0)
    found = made(tmp_path, calc_ft_timeouts=True)
    assert found.limits() == {}
    for _ in range(60):
        found.note(told(step=1.0, mine=20.0, evaluation=7.0))
    assert found.limits() == {"mine": 100.0, "evaluation": 35.0}  # step: 10 s is the user's own, and the least
    found.note(told(step=30.0))
    assert found.limits()["step"] == 45.0
    found.leave()

    again = made(tmp_path, calc_ft_timeouts=True)
    asyncio.run(again.recall())
    assert again.limits() == found.limits()
    other = made(tmp_path, calc_ft_timeouts=False)
    asyncio.run(other.recall())
    assert other.limits() == {}


def test_a_learned_limit_that_has_ended_an_attempt_without_progress_gives_way(tmp_path, monkeypatch):
    monkeypatch.setattr(hangs, "SAMPLE_S", 0.0)

    def limits() -> dict[str, float]:
        found = made(tmp_path, calc_ft_timeouts=True)
        for _ in range(20):
            found.note(told(evaluation=3.0, mine=20.0))
        return dict(found.limits())

    assert limits() == {"evaluation": 15.0, "mine": 100.0}
    journal = Journal(tmp_path, attempt="1.0.0")
    journal.append("worker hung", section="evaluation", limit_s=15.0)
    journal.append("worker hung", section="mine", limit_s=100.0)
    journal.append("verdict", cause="hang", first_step=10, last_step=20, saved_step=None)
    assert limits() == {}  # the default, and none
    journal.append("verdict", cause="time limit", first_step=10, last_step=40, saved_step=30)
    journal.append("worker hung", section="evaluation", limit_s=1800.0)
    assert limits() == {"evaluation": 15.0, "mine": 100.0}


def test_one_sample_is_the_longest_of_all_ranks_in_a_window(tmp_path):
    found = made(tmp_path, calc_ft_timeouts=True)
    for seconds in (1.0, 3.0, 2.0):
        found.note(told(step=seconds))
    found.leave()
    (samples,) = history._read_all(tmp_path).values()
    assert samples == {"step": [3.0]}


@pytest.mark.parametrize(
    "change", [{"nodes": 2}, {"nproc_per_node": 2}, {"command": "y"}, {"checkpoint": {"interval_steps": 7}}]
)
def test_another_workload_learns_anew(tmp_path, change: dict[str, Any]):
    found = made(tmp_path, calc_ft_timeouts=True)
    found.note(told(step=3.0))
    found.leave()
    config = RunConfig.model_validate(
        {"command": "x", "run_folder": str(tmp_path), "fault_tolerance": {"calc_ft_timeouts": True}, **change}
    )
    other = Hangs(config, found._start, found._pool)
    asyncio.run(other.recall())
    assert other._samples == {}
    other.note(told(step=5.0))
    other.leave()
    assert len(history._read_all(tmp_path)) == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    found = made(tmp_path / "nowhere", calc_ft_timeouts=True)
    found.note(told(step=3.0))
    found.leave()
    assert "were not written" in caplog.text
