"""The command of an agent: outside and inside of a container, with srun and without."""

import asyncio
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmft.config.run import RunConfig, from_values, validate
from slurmft.errors import LaunchError, UsageError
from slurmft.ipc.channel import connect, keep_alive_options
from slurmft.ipc.messages import Failed, Port, ReservedPort, SignalReport, as_reply
from slurmft.scheduler.parsing import PART_VARIABLE, current_job
from slurmft.storage.run_folder import Attempt
from slurmft.supervisor import crew
from slurmft.supervisor.agents import AgentPool, CallFailed
from slurmft.supervisor.cluster import (
    SlurmCluster,
    agents_argv,
    component_of,
    detect,
    environment_for,
    launch_of,
    of_component,
)

ATTEMPT = Attempt(job="7", restart=1)
AGENT = ["agent", "RUN/config.yaml", "7.1.0"]


def configured(path: Path, **container: Any) -> RunConfig:
    raw = {"command": "x", "run_folder": str(path), "working_directory": str(path.parent), "container": container,
           "slurm": {"srun_args": ["--own"]}}  # fmt: skip
    return validate(raw, source="test")


def argv(config: RunConfig, *, with_srun: bool = True) -> list[str]:
    options, command = launch_of(config, ATTEMPT, with_srun=with_srun)
    return [word.replace(str(config.run_folder), "RUN") for word in (*options, "|", *command)]


def test_without_a_container_it_is_this_python(tmp_path: Path):
    expected = ["|", sys.executable, "-P", "-u", "-m", "slurmft", *AGENT]
    config = configured(tmp_path / "run")
    assert argv(config) == argv(config, with_srun=False) == expected


def test_a_command_starts_behind_a_process_outside(tmp_path: Path):
    config = configured(
        tmp_path / "run", runtime="command", command=["box", "{mounts}", "--"], image="img", python="/p"
    )
    words = argv(config)
    outside, inner = words[: words.index("box")], words[words.index("box") :]
    assert outside == ["|", sys.executable, "-P", "-u", "-m", "slurmft.agent.container_outside", "box img", "", "--"]
    assert inner[inner.index("--") + 1 : inner.index("--") + 3] == ["/p", "-c"] and inner[-3:] == AGENT
    assert words == argv(config, with_srun=False)
    assert (tmp_path / "run/checkpoints").is_dir(), "a mount needs its source"


def test_pyxis_has_no_process_outside(tmp_path: Path):
    words = argv(configured(tmp_path / "run", runtime="pyxis", image="some#image"))
    options, inner = words[: words.index("|")], words[words.index("|") + 1 :]
    assert options[0] == "--container-image=some#image" and all(word.startswith("--") for word in options)
    assert inner[:2] == ["python3", "-c"] and inner[-3:] == AGENT


def test_sruns_own_options_come_first_and_the_program_last(tmp_path: Path):
    config = configured(tmp_path / "run", runtime="pyxis", image="i")
    words = agents_argv(config, {"SLURM_CPUS_PER_TASK": "4"}, 1, ATTEMPT, host="n2")
    order = ["--nodelist", "--own", "--container-image=i", "python3"]
    assert [words.index(word) for word in order] == sorted(words.index(word) for word in order)
    assert words[words.index("--nodelist") + 1] == "n2"


HET = {
    "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
    "SLURM_JOB_ID_HET_GROUP_0": "7", "SLURM_JOB_ID_HET_GROUP_1": "8", "SLURM_MEM_PER_NODE": "4096",
    "SLURM_MEM_PER_NODE_HET_GROUP_0": "4096", "SLURM_MEM_PER_NODE_HET_GROUP_1": "1024",
    "SLURM_GPUS_PER_NODE": "8", "SLURM_GPUS_PER_NODE_HET_GROUP_0": "8", "SLURM_CPUS_PER_TASK_HET_GROUP_1": "2",
}  # fmt: skip
"""As seen in a job on 22.05; GPUS_PER_NODE without a group is what a site's own environment may have."""


def test_a_run_in_components_has_the_nodes_of_all_and_another_run_those_around_its_batch_script(tmp_path: Path):
    apart = {"a": {"command": "x"}, "b": {"command": "x", "nodes": 2, "slurm": {"mem": "1G"}}}
    config = from_values({"run_folder": str(tmp_path / "run"), "roles": apart}, source="test")
    cluster = detect(config, HET)
    assert isinstance(cluster, SlurmCluster)
    assert (cluster.agent_hosts(config), cluster.size(config), cluster.attempt.job) == (["n1", "n2", "n3"], 3, "7")
    assert cluster.give_back("n3"), "Slurm cannot shrink such a job"
    alone = detect(configured(tmp_path / "run"), HET)
    assert alone.agent_hosts(configured(tmp_path / "run")) == ["n1"]
    of_role = detect(configured(tmp_path / "run"), {**HET, PART_VARIABLE: "n2,n3"})
    assert isinstance(of_role, SlurmCluster)
    assert (of_role.agent_hosts(config), of_role.count) == (["n2", "n3"], 2)


