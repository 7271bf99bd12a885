"""Agents that outlive their supervisor: which processes those are, and when they cannot be taken over."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.config.run import RunConfig
from slurmft.ipc.channel import encoded
from slurmft.ipc.messages import Hello, Kill, Port, ReservedPort, parse_report
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor import agents
from slurmft.supervisor.agents import (
    AgentLink,
    AgentLost,
    Orphan,
    ask_each,
    ask_unread,
    call_each,
    find_outlived,
    outliving,
)
from slurmft.system.processes import words_of

HERE = SimpleNamespace(listen_host="127.0.0.1")


def config_of(folder, *, inference: bool) -> RunConfig:
    given = {"inference": {"input": "a.jsonl", "engine": {"url": "http://h"}}} if inference else {"command": ["true"]}
    return RunConfig.model_validate({"run_folder": str(folder), **given})


@pytest.fixture
def agent(tmp_path):
    """A process with the words of an agent."""
    words = ["-m", "slurmft", "agent", str(tmp_path / "config.yaml"), "7.0.0"]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words]) as process:
        while "agent" not in words_of(process.pid):  # it has not come to its exec yet
            time.sleep(0.01)
        yield process
        process.kill()


@pytest.mark.parametrize("inference", [True, False])
def test_agents_of_an_inference_run_outlive_its_supervisor(tmp_path, agent, inference):
    assert outliving(config_of(tmp_path, inference=inference))(agent.pid) is inference
    assert not outliving(config_of(tmp_path / "another", inference=inference))(agent.pid)
    assert not outliving(config_of(tmp_path, inference=inference))(os.getpid())


def test_an_orphan_ends(agent):
    orphan = Orphan(agent.pid)
    assert orphan.returncode is None
    orphan.terminate()
    assert asyncio.run(asyncio.wait_for(orphan.wait(), 10)) == agents.EXIT_UNKNOWN
    agent.wait()
    orphan.kill()  # by now another process may have the number: nothing is sent


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunFolder:
    """A run whose supervisor is gone; its agents are children of this process, as if this were the guardian's."""
    run = RunFolder(tmp_path)
    run.create()
    attempt = Attempt(job="7", restart=0, cycle=1)
    monkeypatch.setattr(RunFolder, "owner", lambda self: SimpleNamespace(job="7", restart=0, cycle=2))
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setattr(agents, "END_S", 1.0)
    run.attempt_folder(attempt)
    run.new_secret(attempt)
    return run


def test_agents_are_taken_over_at_the_port_where_they_look(tmp_path, run, agent):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (run.attempts / "7.0.1" / "control.json").write_text(f'{{"format": 1, "hosts": ["127.0.0.1"], "port": {port}}}')
    found = find_outlived(config_of(tmp_path, inference=True), run, HERE)
    assert found is not None
    assert (str(found.attempt), found.listener.getsockname()[1]) == ("7.0.1", port)
    assert [orphan.pid for orphan in found.processes] == [agent.pid]
    assert len(found.secret) >= 16
    assert repr(found.secret) not in repr(found)
    found.end()
    assert agent.wait(10) < 0


@pytest.mark.parametrize("why", ["nothing said", "damaged", "taken", "no secret"])
def test_agents_that_cannot_be_taken_over_are_ended(tmp_path, run, agent, why):
    where = run.attempts / "7.0.1" / "control.json"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        match why:
            case "damaged":
                where.write_text('{"format": 1, "hosts": [], "port": "x"}')
            case "taken":
                where.write_text(f'{{"format": 1, "hosts": [], "port": {taken.getsockname()[1]}}}')
            case "no secret":
                where.write_text('{"format": 1, "hosts": [], "port": 1}')
                (where.parent / "secret").unlink()
        assert find_outlived(config_of(tmp_path, inference=True), run, HERE) is None
    assert agent.wait(10) < 0


def test_a_run_without_agents_has_none_to_take_over(tmp_path, run):
    assert find_outlived(config_of(tmp_path, inference=True), run, HERE) is None


# --- One question to all agents: replies in order, and the error of the agent that is gone, not of its neighbours ---


class Agent:
    """The other end of a link's channel, which answers at once, goes away, or is silent."""

    peer = ""

    def __init__(self, node: int, answer: Any = None, *, goes: bool = False) -> None:
        self.link = AgentLink(self, Hello(node=node, host=f"n{node}", pid=1))  # type: ignore[arg-type]
        self.answer, self.goes = answer, goes

    def send(self, message: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        if self.goes:
            loop.call_soon(self.link.disconnected)
        elif self.answer is not None:
            line = encoded({"kind": "reply", "id": message["id"], **self.answer})
            loop.call_soon(self.link.answered, parse_report(line), line)


def links(*agents: Agent) -> list[AgentLink]:
    return [agent.link for agent in agents]


async def test_replies_come_in_the_order_of_the_agents_with_the_reason_of_each_that_is_missing() -> None:
    silent, gone = Agent(1), Agent(2, goes=True)
    unconnected = AgentLink(None, Hello(node=3, host="n3", pid=1))
    every = [Agent(0, {"port": 7}).link, silent.link, gone.link, unconnected, Agent(4, {"port": 9}).link]
    found = await ask_each(every, Port(), timeout_s=0.05)
    assert not any(link._waiting for link in every), "nothing is left behind"
    first, silent, gone, unconnected, last = found
    assert (first, last) == (ReservedPort(port=7), ReservedPort(port=9))
    assert "the agent on n1 did not answer 'port' within" in str(silent)
    assert str(gone) == "the agent on n2 has gone"
    assert str(unconnected) == "the agent on n3 is not connected"


def test_where_all_are_needed_the_one_that_is_gone_is_named_at_once() -> None:
    async def called() -> None:
        await call_each(links(Agent(0), Agent(1, goes=True)), [Kill(), Kill()], timeout_s=60.0)

    with pytest.raises(AgentLost, match=r"^the agent on n1 has gone$"):
        asyncio.run(asyncio.wait_for(called(), 10))


async def test_a_reply_that_is_not_looked_at_is_no_reason_to_hang_up() -> None:
    found = await ask_unread(links(Agent(0, {"port": "none"})), Port(), timeout_s=5.0)
    assert found == [b'{"kind":"reply","id":1,"port":"none"}']
