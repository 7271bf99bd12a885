"""A zygote that is begun before its agent: with what the agent would give it, and by nothing but an agent."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import until

from slurmft.agent.workers import Workers, common_environment
from slurmft.config.run import RunConfig, validate
from slurmft.ipc.zygote_start import MAX_BYTES, VARIABLE, Zygote, begun_for, node_caches, shared_environment
from slurmft.supervisor.cluster import environment_for

WAIT_S = 30.0
AGENT = ["python -m slurmft", "agent", "config.yaml", "7.0.0"]

pytestmark = pytest.mark.usefixtures("pages_of_its_own")


def configured(folder: Path, **changes: object) -> RunConfig:
    keys = {"command": ["train.py"], "run_folder": str(folder / "run"), "fault_tolerance": {"preload": False}}
    return validate(keys | changes, source="a test")


@pytest.fixture
def begun() -> Iterator[Callable[..., Zygote | None]]:
    """``begun_for``, whose zygotes are ended after the test."""
    zygotes: list[Zygote] = []

    def begin(arguments: list[str], environment: dict[str, str]) -> Zygote | None:
        zygote = begun_for(arguments, environment)
        zygotes.extend([zygote] if zygote is not None else [])
        return zygote

    yield begin
    for zygote in zygotes:
        zygote.end()


@pytest.mark.parametrize(
    "changes",
    [{}, {"nproc_per_node": 2}, {"nproc_per_node": 2, "environment": {"OMP_NUM_THREADS": "3", "A": "b=c\n"}},
     {"fault_tolerance": {"preload": ["json", "wave"]}}],
    ids=["one rank", "two ranks", "own variables", "own modules"],
)  # fmt: skip
def test_it_is_begun_with_what_the_agent_would_give_it(tmp_path, begun, changes, monkeypatch):
    monkeypatch.setattr("slurmft.config.sections.PRELOAD", ("queue",))
    config = configured(tmp_path, **changes)
    given = environment_for(config, {**os.environ, "WANDB_RESUME": "must"})
    zygote = begun(AGENT, given)
    assert zygote is not None
    assert VARIABLE not in given
    preload = config.fault_tolerance.preloaded(config.launcher, config.inference)
    assert zygote.is_as(common_environment(config, given), preload)
    until(lambda: psutil.Process(zygote.process.pid).cmdline()[-len(preload) - 1 :][1:] == list(preload))
    until(psutil.Process(zygote.process.pid).environ)  # the kernel shows it a moment after the command line
    seen = psutil.Process(zygote.process.pid).environ()
    assert {name: seen.get(name) for name in zygote.environment} == zygote.environment


def test_other_commands_begin_none(tmp_path, begun):
    given = environment_for(configured(tmp_path), dict(os.environ))
    assert begun(["python -m slurmft", "run", "config.yaml"], given) is None
    assert VARIABLE not in given


def test_an_agent_that_was_told_nothing_begins_none_ahead(begun):
    assert begun(AGENT, dict(os.environ)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"preload": 1}', json.dumps({"preload": [], "name": "n"})])
def test_a_damaged_variable_is_said_and_left_to_the_agent(text, begun, capfd):
    given = {**os.environ, VARIABLE: text}
    assert begun(AGENT, given) is None
    assert VARIABLE not in given
    assert "no zygote ahead of the agent" in capfd.readouterr().err


def test_what_does_not_fit_into_a_variable_is_not_passed_on(tmp_path):
    config = configured(tmp_path, environment={"LONG": "x" * MAX_BYTES})
    assert VARIABLE not in environment_for(config, {})


def test_nothing_is_begun_outside_of_a_container(tmp_path):
    config = configured(tmp_path, container={"runtime": "pyxis", "image": "i"})
    assert VARIABLE not in environment_for(config, {})


@pytest.mark.parametrize("is_as_asked", [True, False])
async def test_workers_take_it_over_where_it_is_what_they_need(is_as_asked):
    zygote = Zygote({**os.environ, "X": "1"}, ["json"])
    workers = Workers(print)
    try:
        asked = {**os.environ, "X": "1" if is_as_asked else "2"}
        workers.start_zygote(asked, ["json"], zygote)
        async with asyncio.timeout(WAIT_S):
            await workers.ready.wait()
        alive = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
        [pid] = [each.pid for each in alive if "slurmft.agent.zygote" in each.cmdline()]
        until(psutil.Process(pid).environ)
        assert psutil.Process(pid).environ()["X"] == asked["X"]
        assert (pid == zygote.process.pid) is is_as_asked
    finally:
        workers.close()
    assert zygote.process.returncode is not None


@pytest.mark.parametrize("is_as_asked", [True, False])
def test_an_agent_goes_on_with_it_and_takes_it_along(tmp_path, is_as_asked):
    config = configured(tmp_path, nproc_per_node=2, environment={"A": "b"})
    (folder := config.run_folder / "attempts" / "7.0.0").mkdir(parents=True)
    (path := config.run_folder / "config.yaml").write_text(config.as_yaml())
    (folder / "secret").write_text("s")
    told = config if is_as_asked else configured(tmp_path, environment={"A": "c"})
    with socket.create_server(("127.0.0.1", 0)) as supervisor:
        supervisor.settimeout(WAIT_S)
        where = {"format": 1, "hosts": ["127.0.0.1"], "port": supervisor.getsockname()[1]}
        (folder / "control.json").write_text(json.dumps(where))
        agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "slurmft", "agent", str(path), "7.0.0"],
            env=environment_for(told, os.environ), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            process = psutil.Process(agent.pid)
            until(lambda: any("slurmft.agent.zygote" in each.cmdline() for each in process.children()))
            [first] = process.children()
            until(first.environ)
            assert first.environ()["A"] == told.environment["A"]  # what the agent itself begins has the configuration's
            supervisor.accept()[0].close()  # by now the agent has settled for a zygote
            [last] = process.children()
            until(last.environ)
            assert last.environ()["A"] == "b"
            assert (last == first) is is_as_asked
        finally:
            agent.kill()
            agent.wait()
    until(lambda: not last.is_running() or last.status() == psutil.STATUS_ZOMBIE)


def test_caches_of_compilers_lie_on_the_nodes_own_disk(tmp_path):
    (root := tmp_path / "disk").mkdir()
    base = {"TMPDIR": str(root)}
    caches = node_caches(base)
    assert set(caches) == {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} and node_caches(base) == caches
    [folder] = root.iterdir()
    assert all(Path(each).parent == folder for each in caches.values())
    assert folder.stat().st_mode & 0o777 == 0o700
    given = shared_environment({**base, "TRITON_CACHE_DIR": "/mine"}, name="n", per_node=1, own={})
    assert given["TRITON_CACHE_DIR"] == "/mine" and given["TORCHINDUCTOR_CACHE_DIR"].startswith(str(folder))


def test_a_folder_that_others_can_write_to_holds_no_caches(tmp_path):
    (root := tmp_path / "disk").mkdir()
    base = {"TMPDIR": str(root)}
    node_caches(base)
    [folder] = root.iterdir()
    folder.chmod(0o777)
    assert node_caches(base) == {}
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert node_caches(base) == {}
    assert node_caches({"TMPDIR": str(tmp_path / "none")}) == {}
