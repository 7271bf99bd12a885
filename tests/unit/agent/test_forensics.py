"""What an agent finds out about real workers of a real zygote, without torch."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from of_each import of_each
from waiting import until_async

from slurmft.agent import workers as agent_workers
from slurmft.agent.hangs import MAX_REPLY_BYTES, WAIT_SHARE, Forensics, as_reply
from slurmft.agent.workers import Workers
from slurmft.ipc import pages
from slurmft.ipc.channel import encoded
from slurmft.ipc.messages import EvidenceReply, RankEvidence, TakeEvidence
from slurmft.policy.judge import Progress, Where
from slurmft.policy.stop import NOT_STARTED
from slurmft.system import processes
from slurmft.system.processes import view

WAIT_S = 20.0
PATIENT_S = 5.0
"""On a machine that is busy; every wait ends as soon as it can."""

pytestmark = pytest.mark.usefixtures("pages_of_its_own")


def arrived(found: list[RankEvidence]) -> list[RankEvidence]:
    """The evidence, as the supervisor reads it from a message."""
    line = encoded(EvidenceReply(ranks=tuple(found)))
    return list(TakeEvidence(within_s=1.0).reply_of(line).ranks)


class Node:
    def __init__(self, folder: Path) -> None:
        self.folder, self.attempt = folder, folder / "attempt"
        self.attempt.mkdir()
        self.workers = Workers(lambda _worker: None)
        self.forensics = Forensics("n1")

    async def start(self, text: str, *, ranks: int = 1, command: list[str] | None = None) -> None:
        """Start them; returns when each has printed a word."""
        (self.folder / "train.py").write_text(textwrap.dedent(text))
        self.workers.start(
            range(ranks), [{"PATH": os.environ["PATH"], "RANK": str(rank)} for rank in range(ranks)],
            command=command or ["python", "train.py"], folder=self.folder, logs=self.folder,
            verdicts=[self.folder / f"verdict-{rank}.json" for rank in range(ranks)], generation=1,
        )  # fmt: skip
        for rank in range(ranks):
            await until_async(lambda path=self.folder / f"rank-{rank}.log": path.exists() and path.read_text())
            await until_async(lambda rank=rank: self.pid(rank))  # the zygote's word may come later than the worker's
            if "time.sleep(" in text:  # from the word to the sleep is a moment of its own
                await until_async(lambda rank=rank: (seen := view(self.pid(rank))) is not None and seen.state == "S")

    async def look(self, within_s: float = PATIENT_S) -> list[RankEvidence]:
        workers = list(self.workers.by_rank.values())
        found = await self.forensics.take_evidence(workers, self.attempt, within_s)
        assert arrived(found) == found
        self.forensics.finish(WAIT_S)
        return found

    def pid(self, rank: int = 0) -> int:
        return self.workers.by_rank[rank].pid

    def stacks(self, rank: int = 0) -> str:
        path = self.attempt / f"stacks-rank-{rank}.txt"
        return path.read_text() if path.exists() else ""


@contextlib.asynccontextmanager
async def node_in(folder: Path) -> AsyncIterator[Node]:
    node = Node(folder)
    node.workers.start_zygote(dict(os.environ), preload=())
    try:
        yield node
    finally:
        node.workers.close()


@pytest.fixture
def node(tmp_path: Path) -> contextlib.AbstractAsyncContextManager[Node]:
    return node_in(tmp_path)


SLEEPS = """
import threading, time
def load_a_batch():
    print("ready", flush=True)
    time.sleep(300)
threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
load_a_batch()
"""


async def test_a_worker_tells_its_stacks_quickly_and_goes_on(node, tmp_path):
    await node.start(SLEEPS, ranks=2)
    began = time.monotonic()
    found = await node.look()
    assert time.monotonic() - began < PATIENT_S, "it waits no longer than it must"
    for rank, each in enumerate(found):
        assert (each.rank, each.pid, each.kind) == (rank, node.pid(rank), "elsewhere")
        assert each.doing == "is in load_a_batch (train.py:5)"
        assert each.python_top[0] == f"{tmp_path}/train.py:5 load_a_batch"
        assert each.process == "S"
        assert node.stacks(rank).count("load_a_batch") == 1
        assert "Thread 0x" in node.stacks(rank), "the other thread too"
        assert node.workers.by_rank[rank].alive
    facts = json.loads((node.attempt / "evidence-n1.json").read_text())
    assert [each["kernel"]["threads"][0]["state"] for each in facts["ranks"]] == ["S", "S"]
    assert (await node.look())[0].kind == "elsewhere"
    assert node.stacks().count("==== rank 0,") == node.stacks().count("load_a_batch") == 2


async def test_a_stopped_worker_is_told_from_outside_at_once(node):
    await node.start(SLEEPS, ranks=2)
    os.kill(node.pid(1), signal.SIGSTOP)
    await until_async(lambda: (seen := view(node.pid(1))) is not None and seen.state == "T")
    began = time.monotonic()
    found = await node.look()
    assert time.monotonic() - began < PATIENT_S, "nobody waits for an answer that cannot come"
    assert [each.kind for each in found] == ["elsewhere", "stopped"]
    assert found[1].python_top == ()
    assert node.stacks(1) == ""


def test_the_signals_of_a_member_of_many_groups_are_read(tmp_path):
    status = tmp_path / "status"
    groups = " ".join(str(1_000_000 + number) for number in range(2000))
    status.write_text(f"State:\tS (sleeping)\nGroups:\t{groups}\nThreads:\t1\nSigCgt:\t0000400000000000\n")
    assert processes.text_of(str(status)).endswith("SigCgt:\t0000400000000000\n")


async def test_a_worker_that_is_no_python_of_ours_survives_the_look(node):
    await node.start("", command=["bash", "-c", "echo ready; sleep 300; true"])
    (each,) = await node.look()
    assert each.kind == "no answer"
    assert each.process in ("R", "S", "D")
    assert each.tick == NOT_STARTED
    assert not each.attached
    assert view(node.pid()) is not None, "the signal would have ended it"


async def test_one_that_blocks_the_signal_costs_no_more_than_the_limit(node):
    number = int(pages.STACKS_SIGNAL)
    await node.start(f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [{number}])\n{SLEEPS}")
    began = time.monotonic()
    (each,) = await node.look(0.1)
    assert each.kind == "no answer"
    assert 0.1 <= time.monotonic() - began < PATIENT_S


async def test_a_trainers_own_faulthandler_changes_nothing(node):
    await node.start(
        "import faulthandler, signal; faulthandler.enable(); faulthandler.register(signal.SIGUSR1); "
        f"faulthandler.disable(){SLEEPS}"
    )
    assert (await node.look())[0].doing == "is in load_a_batch (train.py:5)"


async def test_a_worker_deep_in_a_recursion_and_one_that_computes_answer(node):
    await node.start(
        """
        import os, sys
        def spin(depth):
            if depth:
                return spin(depth - 1)
            print("ready", flush=True)
            while True:
                pass
        spin(300 if os.environ["RANK"] == "0" else 0)
        """,
        ranks=2,
    )
    for each in await node.look():
        assert each.kind == "elsewhere"
        assert "spin" in each.doing


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
async def test_a_crash_leaves_its_stack(node, tmp_path, number):
    await node.start(SLEEPS)
    os.kill(node.pid(), number)
    worker = node.workers.by_rank[0]
    await until_async(lambda: worker.exit_code is not None)
    node.forensics.keep_last_words(worker, node.attempt)
    node.forensics.keep_last_words(worker, node.attempt)
    (each,) = await node.look()
    assert worker.exit_code == -number
    assert (each.kind, each.exit_code) == ("dead", -number)
    assert each.python_top[0] == f"{tmp_path}/train.py:5 load_a_batch"
    assert node.stacks().count("Fatal Python error") == 1
    assert "load_a_batch" in node.stacks()
    assert "exit code -" in node.stacks()


async def test_a_healthy_end_leaves_no_file(node):
    await node.start("print('ready')")
    worker = node.workers.by_rank[0]
    await until_async(lambda: worker.exit_code is not None)
    node.forensics.keep_last_words(worker, node.attempt)
    node.forensics.finish(WAIT_S)
    assert list(node.attempt.iterdir()) == []


async def test_a_folder_that_cannot_be_written_costs_the_files_and_not_the_findings(node, tmp_path):
    await node.start(SLEEPS)
    node.attempt = tmp_path / "no" / "such" / "folder"
    assert (await node.look())[0].doing == "is in load_a_batch (train.py:5)"


async def test_a_worker_that_has_not_been_forked_yet(node, tmp_path):
    (tmp_path / "train.py").write_text("")
    node.workers.start([0], [{}], command=["python", "train.py"], folder=tmp_path, logs=tmp_path,
                       verdicts=[tmp_path / "v"], generation=1)  # fmt: skip
    (each,) = await node.look(0.0)
    assert (each.kind, each.pid) == ("no answer", 0)


def test_a_reply_fits_into_a_message_however_many_ranks_there_are():
    group = Progress(group="z" * 100, description="z" * 100, operation="z" * 100, called_from="z" * 100)
    one = RankEvidence(
        rank=0, pid=1, kind=Where.ELSEWHERE, doing="x" * 200, process="S", wchan="", attached=True, state=1, step=1,
        tick=1, sections=(), python_top=("y" * 200,) * pages.MAX_FRAMES, exit_code=None, killed=False,
        collectives=(group,) * 16,
    )  # fmt: skip
    for number in (1, 100, 300, 1024):
        reply = as_reply([one] * number)
        assert len(encoded(reply)) <= MAX_REPLY_BYTES
        assert len(reply) == number or number > 300


async def test_open_sections_are_told_with_how_long_they_are_open(node):
    await node.start(
        f"""
        import os
        from pathlib import Path
        from slurmft.ipc.pages import PAGE_VARIABLE, Page
        from slurmft.ipc.pages import SectionStack
        stack = SectionStack(Page.attach(Path(os.environ[PAGE_VARIABLE])))
        with stack.section("step"), stack.section("load data"):
            exec({SLEEPS!r})
        """
    )
    (each,) = await node.look()
    assert each.attached
    assert [section.rpartition(" (")[0] for section in each.sections][-2:] == ["step", "load data"]
    assert all(section.endswith(" s)") for section in each.sections)


DUMP_OF_TORCH = Path(__file__).parents[1] / "data" / "flight_recorder" / "missing-rank-0"


async def test_the_dump_of_a_rank_that_torchs_watchdog_has_ended_is_read(node):
    await node.start("import os\nprint('x', flush=True)\nos.abort()")
    await until_async(lambda: node.workers.by_rank[0].exit_code is not None)
    agent_workers.dump_of(node.attempt, 0).write_bytes(DUMP_OF_TORCH.read_bytes())
    (dead,) = await node.look()
    assert (dead.exit_code, len(dead.collectives)) == (-6, 2)
    (again,) = await node.look()
    assert again.collectives == (), "it tells of what was, once"


async def test_dumps_of_flight_recorders_are_waited_for_until_they_are_there(node):
    await node.start(SLEEPS, ranks=2)
    pipe = Path(f"{agent_workers.pipe_prefix(node.workers.folder)}1.pipe")
    os.mkfifo(pipe)
    recorder = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    async def record() -> None:
        asked = b""
        while not asked:
            await asyncio.sleep(0.01)
            with contextlib.suppress(BlockingIOError):
                asked = os.read(recorder, 100)
        agent_workers.dump_of(node.attempt, 1).write_bytes(DUMP_OF_TORCH.read_bytes())

    workers = list(node.workers.by_rank.values())
    task = asyncio.create_task(record())
    began = time.monotonic()
    found = await node.forensics.take_evidence(workers, node.attempt, PATIENT_S, 30.0)
    assert time.monotonic() - began < 60.0
    assert task.done()
    assert arrived(found) == found
    assert [[each.entered, each.done] for each in found[1].collectives] == [[4, 3], [3, 3]]
    assert found[0].collectives == (), "its recorder has written nothing"
    began = time.monotonic()
    await node.forensics.take_evidence(workers, node.attempt / "elsewhere", PATIENT_S, 0.3)
    assert 0.3 * WAIT_SHARE <= time.monotonic() - began < 60.0, "a dump that does not come costs what it may"
    os.close(recorder)


# the text that faulthandler writes


DUMP = """Thread 0x00007f27928a86c0 (most recent call first):
  File "/lib/threading.py", line 982 in run

