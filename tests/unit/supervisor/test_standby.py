"""A supervisor and its standby, as two sides of one run folder."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slurmft.config.config import RunConfig, validate
from slurmft.errors import ConfigError
from slurmft.ipc.whereabouts import Whereabouts
from slurmft.operations import rescue
from slurmft.policy.site.job_identity import JobIdentity, OwnJob
from slurmft.scheduler import own_jobs
from slurmft.scheduler.environment import SlurmJob, as_in_batch_script, batch_node, with_batch_variables
from slurmft.scheduler.parsing.parsing import JobEnding
from slurmft.storage import signs_of_life
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.cluster import SlurmCluster
from slurmft.supervisor.owner import this_process
from slurmft.supervisor.standby.aside import is_standbys
from slurmft.supervisor.standby.keeper import StandbyKeeper
from slurmft.supervisor.standby.lease import Lease, Terms
from slurmft.supervisor.standby.watch import Watch
from slurmft.supervisor.start import Start
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


def test_damaged_terms_are_none(run: RunFolder, cluster: SlurmCluster):
    lease = Lease(run, cluster.attempt)
    assert lease.read() is None and lease.age_s() is None
    for text in ("", "[]", "{}", '{"hosts": 1, "port": 2, "secret": "", "standby": ""}'):
        lease.path.with_suffix(".lease.json").write_text(text)
        assert lease.read() is None
    lease.write(TERMS)
    assert lease.read() == TERMS and "secret" not in repr(TERMS)


def test_a_step_gets_the_batch_scripts_environment():
    batch = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURMD_NODENAME": "n1", "HOME": "/h", "SLURM_CONF": "/c"}
    step = {**with_batch_variables(batch), "SLURM_NNODES": "1", "SLURM_STEP_ID": "4", "SLURMD_NODENAME": "n2"}
    assert batch_node(step) == "n1"
    assert as_in_batch_script(step) == {**batch, "SLURMD_NODENAME": "n2"}


@pytest.mark.parametrize("changes", [
    {"spare_nodes": 0, "nodes": 2}, {"spare_nodes": 0, "nodes": 1, "slurm": {"no_kill": True}},
])  # fmt: skip
def test_a_job_that_dies_with_its_batch_host_needs_no_standby(tmp_path: Path, changes: dict[str, object]):
    with pytest.raises(ConfigError, match="standby_supervisor"):
        configured(tmp_path / "run", **changes)


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
    signs_of_life.touch(run, cluster.attempt)
    run.take_over(this_process(run, cluster, 3))
    assert not rescue._has_standby(run, job), "its batch script is gone, and nothing has taken over"
    run.take_over(this_process(run, cluster, 4, standby=True))
    assert rescue._has_standby(run, job) and not rescue._has_standby(run, OwnJob("8"))
    alive = run.attempts / str(cluster.attempt) / "alive"
    os.utime(alive, (time.time() - 60, time.time() - 60))
    assert not rescue._has_standby(run, job), "that is gone, too"
