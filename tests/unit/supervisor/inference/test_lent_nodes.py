"""Jobs that lend nodes to an endpoint: noted before they are submitted, found again by any supervisor, and ended."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.config.run import validate
from slurmft.errors import SlurmError, SlurmUnavailable
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.serving import LOAN_WAIT_S
from slurmft.scheduler import own_jobs
from slurmft.scheduler.parsing import JobRecord
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import Owner, RunFolder
from slurmft.supervisor import avoided_nodes, handover
from slurmft.supervisor.handover import Lenders, end_lenders


@dataclass
class Queue:
    """Slurm, as far as lenders know it; every command is seen by the journal first."""

    journal: list[tuple[EventName, dict[str, Any]]] = field(default_factory=list)
    jobs: dict[str, str] = field(default_factory=dict)
    """Their states."""

    submitted: list[list[str]] = field(default_factory=list)
    is_away = False
    answers_sbatch = True
    takes_journal = True
    most = 1000
    now_s = 1000.0

    def lenders(self, _run: RunFolder) -> list[JobRecord]:
        self._answer()
        return [
            JobRecord(job_id=job, state=state, reason="Priority", nodes="", batch_host="", start=None, end=None,
                      limit_s=None, partition="low")
            for job, state in self.jobs.items()
        ]  # fmt: skip

    def submit(self, argv: list[str]) -> str:
        self._answer()
        assert self.journal[-1][0] in (EventName.BORROWING, EventName.JOINING), "it is noted before it is submitted"
        if len(self.jobs) >= self.most:
            raise SlurmError("AssocMaxSubmitJobLimit")
        self.submitted.append(argv)
        job = str(100 + len(self.submitted))
        self.jobs[job] = "PENDING"
        if not self.answers_sbatch:
            raise SlurmUnavailable("no answer")
        return job

    def cancel(self, job: OwnJob) -> None:
        self._answer()
        self.jobs.pop(job.job_id, None)

    def append(self, event: EventName, **facts: Any) -> None:
        self.journal.append((event, facts))

    def flush(self, _timeout_s: float) -> bool:
        return self.takes_journal

    def names(self) -> list[EventName]:
        return [event for event, _ in self.journal]

    def _answer(self) -> None:
        if self.is_away:
            raise SlurmUnavailable("away")


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(own_jobs, "lenders", made.lenders)
    monkeypatch.setattr(own_jobs, "submit_lender", made.submit)
    monkeypatch.setattr(own_jobs, "cancel", made.cancel)
    monkeypatch.setattr(avoided_nodes, "for_submission", lambda *_: SimpleNamespace(nodes=("bad",)))
    monkeypatch.setattr(handover, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


@pytest.fixture
def start(tmp_path: Path, queue: Queue) -> Any:
    run = RunFolder(tmp_path / "an endpoint, ours")
    run.create()
    return SimpleNamespace(run=run, journal=queue, candidate=False, generation=1)


def lenders_of(start: Any, *, end: float | None = None, **how: Any) -> Lenders:
    config = validate({"run_folder": str(start.run.path), "nodes": 1, "elastic": {"max_nodes": 4},
                       "inference": {"engine": {"command": ["e", "{port}"]}, "serving": {"replicas": {"min": 0}}}},
                      source="here")  # fmt: skip

    async def times() -> Any:
        return SimpleNamespace(end=end)

    slurm: Any = SimpleNamespace(times=times, terms=SimpleNamespace(clock=SimpleNamespace(at=lambda at_s: at_s)))
    return Lenders(config, start, slurm, **how)


def balance(lenders: Lenders, nodes: int, serving: dict[str, bool] | None = None) -> tuple[str, ...]:
    """Of so many that are needed and wanted, one is the endpoint's own."""
    return asyncio.run(lenders.balance(serving or {}, {"n1"}, needed=nodes, wanted=nodes, own=1, hoped=1))


