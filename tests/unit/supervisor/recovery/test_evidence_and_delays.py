"""What follows from a fault on purpose is journaled, and never reaches the exclusion list."""

import asyncio
import subprocess
import sys
import textwrap
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from waiting import slowness

from slurmft.agent.workers import worker_environment
from slurmft.config.run import validate
from slurmft.ipc.messages import StartWorkers
from slurmft.policy.checkpoints import FailureHistory, mtbf_s
from slurmft.policy.values import Fault, Order
from slurmft.policy.verdict import Cause, Evidence, Kind, Suspect, Verdict
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.journal import Event, EventName
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import Attempt, RunFolder, give_order
from slurmft.supervisor.act import LONGEST_RESTART_S, retry_delay_s, wait_before_restart
from slurmft.supervisor.observations import facts_for_workers, history_of
from slurmft.supervisor.placement import ON_PURPOSE, EvidenceSender
from slurmft.supervisor.watches import Injections
from slurmft.system.background import Background

INJECTED = (EventName.FAULT_INJECTED, {"fault": "kill", "who": "me", "ranks": [0]})
MISSED = (EventName.FAULT_NOT_INJECTED, {"fault": "kill", "who": "me", "ranks": [0], "reason": "no rank"})
REFUSED = (EventName.FAULT_NOT_INJECTED, {"fault": "kill", "who": "me", "reason": "no agent"})


class Run:
    """A run whose third attempt is under way, with an exclusion list."""

    def __init__(self, folder: Any) -> None:
        self.folder = RunFolder(folder / "run")
        self.folder.create()
        self.list = ExclusionList(folder / "list.json")
        given = {"command": ["true"], "run_folder": str(self.folder.path), "nodes": 1}
        self.config = validate({**given, "exclusions": {"path": str(folder / "list.json")}}, source="run.yaml")
        self.attempt, self.thread = Attempt(job="7", restart=0, cycle=2), FolderThread()
        self.journal = PatientJournal(self.folder.path, self.thread, attempt=str(self.attempt))
        for cycle in range(3):
            self.tell(cycle, (EventName.ATTEMPT_STARTED, {}))

    def tell(self, cycle: int, what: tuple[EventName, dict[str, Any]]) -> None:
        self.folder.journal(Attempt(job="7", restart=0, cycle=cycle)).append(what[0], **what[1])

    def start(self) -> Any:
        cluster = SimpleNamespace(name="slurm", attempt=self.attempt)
        history = self.folder.journal().read()
        return SimpleNamespace(
            run=self.folder, journal=self.journal, thread=self.thread, history=history, cluster=cluster
        )

    def accuse(self, verdict: Verdict, *kinds: Kind) -> list[Any]:
        """Hand in evidence, and the verdict's; the reasons in the journal why the list was not told."""
        sender = EvidenceSender(self.config, self.start())
        sender.add([Evidence(kind=kind, suspect=Suspect(node="n1"), message="it died", at=1e9) for kind in kinds])
        sender.finish(verdict)
        self.journal.flush(5.0)
        return [event.details.get("reason") for event in self.folder.journal().read() if event.event == "evidence"]

    @property
    def listed(self) -> list[str]:
        return [each.kind.value for each in self.list.read().observations]


PLANNED = Verdict(cause=Cause.PREEMPTED, reason="x")
CRASHED = Verdict(cause=Cause.SIGNAL_CRASH, reason="x", node="n1", rank=0, suspects=(Suspect(node="n1"),))


@pytest.mark.parametrize("verdict", [PLANNED, CRASHED], ids=["evidence", "of the verdict"])
@pytest.mark.parametrize(
    ("told", "is_listed"),
    [([], True), ([INJECTED], False), ([INJECTED, MISSED], True), ([INJECTED, INJECTED, MISSED], False),
     ([REFUSED], True), ([INJECTED, REFUSED], False)],
    ids=["none", "hit", "missed", "hit and missed", "refused", "hit and refused"],
)  # fmt: skip
def test_evidence_of_an_attempt_with_a_fault_on_purpose_is_not_listed(tmp_path, told, is_listed, verdict):
    run = Run(tmp_path)
    for each in told:
        run.tell(2, each)
    reasons = run.accuse(verdict, *([Kind.HANG] if verdict is PLANNED else []))
    assert reasons == [None if is_listed else ON_PURPOSE]
    assert len(run.listed) == is_listed


@pytest.mark.parametrize("kind", list(Kind))
def test_the_attempt_after_it_is_believed_unless_it_judges_the_one_before(tmp_path, kind):
    run = Run(tmp_path)
    run.tell(1, INJECTED)
    looks_back = kind in (Kind.REPLICA_DIFFERS, Kind.REPEATED_DEATH)
    assert run.accuse(PLANNED, kind) == [ON_PURPOSE if looks_back else None]


def test_an_earlier_attempt_with_a_fault_says_nothing_of_later_ones(tmp_path):
    run = Run(tmp_path)
    run.tell(0, INJECTED)
    assert run.accuse(PLANNED, Kind.REPEATED_DEATH) == [None]
    assert run.listed == ["repeated death"]