Current thread 0x00007f279361fb80 (most recent call first):
  File "/a path/t "quoted".py", line 8 in <lambda>
  File "/t.py", line ??? in f
"""


@of_each(dump__frames=[
        (DUMP, ['/a path/t "quoted".py:8 <lambda>', "/t.py:??? f"]),
        (DUMP.replace("Current t", "T"), ['/a path/t "quoted".py:8 <lambda>', "/t.py:??? f"]),
        (DUMP + DUMP.replace("<lambda>", "newer"), ['/a path/t "quoted".py:8 newer', "/t.py:??? f"]),
        (DUMP + 'Thread 0x1 (most recent call first):\n  File "/x.py", line 1 in g\n...\n',
         ['/a path/t "quoted".py:8 <lambda>', "/t.py:??? f"]),
        ("Fatal Python error: Segmentation fault\n\n" + DUMP, ['/a path/t "quoted".py:8 <lambda>', "/t.py:??? f"]),
        ('Thread 0x1 [pt_main_thread] (most recent call first):\n  File "/x.py", line 1 in g', ["/x.py:1 g"]),
        ("Thread 0x1 (most recent call first):\n  <no Python frame>\n", []),
        ('  File "/x.py", line 1 in g\n', []),
        ("", []),
        ("\x00\xff nonsense", []),
    ])  # fmt: skip
def test_the_main_threads_calls(dump, frames):
    assert pages.innermost(pages.main_thread(dump)) == frames


def test_the_thread_of_a_crash_is_the_one_that_it_happened_in():
    other = 'Thread 0x2 (most recent call first):\n  File "/o.py", line 1 in other\n\n'
    crash = (
        'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "/x.py", line 1 in g\n\n'
    )
    for text in (crash, other + crash + other, crash + other + "Extension modules: a (total: 1)\n", DUMP + crash):
        assert pages.innermost(pages.crashed_thread(text)) == ["/x.py:1 g"]
    assert pages.crashed_thread(DUMP) == pages.crashed_thread("") == ()


def test_the_signal_is_a_real_time_one_that_python_knows():
    assert signal.SIGRTMIN < pages.STACKS_SIGNAL < signal.SIGRTMAX


def test_arming_costs_next_to_nothing_and_a_folder_that_is_gone_nothing_at_all(tmp_path):
    script = f"""