def test_nodes_are_borrowed_one_job_each_and_given_back_when_nothing_is_on_them(start: Any, queue: Queue) -> None:
    lenders = lenders_of(start, end=queue.now_s + 3600)
    assert balance(lenders, 3) == ()
    assert [*queue.jobs] == ["101", "102"] and queue.names() == [EventName.BORROWING, *[EventName.JOINING] * 2]
    argv = queue.submitted[0]
    assert {"--nodes=1", "--time=60", "--exclude=n1,bad", f"--job-name={own_jobs.lenders_name(start.run)}"} <= {*argv}
    assert balance(lenders, 3) == () and len(queue.submitted) == 2
    queue.now_s += 60
    queue.jobs["101"] = "RUNNING"
    assert balance(lenders, 3, {"101": True}) == ()
    assert "job 102, which will lend a node, waits: Priority" in lenders.state
    assert balance(lenders, 1, {"101": True}) == ("102",) and lenders.state == ""
    assert balance(lenders, 1, {"101": True}) == (), "it still serves"
    assert balance(lenders, 1, {"101": False}) == ("101",) and queue.jobs == {}
    assert queue.journal[-1] == (EventName.LENDER_CANCELLED, {"job": "101", "reason": "no more nodes are needed"})


def test_a_supervisor_that_follows_a_killed_one_finds_what_waits_and_cancels_it(start: Any, queue: Queue) -> None:
    balance(lenders_of(start), 3)
    following = lenders_of(start)
    link: Any = SimpleNamespace(lender="101", leaving=False, node=1, host="n2")
    own = following.own([link])  # it does not know yet that the node is lent
    assert asyncio.run(following.balance({}, {"n1"}, needed=3, wanted=3, own=own + 1, hoped=1)) == ()
    assert following.own([link]) == 0 and [*queue.jobs] == ["101", "102"], "it has the two that it needs"
    assert balance(following, 3) == () and len(queue.submitted) == 2
    last = lenders_of(start)
    balance(last, 1)
    assert set(balance(last, 1)) == {"101", "102"} and queue.jobs == {}


def test_a_submission_without_an_answer_is_not_made_twice(start: Any, queue: Queue) -> None:
    lenders = lenders_of(start)
    queue.answers_sbatch = False
    balance(lenders, 2)
    assert "no other node: no answer" in lenders.state
    queue.answers_sbatch = True
    for _ in range(3):
        queue.now_s += 11
        balance(lenders, 2)
    assert len(queue.submitted) == 1 and [*lenders.jobs] == ["101"]


def test_nothing_is_submitted_before_slurm_and_the_journal_have_answered(start: Any, queue: Queue) -> None:
    lenders = lenders_of(start)
    queue.is_away = True
    balance(lenders, 2)
    queue.is_away, queue.takes_journal = False, False
    queue.now_s += 11
    balance(lenders, 2)
    assert queue.submitted == []
    queue.takes_journal = True
    balance(lenders, 2)
    assert len(queue.submitted) == 1


def test_no_node_is_borrowed_for_the_last_minutes_of_the_job(start: Any, queue: Queue) -> None:
    balance(lenders_of(start, end=queue.now_s + 299), 2)
    assert queue.submitted == []


def test_a_job_that_the_queue_never_starts_is_given_up_for_a_while(start: Any, queue: Queue) -> None:
    lenders = lenders_of(start)
    balance(lenders, 2)
    queue.now_s += LOAN_WAIT_S + 1
    balance(lenders, 2)
    assert queue.jobs == {} and "has lent no node for too long" in lenders.state
    assert queue.names()[-1] is EventName.LENDER_CANCELLED
    balance(lenders, 2)
    assert len(queue.submitted) == 1
    queue.now_s += handover.LOAN_PAUSE_S
    balance(lenders, 2)
    assert len(queue.submitted) == 2