@pytest.mark.parametrize(("host", "component"), [("n1", 0), ("n[2-3]", 1), ("n3", 1), ("n9", None), ("", None)])
def test_agents_start_in_the_component_of_their_nodes(tmp_path: Path, host: str, component: int | None):
    job = current_job(HET)
    assert job is not None and component_of(job, host) == component
    words = agents_argv(configured(tmp_path / "run"), HET, 2, ATTEMPT, host=host, component=component)
    assert (f"--het-group={component}" in words) is (component is not None)
    assert component_of(replace(job, components=()), host) is None


def test_sruns_options_in_the_environment_are_those_of_the_component():
    other = of_component(HET, 1)
    assert (other["SLURM_MEM_PER_NODE"], other["SLURM_CPUS_PER_TASK"]) == ("1024", "2")
    assert "SLURM_GPUS_PER_NODE" not in other, "its nodes have none"
    assert other["SLURM_JOB_ID"] == "7", "srun knows the job by its leader"
    first = of_component(HET, 0)
    assert (first["SLURM_MEM_PER_NODE"], first["SLURM_GPUS_PER_NODE"]) == ("4096", "8")
    assert "SLURM_CPUS_PER_TASK" not in first


@pytest.mark.parametrize("runtime", ["pyxis", "oci"])
def test_what_srun_starts_is_refused_without_slurm(tmp_path: Path, runtime: str):
    with pytest.raises(UsageError, match=f"container.runtime {runtime} is started by srun"):
        launch_of(configured(tmp_path / "run", runtime=runtime, image="/i"), ATTEMPT, with_srun=False)


def test_slurm_is_given_a_bundle_of_the_runs_own(tmp_path: Path):
    image, run = tmp_path / "image", tmp_path / "run"
    for folder in (image, run):
        folder.mkdir()
    (image / "config.json").write_text(json.dumps({"root": {"path": "tree"}, "mounts": []}))
    config = configured(run, runtime="oci", image=str(image))
    for _ in range(2):  # each agent that is started again makes it anew
        assert argv(config)[0] == "--container=RUN/container"
    made = json.loads((run / "container/config.json").read_text())
    assert str(run) in {each["destination"] for each in made["mounts"]}
    assert (run / "container/rootfs").readlink() == image / "tree"
    assert sorted(path.name for path in (run / "container").iterdir()) == ["config.json", "rootfs"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is no OCI bundle"), ("{", "cannot be used"), ("[]", "not an object"), ("{}", "no root.path")],
    ids=["missing", "damaged", "a list", "empty"],
)
def test_an_image_that_is_no_bundle(tmp_path: Path, content: str | None, words: str):
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(LaunchError, match=words):
        launch_of(configured(tmp_path / "run", runtime="oci", image=str(tmp_path)), ATTEMPT, with_srun=True)


@pytest.mark.parametrize(
    ("container", "left_out"),
    [({}, set()), ({"runtime": "pyxis", "image": "i"}, {"PYTHONHOME"}),
     ({"runtime": "oci", "image": "i"}, {"PYTHONHOME", "SLURM_NODEID", "SLURMD_NODENAME"})],
    ids=["none", "pyxis", "oci"],
)  # fmt: skip
def test_variables_that_are_wrong_inside(tmp_path: Path, container: dict[str, str], left_out: set[str]):
    given = {name: "x" for name in ("PYTHONHOME", "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_JOB_ID", "PATH")}
    assert set(given) - set(environment_for(configured(tmp_path / "run", **container), given)) == left_out


# --- An agent and its connections: which are of the same one, what each of them repeats, and when one is given up ---


SECRET = b"s" * 32


async def second_is_taken(first: dict[str, object], second: dict[str, object]) -> bool:
    pool = AgentPool(SECRET, 1)
    port = await pool.listen("127.0.0.1")
    channels = []
    try:
        for own in (first, second):
            channel = await connect("127.0.0.1", port, SECRET)
            channel.send({"kind": "hello", "node": 0, "host": "n1", **own})
            channels.append(channel)
            await asyncio.wait_for(pool.complete.wait(), 10)
        # the one that is not wanted is told to end, or its connection is closed
        told = [asyncio.create_task(channel.receive()) for channel in channels]
        done, _ = await asyncio.wait(told, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        return told[0] in done
    finally:
        for channel in channels:
            channel.close()
        await pool.close()


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        pytest.param({"pid": 2, "birth": "b:1"}, {"pid": 2, "birth": "b:1"}, True, id="it has reconnected"),
        pytest.param({"pid": 2, "birth": "b:1"}, {"pid": 2, "birth": "b:9"}, False, id="of another container"),
        pytest.param({"pid": 2, "birth": "b:1"}, {"pid": 3, "birth": "b:1"}, False, id="another process"),
        pytest.param({"pid": 2}, {"pid": 2}, True, id="without a birth"),
    ],
)
def test_an_agent_takes_its_own_place_alone(first: dict[str, object], second: dict[str, object], taken: bool):
    assert asyncio.run(second_is_taken(first, second)) is taken