async def test_an_order_that_was_just_carried_out_counts_at_once(tmp_path):
    """It waits in the supervisor's journal, which is written beside everything else."""
    run = Run(tmp_path)
    give_order(run.folder.path, Order(fault=Fault.KILL, who="me", rank=0).as_json())

    async def call(_call: Any) -> Any:
        return SimpleNamespace(injected=(0,), refused=())

    link, background = SimpleNamespace(node=0, host="n1", channel=object(), call=call), Background(pytest.fail)
    pool: Any = SimpleNamespace(links={0: link}, members=[link])
    await Injections(run.config, run.start(), pool, background).look()
    while background._tasks:
        await asyncio.sleep(0)
    assert run.accuse(PLANNED, Kind.HANG) == [ON_PURPOSE]
    assert run.listed == []


# --- How often a run failed, from its journal ---


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
START = StartWorkers(attempt="7.0.0", nodes=2, first_rank=0, master_addr="n1", master_port=1, cycle=0, generation=1)


def event(at_s: float, name: str, attempt: str = "7.0.0", **details: Any) -> Event:
    return Event(at=NOON + timedelta(seconds=at_s), event=name, attempt=attempt, details=details)


def attempt(at_s: float, seconds: float, name: str, cause: str, ranks: int = 8, steps: int = 100) -> list[Event]:
    return [
        event(at_s, "attempt started", name),
        event(at_s + 10, "workers started", name, world_size=ranks),
        event(at_s + 10 + seconds, "verdict", name, cause=cause, first_step=5, last_step=5 + steps),
        event(at_s + 10 + seconds, "decision", name, action="restart"),
    ]


@pytest.mark.parametrize(
    ("events", "failures", "node_s"),
    [
        ([], 0, 0.0),
        (attempt(0, 100, "7.0.0", "node lost"), 1, 200.0),
        (attempt(0, 100, "7.0.0", "node lost") + attempt(200, 50, "7.0.1", "hang", ranks=4), 2, 250.0),
        (attempt(0, 100, "7.0.0", "preempted") + attempt(200, 50, "7.1.0", "finished"), 0, 300.0),
        (attempt(0, 100, "7.0.0", "worker error", steps=0), 0, 200.0),
        ([*attempt(0, 100, "7.0.0", "preempted"), event(111, "stop without a save")], 1, 202.0),
        ([event(0, "workers started", world_size=4), event(60, "save failed")], 0, 60.0),
        ([event(0, "workers started", world_size="many"), event(-60, "verdict", cause=["?"])], 0, 0.0),
        ([event(0, "workers started", world_size=1 << 60), event(60, "verdict", last_step="x", cause="hang")], 0, 60.0),
    ],
    ids=["nothing", "one failure", "two sizes", "planned", "before any step", "stop that came to nothing", "under way",
         "damaged", "damaged more"],
)  # fmt: skip
def test_what_the_journal_tells(events, failures, node_s):
    assert history_of(events, 4) == FailureHistory(failures=failures, node_s=node_s)


def test_workers_learn_how_often_the_run_fails():
    config = validate({"command": "x", "run_folder": "/r/n", "nodes": 2, "nproc_per_node": 4}, source="t")
    history = attempt(0, 86_400, "7.0.0", "node lost")
    told = facts_for_workers(history, config, nodes=2)
    expected = mtbf_s(FailureHistory(failures=1, node_s=2 * 86_400), 2)
    assert told == {"batch_divisor": 1, "mtbf_s": pytest.approx(expected, abs=0.1)}
    environment = worker_environment(config, {}, replace(START, **told), 0, "7.0.1")
    assert WorkerSettings.from_environment(environment).checkpoint.mtbf_s == told["mtbf_s"]


# --- How long a retry waits ---


def config(**section):
    return validate({"command": ["true"], "run_folder": "/tmp/x", "fault_tolerance": section}, source="test")


@pytest.mark.parametrize(
    ("failures", "least", "most"),
    [(0, 0, 0), (1, 1, 2), (2, 2, 3), (5, 16, 17), (9, 256, 257), (10, 300, 300), (10**6, 300, 300)],
)
def test_the_delay_doubles_with_jitter_up_to_its_bound(failures, least, most):
    found = [retry_delay_s(config(), failures) for _ in range(50)]
    assert all(least <= each <= most for each in found)
    assert (len(set(found)) > 1) == (least != most), "jitter"


def test_it_can_be_switched_off():
    assert retry_delay_s(config(retry_delay_s=0), 5) == 0
    assert retry_delay_s(config(max_retry_delay_s=0), 5) == 1, "the first delay is the least"


def test_a_first_restart_is_immediate():
    began = time.monotonic()
    assert wait_before_restart(config(), 0) < 0.1
    assert time.monotonic() - began < 0.5 * slowness()


def test_a_signal_ends_the_wait():
    body = """
    import os, signal, threading
    from slurmft.config.run import validate
    from slurmft.supervisor.act import wait_before_restart
    from slurmft.supervisor.guardian import any_kept, keep_signals
    keep_signals()
    given = {"command": ["true"], "run_folder": "/tmp/x", "fault_tolerance": {"retry_delay_s": 9}}
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    print(wait_before_restart(validate(given, source="test"), 3), any_kept())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, timeout=60, check=False
    )
    seconds, kept = done.stdout.split()
    assert (float(seconds) < LONGEST_RESTART_S / 2, kept) == (True, "True"), done.stderr