import time
from pathlib import Path
from slurmft.ipc import pages
began = time.process_time()
pages.arm(Path({str(tmp_path / "gone" / "x")!r}))
pages.arm(Path({str(tmp_path / "x")!r}))
print(time.process_time() - began)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert float(done.stdout) < 0.05
    assert (tmp_path / "x").read_bytes() == b""


# the flight recorder


@pytest.mark.parametrize(
    ("version", "same_torch", "old_names"),
    [("2.7.1", True, True), ("2.8.0", True, False), ("2.13.0+cpu", True, False), ("3.0", True, False),
     ("2.13.0", False, True), ("odd", True, True), (None, True, True)],
)  # fmt: skip
def test_names_that_torch_calls_old_are_set_only_where_it_needs_them(
    monkeypatch, tmp_path, version, same_torch, old_names
):
    def answer(_name: str) -> str:
        if version is None:
            raise agent_workers.importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(agent_workers.importlib.metadata, "version", answer)
    agent_workers.knows_new_names.cache_clear()
    try:
        names = agent_workers.variables(2000, tmp_path, same_torch=same_torch)
    finally:
        agent_workers.knows_new_names.cache_clear()
    assert names["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert names["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert ("TORCH_NCCL_TRACE_BUFFER_SIZE" in names) == ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE" in names) == old_names


def test_a_recorder_is_asked_through_its_pipe_and_only_where_somebody_reads(tmp_path):
    pipe = Path(f"{agent_workers.pipe_prefix(tmp_path)}3.pipe")
    assert not agent_workers.ask(tmp_path, 3)
    os.mkfifo(pipe)
    assert not agent_workers.ask(tmp_path, 3), "nobody reads it"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert agent_workers.ask(tmp_path, 3)
        assert os.read(reader, 10)
    finally:
        os.close(reader)
