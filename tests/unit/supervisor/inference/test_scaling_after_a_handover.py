"""A new owner of an endpoint whose replicas follow the load: routers of the job before still send requests to them."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until_async

from slurmft.config.inference import InferenceConfig
from slurmft.inference.coordinator import Roster
from slurmft.ipc.messages import Call, Members, ReplicaPhase, RouterPhase
from slurmft.policy.serving import Bounds
from slurmft.storage.journal import EventName
from slurmft.storage.patience import FolderThread
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor import serving
from slurmft.supervisor.serving import ServingAttempt
from slurmft.system.background import Background

BOUNDS = Bounds(least=1, most=4, concurrency=8, idle_s=0.05)


class Owner(ServingAttempt):
    """An attempt that has just taken the run over, of which only the scaling runs; its own router has no request."""

    def __init__(self, folder: Path) -> None:
        config = InferenceConfig.model_validate(
            {
                "engine": {"command": ["e", "{port}"]},
                "replicas_per_node": 2,
                "serving": {"replicas": {"min": 1}, "tls_own": False},
            }
        )
        done: Future[Any] = Future()
        done.set_result(None)
        self.events: list[tuple[EventName, dict[str, Any]]] = []
        self.told: dict[int, Members] = {}
        self._section = config
        self._run: Any = folder
        self._config: Any = SimpleNamespace(nodes=2, size=SimpleNamespace(maximum=2))
        self._lenders = None
        self._journal: Any = SimpleNamespace(append=lambda event, **facts: self.events.append((event, facts)))
        self.stops: Any = SimpleNamespace(planned=None, superseded=False)
        self._candidacy = self._update = None
        self._predecessor_serves = False
        self._background = Background()
        self._roster = Roster(config, nodes=2, run_folder=folder, submit=lambda work: done, served=0)
        self._follow_the_load(BOUNDS, goes_on=True)
        for node in range(2):
            epoch = self._roster.join(node, f"n{node}", lambda call, node=node: self._hear(node, call))
            self._roster.admit(node)
            for number in range(2):
                self._roster.on_report(node, ReplicaPhase(epoch=epoch, replica=number, phase="ready", life=1,
                                                          hosts=(f"n{node}",), port=4000 + number))  # fmt: skip
            self._roster.on_report(
                node, RouterPhase(epoch=epoch, phase="ready", hosts=(f"n{node}",), port=80, answered=0, load=0)
            )

    def _hear(self, node: int, call: Call[Any]) -> None:
        assert isinstance(call, Members)
        self.told[node] = call

    @property
    def on(self) -> int:
        return sum(len(call.on or ()) for call in self.told.values())

    @property
    def looks(self) -> list[int]:
        return [facts["wanted"] for event, facts in self.events if event is EventName.REPLICAS_WANTED]


@pytest.mark.parametrize("is_restart_of_the_job", [False, True], ids=["supervisor restarted", "job requeued"])
async def test_a_supervisor_that_follows_a_killed_one_knows_that_the_job_before_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_restart_of_the_job: bool
) -> None:
    monkeypatch.setattr(serving, "SEE_OFF_S", 0.005)
    asked: list[Attempt] = []
    monkeypatch.setattr(serving, "see_off", lambda _, before: asked.append(before))
    run, mine = RunFolder(tmp_path / "run"), Attempt(job="8", restart=int(is_restart_of_the_job), cycle=1)
    run.create()
    run.journal(Attempt(job="7", restart=0, cycle=2)).append(EventName.ATTEMPT_STARTED, generation=3)
    candidate = run.journal(Attempt(job="8", restart=0))
    candidate.append(EventName.CANDIDATE_STARTED, owner="7")
    candidate.append(EventName.ATTEMPT_STARTED, generation=4, taken_over=True)
    owner = Owner(tmp_path)
    owner._run, owner._crew = run, SimpleNamespace(has_outlived=True)  # type: ignore[assignment]
    owner._cluster, owner._startup_s = SimpleNamespace(attempt=mine), None  # type: ignore[assignment]
    owner._start: Any = SimpleNamespace(
        history=run.journal().read_past(), thread=FolderThread(), candidate=False, run=run
    )
    owner._in_folder = owner._start.thread.ask
    monkeypatch.setattr(owner, "_offer", lambda: None)
    await owner._open()
    try:
        assert owner._roster.wants_all() is not is_restart_of_the_job
        if not is_restart_of_the_job:
            await until_async(lambda: asked != [])
            assert asked[0] == Attempt(job="7", restart=0, cycle=2)
    finally:
        owner._roster.close()
        await owner._background.cancel_all()


async def test_no_replica_is_stopped_while_routers_of_the_job_before_may_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SCALE_S", 0.005)
    monkeypatch.setattr(serving, "SEE_OFF_S", 0.005)
    asked, gone = 0, False

    def see_off(*_: Any) -> str | None:
        nonlocal asked
        asked += 1
        return "" if gone else None

    monkeypatch.setattr(serving, "see_off", see_off)
    owner = Owner(tmp_path)
    owner._take_over_from(SimpleNamespace(job="1"))  # type: ignore[arg-type]
    scaling = asyncio.create_task(owner._scale(BOUNDS))
    await until_async(lambda: asked > 60)  # several times idle_s
    assert owner.on == 4 and owner.looks == [], "what its own routers have to do is not all that there is"
    assert {call.wanted for call in owner.told.values()} == {4}
    gone = True
    await until_async(lambda: owner.on == 1)
    assert owner.looks == [1] and {call.wanted for call in owner.told.values()} == {1}
    scaling.cancel()
    await asyncio.gather(scaling, return_exceptions=True)
    await owner._background.cancel_all()