def test_a_patient_one_waits_in_the_queue_and_is_given_up_when_its_node_is_no_use(start: Any, queue: Queue) -> None:
    lenders = lenders_of(start, is_patient=True)
    balance(lenders, 2)
    for _ in range(5):
        queue.now_s += LOAN_WAIT_S
        balance(lenders, 2)
    assert [*queue.jobs] == ["101"] and len(queue.submitted) == 1
    queue.jobs["101"] = "RUNNING"
    balance(lenders, 2)
    queue.now_s += LOAN_WAIT_S + 1
    balance(lenders, 2)
    assert queue.jobs == {}
    balance(lenders_of(start, is_patient=True, end=queue.now_s + 120), 2)
    assert len(queue.submitted) == 2


def test_where_slurm_takes_no_more_jobs_those_that_there_are_do(start: Any, queue: Queue) -> None:
    lenders, queue.most = lenders_of(start), 2
    balance(lenders, 5)
    assert [*queue.jobs] == ["101", "102"] and "AssocMaxSubmitJobLimit" in lenders.state
    refused = 0
    for _ in range(60):
        queue.now_s += 1
        balance(lenders, 5)
        refused += queue.names().count(EventName.BORROWING) - 1
        queue.journal = queue.journal[:1]
    assert refused <= 1, "not tried all the time"
    queue.now_s, queue.most = queue.now_s + 60, 10
    balance(lenders, 5)
    assert len(queue.jobs) == 4


def test_those_that_need_not_be_spread_avoid_only_nodes_that_are_no_use(start: Any, queue: Queue) -> None:
    link: Any = SimpleNamespace(lender="", leaving=False, node=0, host="n7")
    for spread, avoided in ((True, "bad,lost,n7"), (False, "bad,lost")):
        lenders = lenders_of(start, spread=spread)
        asyncio.run(lenders.balance_agents([link], {"lost"}, bool, needed=9, wanted=9, own=1, hoped=1))
        excluded = next(word for word in queue.submitted[-1] if word.startswith("--exclude="))
        assert sorted(excluded.removeprefix("--exclude=").split(",")) == avoided.split(",")
        queue.jobs.clear()


def test_jobs_of_two_nodes_serve_with_both_and_go_when_nothing_is_on_either(start: Any, queue: Queue) -> None:
    lenders = lenders_of(start, nodes=2)

    def balanced(links: list[Any], used: int, needed: int) -> list[Any]:
        given = lenders.balance_agents(
            links, (), lambda node: node == used, needed=needed, wanted=needed, own=1, hoped=1
        )
        return asyncio.run(given)

    assert balanced([], 0, 3) == [] and [*queue.jobs] == ["101", "102"] and "--nodes=2" in queue.submitted[0]
    links: list[Any] = [SimpleNamespace(lender=job, leaving=False, node=node, host=f"n{node}")
                        for node, job in enumerate(("101", "102", "101", "102"))]  # fmt: skip
    assert balanced(links, 2, 1) == [links[1], links[3]] and [*queue.jobs] == ["101"], (
        "101 has work on one of its nodes"
    )
    assert balanced([links[0]], 9, 2) == [] and [*queue.jobs] == ["101"], "half of a job may become a whole one"
    assert balanced([links[0], links[2]], 9, 1) == [links[0], links[2]] and not queue.jobs


@pytest.mark.parametrize(("generation", "left"), [(1, []), (2, ["101"])], ids=["its own", "another owner's"])
def test_they_end_with_the_endpoint_unless_another_job_has_taken_it_over(
    start: Any, queue: Queue, monkeypatch: pytest.MonkeyPatch, generation: int, left: list[str]
) -> None:
    monkeypatch.setattr(own_jobs, "cancel", queue.cancel)
    balance(lenders_of(start), 2)
    with start.run.lock():
        start.run.take_over(
            Owner(job="7", restart=1, cycle=0, generation=generation, cluster="slurm", host="n1", pid=1, birth="",
                  folder=str(start.run.path), inode=0)
        )  # fmt: skip
    end_lenders(start)
    assert [*queue.jobs] == left


def test_two_runs_of_one_name_have_lenders_of_their_own(tmp_path: Path) -> None:
    one, other = (own_jobs.lenders_name(RunFolder(tmp_path / folder / "a run, ours")) for folder in "ab")
    assert one != other and one.startswith("lend-a_run__ours-") and "," not in one
