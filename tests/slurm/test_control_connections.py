"""The control connection between agent and supervisor breaks, or an agent cannot do what it is asked for; no Slurm."""

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.conftest import eventually
from slurm.test_just_in_time import TRAINER, workers
from slurm.test_local import SLURMFT, LocalRun
from slurmft.policy.verdict import EXIT_DO_NOT_REQUEUE
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import write_json

pytestmark = pytest.mark.timeout(200)


class Between:
    """Stands between the agents and the supervisor of a run.

    ``loses`` swallows what agents send. ``cut_at``, a kind of call, resets the connection that carries one: before it
    has arrived, or before its answer has. Once.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._loop = folder, asyncio.new_event_loop()
        self._port = 0
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self.loses = False
        self.cut_at, self.cuts_answer = "", False
        self.ready = threading.Event()
        threading.Thread(target=self._loop.run_until_complete, args=[self._main()], daemon=True).start()

    def reset(self) -> None:
        """Reset every connection, and take further ones."""

        def work() -> None:
            for writer in (each for pair in self._pairs for each in pair):
                writer.transport.abort()
            self._pairs, self.loses = [], False

        self._loop.call_soon_threadsafe(work)

    @property
    def connections(self) -> int:
        return len(self._pairs)

    async def _main(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        while not (found := list(self._folder.attempts.glob("*/control.json"))):
            await asyncio.sleep(0.002)
        where = json.loads(found[0].read_text())
        self._port = where["port"]
        write_json(found[0], where | {"port": server.sockets[0].getsockname()[1]})
        self.ready.set()
        await asyncio.Event().wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection("127.0.0.1", self._port)
        self._pairs.append((writer, onward))
        await asyncio.gather(self._pass(reader, onward, up=True), self._pass(there, writer, up=False))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        try:
            while data := await reader.read(65536):
                is_it = not up and self.cut_at and f'"kind":"{self.cut_at}"'.encode() in data
                if not (up and self.loses) and not (is_it and not self.cuts_answer):
                    writer.write(data)
                if is_it:
                    self.cut_at, self.loses = "", self.cuts_answer
                    self._loop.call_later(0.1, self.reset)  # an answer is on its way by then, and swallowed
        except OSError:
            pass
        writer.close()


@pytest.fixture
def proxied(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LocalRun, Between]]:
    run = LocalRun(
        tmp_path / "run",
        command=getattr(request, "param", None) or [*TRAINER, "--steps", "60", "--step-delay", "0.1"],
        nodes=1,
        checkpoint={"interval_steps": 10},
        fault_tolerance={"num_in_job_restarts": 3},
    )
    between = Between(run.folder)
    run.submit()
    yield run, between
    if run.folder.done() is None:
        run.slurmft("stop", str(run.folder.path), check=False)


def test_the_end_of_a_worker_survives_the_connection_that_lost_it(proxied: tuple[LocalRun, Between]) -> None:
    run, between = proxied
    run.wait_for_step(12)
    assert between.connections == 1, "the agent does not come by the proxy"
    between.loses = True
    for process in workers(run).values():
        process.kill()
    eventually(lambda: not workers(run), 20, "the workers' ends")
    between.reset()
    run.wait_until_done()
    assert sorted(one.details["rank"] for one in run.events(EventName.WORKER_FAILED)) == [0, 1], run.story()
    assert len(run.events(EventName.VERDICT)) == 2


def test_a_full_shared_memory_at_a_start_is_a_launch_failure_that_names_it(tmp_path: Path) -> None:
    """Full of something that is not ours, in a namespace of mounts: the agent answers, and no node is blamed."""
    if os.geteuid() != 0:
        pytest.skip("a mount needs root")
    run = LocalRun(
        tmp_path / "run", command=[*TRAINER, "--steps", "4"], nodes=1,
        fault_tolerance={"num_job_retries_on_failure": 0},
    )  # fmt: skip
    script = """
        mount -t tmpfs -o size=1m tmpfs /dev/shm
        dd if=/dev/zero of=/dev/shm/of-another-user bs=64k status=none 2>/dev/null
        exec "$@"
    """
    unshare = ["unshare", "--mount", "--propagation", "private", "bash", "-c", script, "bash"]
    submit = [*SLURMFT, "submit", str(run.config), "--cluster", "local", "--wait"]
    ended = subprocess.run([*unshare, *submit], capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == EXIT_DO_NOT_REQUEUE, ended.stderr + run.story()
    (verdict,) = [one.details for one in run.events(EventName.VERDICT)]
    assert verdict["cause"] == "launch failure", run.story()
    assert "/dev/shm/" in verdict["reason"] and "No space left on device" in verdict["reason"], run.story()
    assert not verdict["suspects"] and not verdict["node"], run.story()
    assert not run.events(EventName.AGENT_LOST) + run.events(EventName.WORKERS_STARTED), run.story()


@pytest.mark.parametrize("proxied", [[*TRAINER, "--steps", "2000", "--step-delay", "0.1"]], indirect=True, ids=[""])
@pytest.mark.parametrize(("kind", "cuts_answer"), [
    ("propose", False), ("commit", True),
    *(pytest.param(*each, marks=pytest.mark.soak)
      for each in (("look", False), ("look", True), ("propose", True), ("commit", False))),
])  # fmt: skip
def test_a_stop_survives_the_connection_that_lost(
    proxied: tuple[LocalRun, Between], kind: str, cuts_answer: bool
) -> None:
    run, between = proxied
    run.wait_for_step(12)
    between.cuts_answer, between.cut_at = cuts_answer, kind
    run.slurmft("stop", str(run.folder.path))
    eventually(lambda: run.events(EventName.DECISION), 60, run.story)
    assert not between.cut_at, "nothing was cut"
    (verdict,) = [one.details for one in run.events(EventName.VERDICT)]
    assert verdict["cause"] == "stopped by user", run.story()
    assert verdict["saved_step"] == verdict["last_step"], run.story()


@pytest.mark.parametrize("cuts_answer", [False, True], ids=["the call", "its answer"])
def test_workers_begin_although_the_connection_lost_their_start(tmp_path: Path, cuts_answer: bool) -> None:
    run = LocalRun(
        tmp_path / "run", command=[*TRAINER, "--steps", "8"], nodes=1, fault_tolerance={"num_in_job_restarts": 3}
    )
    between = Between(run.folder)
    between.cuts_answer, between.cut_at = cuts_answer, "start"
    run.submit("--wait")
    assert not between.cut_at, "nothing was cut"
    assert not run.events(EventName.AGENT_LOST), run.story()
    assert "node lost" not in [one.details["cause"] for one in run.events(EventName.VERDICT)], run.story()


SLEEPER = """
import os, signal, sys, time
time.sleep(3)
os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "0" and "0.0" in os.environ["SLURMFT_ATTEMPT"] else None
time.sleep(60 if os.environ["SLURMFT_ATTEMPT"].endswith(".0.0") else 0)
"""


@pytest.mark.parametrize("proxied", [["python", "-c", SLEEPER]], indirect=True)
def test_workers_are_killed_although_the_connection_lost_the_call(proxied: tuple[LocalRun, Between]) -> None:
    run, between = proxied
    eventually(between.ready.is_set, 30, "the proxy")
    between.cut_at = "kill"
    run.wait_until_done()
    failed, ended = (run.events(name)[0].at for name in (EventName.WORKER_FAILED, EventName.VERDICT))
    assert not between.cut_at, "nothing was cut"
    assert (ended - failed).total_seconds() < 30, run.story()
