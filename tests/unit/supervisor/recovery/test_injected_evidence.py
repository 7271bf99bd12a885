"""What follows from a fault on purpose is journaled, and never reaches the exclusion list."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.config.run import validate
from slurmft.policy.values import Fault, Order
from slurmft.policy.verdict import Cause, Evidence, Kind, Suspect, Verdict
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.journal import EventName
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import Attempt, RunFolder, give_order
from slurmft.supervisor.attempt import Injections
from slurmft.supervisor.placement import ON_PURPOSE, Accuser
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
        accuser = Accuser(self.config, self.start())
        accuser.add([Evidence(kind=kind, suspect=Suspect(node="n1"), message="it died", at=1e9) for kind in kinds])
        accuser.finish(verdict)
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


def test_an_order_that_was_just_carried_out_counts_at_once(tmp_path):
    """It waits in the supervisor's journal, which is written beside everything else."""
    run = Run(tmp_path)
    give_order(run.folder.path, Order(fault=Fault.KILL, who="me", rank=0).as_json())

    async def call(_call: Any) -> Any:
        return SimpleNamespace(injected=(0,), refused=())

    async def go() -> None:
        link, background = SimpleNamespace(node=0, host="n1", channel=object(), call=call), Background(pytest.fail)
        pool: Any = SimpleNamespace(links={0: link}, members=[link])
        await Injections(run.config, run.start(), pool, background).look()
        while background._tasks:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(go(), 20))
    assert run.accuse(PLANNED, Kind.HANG) == [ON_PURPOSE]
    assert run.listed == []
