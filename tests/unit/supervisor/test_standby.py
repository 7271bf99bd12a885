"""A supervisor and its standby, as two sides of one run folder."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from slurmft.agent.agent import Whereabouts
from slurmft.config.run import RunConfig, validate
from slurmft.errors import ConfigError, LaunchError, RunBusy, StorageUnavailable
from slurmft.operations import rescue
from slurmft.policy.job_identity import JobIdentity, OwnJob
from slurmft.scheduler import own_jobs
from slurmft.scheduler.environment import SlurmJob, as_in_batch_script, batch_node, with_batch_variables
from slurmft.scheduler.parsing import JobEnding, JobRecord
from slurmft.storage import run_folder
from slurmft.storage.journal import EventName
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import Attempt, Owner, RunFolder
from slurmft.supervisor import run as supervisor_run
from slurmft.supervisor import standby as keeper_module
from slurmft.supervisor import takeover
from slurmft.supervisor.cluster import SlurmCluster, Start
from slurmft.supervisor.lease import Lease, Terms, is_standbys, standby_has_taken_over
from slurmft.supervisor.owner import this_process
from slurmft.supervisor.standby import StandbyKeeper
from slurmft.supervisor.takeover import Watch
from slurmft.system.files import write_json

TERMS = Terms(hosts=("127.0.0.1",), port=9, secret="s", standby="mine")


def configured(path: Path, **changes: object) -> RunConfig:
    raw = {"command": "x", "run_folder": str(path), "working_directory": str(path.parent), "spare_nodes": 1,
           "fault_tolerance": {"standby_supervisor": True}, **changes}  # fmt: skip
    return validate(raw, source="test")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def cluster() -> SlurmCluster:
    return SlurmCluster(SlurmJob(job_id="7", restart=0, nodes="n[1-3]", node_count=3, partition="p",
                                 identity=JobIdentity(user=os.getuid())))  # fmt: skip


@pytest.fixture
def watch(run: RunFolder, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """That of a standby which has heard nothing for long, of an owner whose lease is old."""
    monkeypatch.setattr(own_jobs, "ending", lambda *_: JobEnding.NOT_ENDING)
    run.take_over(replace(this_process(run, cluster, 3), host="elsewhere", pid=1))
    lease = Lease(run, cluster.attempt)
    lease.renew()
    os.utime(lease.path, (time.time() - 60, time.time() - 60))
    lease.write(TERMS)
    watch = Watch(run, cluster, "mine")
    watch._heard_s -= 60
    return watch


def test_a_silent_supervisor_is_replaced_by_the_next_generation(run: RunFolder, cluster: SlurmCluster, watch: Watch):
    taken = watch._claim()
    assert taken is not None
    owner = run.owner()
    assert owner == taken[1] and owner.generation == 4 and is_standbys(owner, cluster.attempt)
    age_s = Lease(run, cluster.attempt).age_s()
    assert age_s is not None and age_s < 4, "it holds the lease at once"


def test_a_renewed_lease_a_job_that_ends_and_an_unknown_age_prevent_it(
    run: RunFolder, cluster: SlurmCluster, watch: Watch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(own_jobs, "ending", lambda *_: JobEnding.CANCELLED)
    assert watch._claim() is None
    monkeypatch.setattr(own_jobs, "ending", lambda *_: JobEnding.NOT_ENDING)
    lease = Lease(run, cluster.attempt)
    lease.path.unlink()
    assert watch._claim() is None
    lease.renew()
    assert watch._claim() is None
    owner = run.owner()
    assert owner is not None and owner.generation == 3


def test_only_the_named_standby_of_the_same_owner_may(run: RunFolder, cluster: SlurmCluster, watch: Watch):
    Lease(run, cluster.attempt).write(replace(TERMS, standby="another"))
    assert watch._claim() is None and watch._is_dismissed
    Lease(run, cluster.attempt).write(TERMS)
    run.take_over(replace(this_process(run, cluster, 4), host="third", pid=2))
    assert watch._claim() is None
    owner = run.owner()
    assert owner is not None and owner.host == "third"


def test_a_finished_run_is_not_claimed(run: RunFolder, watch: Watch):
    run.mark_done(step=1)
    assert watch._claim() is None and watch._is_dismissed


def test_a_supervisor_confirms_that_the_run_is_its_own(run: RunFolder, cluster: SlurmCluster):
    keeper = StandbyKeeper(configured(run.path), run, cluster)
    keeper._lease, keeper._is_named = Lease(run, cluster.attempt), True
    run.take_over(this_process(run, cluster, 3))
    assert keeper.confirm() and not keeper.is_lost
    run.take_over(replace(this_process(run, cluster, 4, standby=True), host="elsewhere"))
    assert not keeper.confirm() and keeper.is_lost
    assert not keeper.dismiss(), "the standby's step is not ended: it owns the run"


def test_both_sides_hear_each_other(run: RunFolder, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch):
    async def have_none(_: StandbyKeeper) -> None:
        return

    monkeypatch.setattr(StandbyKeeper, "_have_a_standby", have_none)
    monkeypatch.setattr(cluster, "control_hosts", lambda: ["127.0.0.1"])
    monkeypatch.setattr(type(cluster), "listen_host", "127.0.0.1")
    run.take_over(this_process(run, cluster, 3))
    keeper = StandbyKeeper(configured(run.path), run, cluster)
    keeper.see_to_it(Start(cluster=cluster, run=run, journal=PatientJournal(run.path, FolderThread()), history=(),
                           thread=FolderThread(), generation=3, secret=b""))  # fmt: skip

    async def watch_for(seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not keeper._port:
            await asyncio.sleep(0.05)
        keeper._token, keeper._is_named = "mine", True
        keeper._name("mine")
        watch = Watch(run, cluster, "mine")
        watching = asyncio.create_task(watch.run())
        while time.monotonic() < until_s:
            await asyncio.sleep(0.1)
        assert watch.silent_s < 2, "messages come"
        assert time.monotonic() - keeper._promised_at_s < 2, "and are answered"
        assert keeper.confirm() and not keeper.is_lost
        assert await asyncio.to_thread(keeper.dismiss)
        assert await asyncio.wait_for(watching, 5) is None, "it is sent home"

    asyncio.run(watch_for(2.5))
    owner = run.owner()
    assert owner is not None and owner.generation == 3


def test_a_node_that_comes_back_has_a_standby_at_once(
    run: RunFolder, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
):
    """Before a minute is over, in which another loss would leave the run without a supervisor."""
    tried, told = list[str](), list[EventName]()

    async def start_on(self: StandbyKeeper, node: str) -> bool:
        tried.append(node)
        return False

    def note(self: StandbyKeeper, event: EventName, **_: object) -> None:
        told.append(event)

    monkeypatch.setattr(StandbyKeeper, "_start_on", start_on)
    monkeypatch.setattr(StandbyKeeper, "_note", note)
    monkeypatch.setattr(keeper_module, "START_DELAY_S", 0.0)
    keeper = StandbyKeeper(configured(run.path), run, cluster)
    others = set(cluster.present()) - {os.environ.get("SLURMD_NODENAME", "")}
    back = sorted(others)[-1]
    cluster.lost = {back}

    async def work() -> None:
        task = asyncio.create_task(keeper._have_a_standby())
        async with asyncio.timeout(20):
            while EventName.STANDBY_UNAVAILABLE not in told:
                await asyncio.sleep(0.01)
            assert back not in tried
            cluster.lost = set()
            while back not in tried:
                await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(work())


def test_a_refusal_that_passes_costs_no_minute_without_a_standby(
    run: RunFolder, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
):
    """Slurm may create no step for some seconds after a node was lost; that is told once."""
    tried, told = list[str](), list[EventName]()

    async def start_on(self: StandbyKeeper, node: str) -> bool:
        tried.append(node)
        self._problem = f"the one on {node} did not report"
        return len(tried) > 4

    async def until_lost(_: StandbyKeeper) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(StandbyKeeper, "_start_on", start_on)
    monkeypatch.setattr(StandbyKeeper, "_until_lost", until_lost)
    monkeypatch.setattr(StandbyKeeper, "_note", lambda _, event, **__: told.append(event))
    monkeypatch.setattr(keeper_module, "START_DELAY_S", 0.0)
    monkeypatch.setattr(keeper_module, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(keeper_module, "RENEW_S", 0.01)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    cluster.lost = {"n2"}
    keeper = StandbyKeeper(configured(run.path), run, cluster)

    async def work() -> None:
        task = asyncio.create_task(keeper._have_a_standby())
        async with asyncio.timeout(20):
            while EventName.STANDBY_READY not in told:
                await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(work())
    assert tried == ["n3"] * 5
    assert told == [EventName.STANDBY_UNAVAILABLE, EventName.STANDBY_READY]


def test_naming_no_standby_loses_against_a_claim(run: RunFolder, cluster: SlurmCluster, watch: Watch):
    keeper = StandbyKeeper(configured(run.path), run, cluster)
    keeper._lease = Lease(run, cluster.attempt)
    assert watch._claim() is not None
    run.take_over(replace(this_process(run, cluster, 4, standby=True), host="n2"))
    keeper._name("")
    terms = Lease(run, cluster.attempt).read()
    assert keeper.is_lost and terms == TERMS


def test_without_the_setting_nothing_is_kept(run: RunFolder, cluster: SlurmCluster):
    keeper = StandbyKeeper(configured(run.path, fault_tolerance={}), run, cluster)
    assert not keeper.is_wanted and keeper.confirm() and keeper.dismiss()
    assert list(run.attempts.iterdir()) == []
    run.take_over(this_process(run, cluster, 3))
    assert "standby" not in (run.path / "owner.json").read_text(), "as earlier versions wrote it"


def test_damaged_terms_are_none(run: RunFolder, cluster: SlurmCluster):
    lease = Lease(run, cluster.attempt)
    assert lease.read() is None and lease.age_s() is None
    for text in ("", "[]", "{}", '{"hosts": 1, "port": 2, "secret": "", "standby": ""}'):
        lease.path.with_suffix(".lease.json").write_text(text)
        assert lease.read() is None
    lease.write(TERMS)
    assert lease.read() == TERMS and "secret" not in repr(TERMS)


def test_a_step_gets_the_batch_scripts_environment():
    batch = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURMD_NODENAME": "n1", "HOME": "/h", "SLURM_CONF": "/c",
             "SLURM_GPUS_PER_TASK": "1"}  # fmt: skip
    of_srun = {name: value for name, value in batch.items() if name != "SLURM_GPUS_PER_TASK"}
    step = {**with_batch_variables(of_srun, batch), "SLURM_NNODES": "1", "SLURM_STEP_ID": "4", "SLURMD_NODENAME": "n2",
            "PMI_RANK": "0", "SRUN_DEBUG": "3", "SLURMFT_GUARD": "11"}  # fmt: skip
    assert batch_node(step) == "n1"
    assert as_in_batch_script(step) == {**batch, "SLURMD_NODENAME": "n2"}
    assert as_in_batch_script({**step, "SLURM_CONF": "/of/this/node"})["SLURM_CONF"] == "/of/this/node"
    guarded = with_batch_variables(of_srun, {**batch, "SLURMFT_GUARD_LOST": "11", "SLURMFT_RUNS": "/r"})
    assert as_in_batch_script(guarded) == {**batch, "SLURMFT_RUNS": "/r"}, "no process ids of the batch host"


@pytest.mark.parametrize("changes", [
    {"spare_nodes": 0, "nodes": 2}, {"spare_nodes": 0, "nodes": 1, "slurm": {"no_kill": True}},
])  # fmt: skip
def test_a_job_that_dies_with_its_batch_host_needs_no_standby(tmp_path: Path, changes: dict[str, object]):
    with pytest.raises(ConfigError, match="standby_supervisor"):
        configured(tmp_path / "run", **changes)


def test_an_inference_is_told_that_it_can_have_none(tmp_path: Path):
    raw = {"run_folder": str(tmp_path / "run"), "nodes": 2, "fault_tolerance": {"standby_supervisor": True},
           "inference": {"input": "requests.jsonl", "engine": {"command": ["serve", "{port}"]}}}  # fmt: skip
    with pytest.raises(ConfigError, match=r"for trainers only.*requeue --rescue"):
        validate(raw, source="test")


def test_an_agent_follows_an_address_that_changes_once_its_supervisor_is_silent(tmp_path: Path):
    (tmp_path / "secret").write_text("x")
    write_json(tmp_path / "control.json", {"hosts": ["n1"], "port": 1})
    where, ended = Whereabouts(tmp_path, may_move=True), []
    assert where.read()[:2] == (["n1"], 1)

    async def talk() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def follow() -> None:
        silent = {"s": 0.0}
        following = asyncio.create_task(where.unless_moved(talk(), lambda: silent["s"]))
        write_json(tmp_path / "control.json", {"hosts": ["n2"], "port": 2})
        await asyncio.sleep(0.7)
        assert not following.done(), "a supervisor that is heard is not left"
        silent["s"] = 5.0
        await asyncio.wait_for(following, 5)

    asyncio.run(follow())
    assert ended and where.read()[:2] == (["n2"], 2)


def test_a_sweep_leaves_a_job_alone_whose_standby_lives(run: RunFolder, cluster: SlurmCluster):
    job = OwnJob("7")
    run.attempt_folder(cluster.attempt)
    run_folder.touch(run, cluster.attempt)
    run.take_over(this_process(run, cluster, 3))
    assert not rescue._has_standby(run, job), "its batch script is gone, and nothing has taken over"
    run.take_over(this_process(run, cluster, 4, standby=True))
    assert rescue._has_standby(run, job) and not rescue._has_standby(run, OwnJob("8"))
    alive = run.attempts / str(cluster.attempt) / "alive"
    os.utime(alive, (time.time() - 60, time.time() - 60))
    assert not rescue._has_standby(run, job), "that is gone, too"
    Lease(run, cluster.attempt).renew()
    assert rescue._has_standby(run, job), "it is between two attempts"


def test_a_claim_whose_answer_was_lost_is_one(
    run: RunFolder, cluster: SlurmCluster, watch: Watch, monkeypatch: pytest.MonkeyPatch
):
    take_over = RunFolder.take_over

    def fail_afterwards(self: RunFolder, owner: Owner) -> None:
        take_over(self, owner)
        raise StorageUnavailable("the file server has not answered")

    monkeypatch.setattr(RunFolder, "take_over", fail_afterwards)
    with pytest.raises(StorageUnavailable):
        watch._claim()
    os.utime(Lease(run, cluster.attempt).path, (time.time() - 60, time.time() - 60))
    taken = watch._claim()
    assert taken is not None and taken[0].host == "elsewhere" and taken[1] == run.owner()
    assert taken[1].generation == 4


class Step:
    """Stands in for the srun of a standby."""

    def __init__(self) -> None:
        self.ended = False

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def terminate(self) -> None:
        self.ended = True

    kill = terminate

    def wait(self, _: float) -> int:
        return 0


def named(run: RunFolder, cluster: SlurmCluster) -> tuple[StandbyKeeper, Step]:
    """A supervisor that has a standby, called ``mine``."""
    run.take_over(this_process(run, cluster, 3))
    keeper, step = StandbyKeeper(configured(run.path), run, cluster), Step()
    keeper._lease, keeper._process = Lease(run, cluster.attempt), step  # type: ignore[assignment]
    keeper._name("mine")
    keeper._thread = threading.Thread(target=lambda: None)
    keeper._thread.start()
    return keeper, step


def refuse(*_: object) -> None:
    raise StorageUnavailable("the file server does not answer")


def test_a_standby_that_may_have_claimed_the_run_is_not_ended(
    run: RunFolder, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
):
    keeper, step = named(run, cluster)
    with monkeypatch.context() as patched:
        patched.setattr(Lease, "write", refuse)
        with ThreadPoolExecutor() as other:
            dismissing = other.submit(keeper.dismiss)
            with pytest.raises(TimeoutError):
                dismissing.result(0.5)
            assert not step.ended
            run.take_over(replace(this_process(run, cluster, 4, standby=True), host="n2"))
            assert not dismissing.result(10)
    assert not keeper.confirm() and not step.ended, "its step is the run's supervisor"


def test_a_standby_is_ended_once_it_cannot_claim_the_run(
    run: RunFolder, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
):
    keeper, step = named(run, cluster)
    keeper._promised_at_s = time.monotonic() + 60
    with ThreadPoolExecutor() as other:
        with monkeypatch.context() as patched:
            patched.setattr(Lease, "write", refuse)
            dismissing = other.submit(keeper.dismiss)
            with pytest.raises(TimeoutError):
                dismissing.result(0.5)
            assert not step.ended, "a promise is not enough: nothing renews the lease any more"
        assert dismissing.result(10) and step.ended
    terms = Lease(run, cluster.attempt).read()
    assert terms is not None and terms.standby == ""
    keeper._name("another")
    terms = Lease(run, cluster.attempt).read()
    assert terms is not None and terms.standby == "", "none is named after that"


def test_a_standby_that_has_fallen_silent_is_ended_unless_it_owns_the_run(run: RunFolder, cluster: SlurmCluster):
    keeper, step = named(run, cluster)
    asyncio.run(keeper._give_up("n2", "it is silent"))
    assert step.ended and not keeper._is_named
    keeper, step = named(run, cluster)
    run.take_over(replace(this_process(run, cluster, 4, standby=True), host="n2"))
    asyncio.run(keeper._give_up("n2", "it is silent"))
    assert not step.ended and keeper.is_lost


def test_a_promise_does_not_outweigh_another_owner(run: RunFolder, cluster: SlurmCluster):
    keeper, _ = named(run, cluster)
    keeper._promised_at_s = time.monotonic()
    assert keeper.confirm()
    run.take_over(replace(this_process(run, cluster, 4, standby=True), host="n2"))
    assert not keeper.confirm(), "as after the sleep of a virtual machine, which its clock does not count"


def test_a_superseded_supervisor_tells_nothing_of_standbys(run: RunFolder, cluster: SlurmCluster):
    keeper, _ = named(run, cluster)
    keeper._journal = PatientJournal(run.path, FolderThread())
    keeper._note(EventName.STANDBY_READY, node="n2")
    keeper._is_superseded = True
    asyncio.run(keeper._yield())
    keeper._note(EventName.STANDBY_LOST, node="n2", reason="it owns the run")
    keeper._journal.flush(5)
    assert [event.event for event in run.journal().read()] == [EventName.STANDBY_READY]


def test_a_standby_cannot_claim_the_run_of_a_supervisor_that_its_guardian_replaces(
    run: RunFolder, cluster: SlurmCluster, watch: Watch, monkeypatch: pytest.MonkeyPatch
):
    config, environment = configured(run.path), {"SLURMFT_GUARD_LOST": " 1"}
    monkeypatch.setattr(os, "uname", lambda: type("Uname", (), {"nodename": "elsewhere"}))
    assert supervisor_run._owner_from_now_on(config, {}, run) == run.owner()
    assert Lease(run, cluster.attempt).read() == TERMS, "another process's supervisor is none of its business"
    owner = supervisor_run._owner_from_now_on(config, environment, run)
    assert owner is not None and owner.generation == 3
    assert watch._claim() is None and watch._is_dismissed


def test_a_claim_before_the_guardian_acts_stands(
    run: RunFolder, cluster: SlurmCluster, watch: Watch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "uname", lambda: type("Uname", (), {"nodename": "elsewhere"}))
    config, environment = configured(run.path), {"SLURMFT_GUARD_LOST": " 1", "SLURM_JOB_ID": "7"}
    lock, claimed = RunFolder.lock, []

    @contextlib.contextmanager
    def after_a_claim(self: RunFolder) -> Iterator[None]:
        monkeypatch.setattr(RunFolder, "lock", lock)
        claimed.append(watch._claim())
        with lock(self):
            yield

    monkeypatch.setattr(RunFolder, "lock", after_a_claim)
    owner = supervisor_run._owner_from_now_on(config, environment, run)
    assert claimed[0] is not None and owner == claimed[0][1] and is_standbys(owner, cluster.attempt)
    assert Lease(run, cluster.attempt).read() == TERMS
    assert not standby_has_taken_over(config, environment), "of itself a standby does not say so"
    run.take_over(replace(owner, pid=1))
    assert standby_has_taken_over(config, environment)


def test_a_busy_lock_does_not_end_the_job(run: RunFolder, watch: Watch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "uname", lambda: type("Uname", (), {"nodename": "elsewhere"}))

    def busy(*_: object) -> None:
        raise RunBusy("another process holds it")

    monkeypatch.setattr(supervisor_run, "refuse_claims", busy)
    owner = supervisor_run._owner_from_now_on(configured(run.path), {"SLURMFT_GUARD_LOST": "1"}, run)
    assert owner is not None and owner.generation == 3


def test_an_error_that_passes_does_not_end_what_a_standby_has_taken_over(
    run: RunFolder, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
):
    run.take_over(this_process(run, cluster, 4, standby=True))
    looks = []

    def stale_once(*_: object) -> None:
        looks.append(1)
        if len(looks) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(takeover, "find_elsewhere", stale_once)
    found = takeover._look(configured(run.path), run, cluster, "nothing was heard")
    assert len(looks) == 2 and found.verdict.reason == "nothing was heard"


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1, "hosts": [], "port": 2}', '{"format": 1, "hosts": 3}'])
def test_an_agent_does_not_hang_up_for_a_damaged_address(tmp_path: Path, text: str):
    (tmp_path / "secret").write_text("x")
    write_json(tmp_path / "control.json", {"hosts": ["n1"], "port": 1})
    where = Whereabouts(tmp_path, may_move=True)
    before = where.read()

    async def follow() -> None:
        (tmp_path / "control.json").write_text(text)
        moved = asyncio.create_task(where._moved(lambda: 60.0))
        await asyncio.sleep(0.7)
        assert not moved.done() and where.read() == before
        moved.cancel()

    asyncio.run(follow())


@pytest.mark.parametrize("is_superseded", [True, False])
def test_an_error_does_not_end_the_batch_script_of_a_standby_that_owns_the_run(
    run: RunFolder, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, is_superseded: bool
):
    def fail(*_: object, **__: object) -> int:
        raise LaunchError("srun cannot start anything here")

    run.take_over(this_process(run, cluster, 3))
    monkeypatch.setattr(cluster, "identify", lambda: None)
    monkeypatch.setattr(supervisor_run, "detect", lambda _: cluster)
    monkeypatch.setattr(supervisor_run, "_train", fail)
    monkeypatch.setattr(supervisor_run, "stand_aside", lambda *_: 42)
    monkeypatch.setattr(StandbyKeeper, "confirm", lambda _: not is_superseded)
    if is_superseded:
        assert supervisor_run.supervise(configured(run.path), {}) == 42
        return
    with pytest.raises(LaunchError):
        supervisor_run.supervise(configured(run.path), {})


def test_the_next_supervisor_knows_what_those_before_it_have_lost(run: RunFolder):
    older, mine, last = (run.journal(Attempt(job="7", restart=restart, cycle=cycle))
                         for restart, cycle in ((0, 0), (1, 1), (1, 2)))  # fmt: skip
    older.append(EventName.AGENT_LOST, node="n9", spare=False, reason="")
    for node in ("n2", "n3", "n4"):
        mine.append(EventName.AGENT_LOST, node=node, spare=False, reason="")
    mine.append(EventName.STANDBY_TOOK_OVER, host="h2", before="h1", node="n1", silent_s=4.1, generation=3)
    last.append(EventName.AGENT_BACK, node="n2")
    last.append(EventName.NODE_GIVEN_BACK, node="n3")
    last.append(EventName.SHRUNK, lost=["n5"])
    last.append(EventName.VERDICT, cause="node lost", node="n2")
    found = takeover.lost_before(run.journal().read(), Attempt(job="7", restart=1, cycle=2))
    assert found == ({"n1", "n3", "n4", "n5"}, {"n3", "n5"})


def test_a_supervisor_that_is_cut_off_knows_nothing_of_others(run: RunFolder, cluster: SlurmCluster):
    run.journal(cluster.attempt).append(EventName.AGENT_LOST, node="n2", spare=False, reason="nothing was heard")
    assert takeover.lost_before(run.journal().read(), cluster.attempt) == (set(), set())


@pytest.mark.parametrize("after", ["", "requeued", "another job"])
def test_a_job_that_a_standby_has_ended_was_not_cancelled_by_a_user(
    run: RunFolder, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, after: str
):
    """Its supervisor could not requeue it, as Slurm did not answer in time."""
    run.take_over(replace(this_process(run, cluster, 4, standby=True), host="elsewhere"))
    journal = run.journal(cluster.attempt)
    journal.append(EventName.ATTEMPT_STARTED, host="elsewhere", folder=str(run.path))
    journal.append(EventName.DECISION, action="continue", reason="", exit_code=75)
    journal.append(EventName.STANDBY_ENDS_JOB, job="8" if after == "another job" else "7")
    if after == "requeued":
        journal.append(EventName.REQUEUED, job="7", delay_s=2)
    monkeypatch.setattr(rescue, "placement_of", lambda *_, **__: None)
    monkeypatch.setattr(rescue, "bring_back", lambda *_, **__: "7")
    record = JobRecord(job_id="7", state="CANCELLED", reason="", nodes="", batch_host="", start=None, end=None,
                       limit_s=None, partition="p")  # fmt: skip
    said = rescue._submit_again(run, {OwnJob("7"): record}, [OwnJob("7")], "cron")
    assert (said is None) == bool(after)
    assert bool([event for event in journal.read() if event.event == EventName.CANCELLED]) == bool(after)