async def test_another_agent_waits_until_the_one_that_has_workers_is_given_up():
    """It was taken for that one, whose connection had broken: its workers' end was never heard of."""
    pool = AgentPool(SECRET, 1)
    port = await pool.listen("127.0.0.1")
    first = await connect("127.0.0.1", port, SECRET)
    first.send({"kind": "hello", "node": 0, "host": "n1", "pid": 2, "birth": "b:1"})
    await asyncio.wait_for(pool.complete.wait(), 10)
    [member] = pool.members = [pool.links[0]]
    pool.generation = 1
    first.close()
    try:
        while member.channel is not None:
            await asyncio.sleep(0.01)
        for is_given_up in (False, True):
            other = await connect("127.0.0.1", port, SECRET)
            other.send({"kind": "hello", "node": 0, "host": "n1", "pid": 3, "birth": "b:1"})
            if not is_given_up:
                assert await asyncio.wait_for(other.receive(), 10) is None, "it may try again"
                assert (pool.links[0], pool.members) == (member, [member])
                other.close()
                pool.drop(member)
        while pool.links[0] is member:
            await asyncio.sleep(0.01)
        other.close()
    finally:
        await pool.close()


async def test_an_agent_that_never_connects_is_ended_with_the_others(monkeypatch: pytest.MonkeyPatch):
    """Without Slurm it lived on for its lease: it was sent two TERMs, which it only tells its supervisor of."""
    monkeypatch.setattr(crew, "WIND_DOWN_S", 0.2)
    deaf = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert deaf.stdout is not None
    await deaf.stdout.readline()
    await asyncio.wait_for(crew.end_agents(AgentPool(SECRET, 1), [deaf], node_lost=False), 60)
    assert deaf.returncode == -9


async def test_what_an_agent_repeats_on_a_new_connection_is_heard_once():
    pool = AgentPool(SECRET, 1)
    port = await pool.listen("127.0.0.1")
    reports = []
    try:
        for name in ("SIGUSR1", "SIGUSR1", "SIGTERM"):
            channel = await connect("127.0.0.1", port, SECRET)
            channel.send({"kind": "hello", "node": 0, "host": "n1", "pid": 2, "birth": "b:1"})
            channel.send(SignalReport(name=name, count=1, at=1.0).as_mapping())
            channel.send(SignalReport(name=name, count=1, at=1.0).as_mapping())
            channel.send(SignalReport(name=f"after {name}", count=None, at=float(len(reports))).as_mapping())
            while not reports or not str(getattr(reports[-1], "name", "")).startswith("after"):
                reports.append((await asyncio.wait_for(pool.events.get(), 10))[1])
            reports.append(None)
            channel.close()
        names = [one.name for one in reports if isinstance(one, SignalReport)]
    finally:
        await pool.close()
    assert [name for name in names if not str(name).startswith("after")] == ["SIGUSR1", "SIGTERM"]


async def test_a_call_that_fails_in_the_agent_is_an_answer_and_the_connection_goes_on():
    pool = AgentPool(SECRET, 1)
    port = await pool.listen("127.0.0.1")
    channel = await connect("127.0.0.1", port, SECRET)
    try:
        channel.send({"kind": "hello", "node": 0, "host": "n1", "pid": 2, "birth": "b:1"})
        await asyncio.wait_for(pool.complete.wait(), 10)
        link, told = pool.links[0], ""
        for reply in (Failed(error="/dev/shm: No space left on device"), ReservedPort(port=7)):
            asked = asyncio.create_task(link.call(Port()))
            message = await asyncio.wait_for(channel.receive(), 10)
            assert message is not None
            channel.send(as_reply(message["id"], reply))
            try:
                found = (await asked).port
            except CallFailed as error:
                told = str(error)
    finally:
        channel.close()
        await pool.close()
    assert told == "the agent on n1: /dev/shm: No space left on device"
    assert found == 7


@pytest.mark.parametrize("patience_s", [0.1, 4.0, 10.0, 20.0, 90.0, 720.0, 1e9])
def test_the_kernel_does_not_give_a_connection_up_before_the_supervisor_does(patience_s: float):
    options = keep_alive_options(patience_s)
    least_s = min(patience_s, 86_400.0)
    assert options["TCP_USER_TIMEOUT"] / 1000 >= least_s
    assert options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"] >= least_s
    assert 1 <= options["TCP_KEEPCNT"] <= 127 and options["TCP_KEEPIDLE"] <= 32_767
    with socket.socket() as one:
        for name, value in options.items():
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def test_a_pool_has_the_patience_of_its_run():
    pool = AgentPool(SECRET, 1, patience_s=720.0)
    port = await pool.listen("127.0.0.1")
    channel = await connect("127.0.0.1", port, SECRET)
    try:
        channel.send({"kind": "hello", "node": 0, "host": "n1", "pid": 2, "birth": "b:1"})
        await asyncio.wait_for(pool.complete.wait(), 10)
        taken = pool.links[0].channel
        assert taken is not None
        there = taken._writer.get_extra_info("socket")
        assert int(there.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)) == 720_000
    finally:
        channel.close()
        await pool.close()
