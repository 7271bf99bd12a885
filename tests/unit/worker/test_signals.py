"""Who hears a SIGTERM in and below a worker. Every trainer here is a process of its own: what it installs stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

# The stranger signals whole process groups, as Slurm does on sites that track the tree of processes. A trainer says
# which processes it has, waits for a line on its standard input, and judges what happened in between.
BEGIN = """
import multiprocessing, os, signal, subprocess, sys, time
from slurmft.worker.signals import StopSignal, ignore_strangers_term

def helper(pipe, handler):
    if handler:
        signal.signal(signal.SIGTERM, lambda *_: (pipe.send("flushed"), sys.exit(3)))
    pipe.send("ready")
    try:
        pipe.recv()  # in the kernel: a handler must get through to it
    except EOFError:
        pass

def say(*words):
    print(*words, flush=True)

def strangers_term_is_taken(pid):
    # a pending one merges with the next one, and the sender of that is lost
    deadline = time.monotonic() + 10
    while int(open(f"/proc/{pid}/status").read().split("ShdPnd:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)

def start_helper(method, handler=False):
    context = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    process = context.Process(target=helper, args=(theirs, handler))
    process.start()
    theirs.close()
    return process, mine
"""


@contextmanager
def trainer(tmp_path: Path, code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "trainer.py"  # a file: spawned processes import it
    script.write_text(BEGIN + code)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def expect(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    if said != line:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"it said {said!r} instead of {line!r}\n{process.communicate()[1]}")


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


METHODS = ["fork", "spawn", "forkserver"]

HELPER = """
if __name__ == "__main__":
    stop = StopSignal.install()
    process, pipe = start_helper(sys.argv[1], handler=sys.argv[2] == "handler")
    assert pipe.recv() == "ready"
    say("ready")
    input()
    strangers_term_is_taken(process.pid)
    assert stop.seen
    assert process.is_alive(), f"a stranger's TERM ended it: {process.exitcode}"
    assert not pipe.poll(), "its handler was called"
    process.terminate()
    if sys.argv[2] == "handler":
        assert pipe.poll(10) and pipe.recv() == "flushed"
    process.join(10)
    say("ended with", process.exitcode)
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("handler", "code"), [("plain", -signal.SIGTERM), ("handler", 3)])
def test_a_helper_process_heeds_its_parent_and_no_stranger(tmp_path, method, handler, code):
    with trainer(tmp_path, HELPER, method, handler) as process:
        expect(process, "ready")
        for _ in range(3):
            os.killpg(process.pid, signal.SIGTERM)
        go_on(process)
        expect(process, f"ended with {code}")


STARTING = """
import threading
if __name__ != "__main__" and not hasattr(multiprocessing, "told"):
    multiprocessing.told = True
    os.write(1, b"importing\\n")
    time.sleep(0.5)  # the time that a real script takes to import torch

if __name__ == "__main__":
    StopSignal.install()
    process, pipe = start_helper(sys.argv[1])
    assert pipe.recv() == "ready", process.exitcode
    say("alive")
    input()
    before = time.monotonic()
    process, pipe = start_helper(sys.argv[1])
    process.terminate()  # by the parent it counts, however early
    process.join(20)
    say("ended with", process.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_is_shielded_while_it_still_imports(tmp_path, method):
    with trainer(tmp_path, STARTING, method) as process:
        expect(process, "importing")
        os.killpg(process.pid, signal.SIGTERM)
        expect(process, "alive")
        go_on(process)
        if method == "forkserver":  # may be so early that nobody has looked at the request yet
            return
        assert process.stdout is not None
        assert process.stdout.read().splitlines()[-1] == f"ended with {-signal.SIGTERM}"


POOL = """
from concurrent.futures import ProcessPoolExecutor
if __name__ == "__main__":
    StopSignal.install()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(sys.argv[1])) as pool:
        assert list(pool.map(abs, [-1, -2])) == [1, 2]
        say("ready")
        input()
        assert list(pool.map(abs, [-3, -4])) == [3, 4]
    say("fine")
"""


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_an_executor_goes_on_working(tmp_path, method):
    with trainer(tmp_path, POOL, method) as process:
        expect(process, "ready")
        os.killpg(process.pid, signal.SIGTERM)
        go_on(process)
        expect(process, "fine")


OTHERS = """
if __name__ == "__main__":
    StopSignal.install()
    with subprocess.Popen(["sleep", "60"]) as plain, subprocess.Popen(["sleep", "60"], preexec_fn=os.setsid) as led:
        for program in (plain, led):
            program.terminate()
            assert program.wait(10) == -signal.SIGTERM
    start_helper("fork")[1].recv()  # the parent's own mask is what it was
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    say("fine")
"""


def test_programs_can_be_terminated_as_ever(tmp_path):
    with trainer(tmp_path, OTHERS) as process:
        expect(process, "fine")


PLAIN_FORK = """
if __name__ == "__main__":
    if sys.argv[1] == "theirs":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    stop = StopSignal.install()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        if sys.argv[1] == "shielded":
            ignore_strangers_term()
        os.write(write, b"x")
        time.sleep(60)
    os.read(read, 1)
    if sys.argv[1] == "shielded":
        subprocess.run(["kill", "-TERM", str(child)])
        strangers_term_is_taken(child)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGTERM)
    say("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop.seen)
"""


@pytest.mark.parametrize(
    ("what", "code"),
    [
        pytest.param("default", -signal.SIGTERM, id="as if we were not there"),
        pytest.param("theirs", 7, id="the handler of the user"),
        pytest.param("shielded", -signal.SIGTERM, id="only its parent's, where it asked for it"),
    ],
)
def test_a_child_by_plain_fork(tmp_path, what, code):
    with trainer(tmp_path, PLAIN_FORK, what) as process:
        expect(process, f"ended with {code} False")


LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return index

if __name__ == "__main__":
    stop = StopSignal.install()
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1],
                        persistent_workers=True)
    batches = iter(loader)
    next(batches)
    say("ready")
    input()
    strangers_term_is_taken(batches._workers[0].pid)
    assert all(worker.is_alive() for worker in batches._workers), "a loader died of a stranger's TERM"
    assert stop.seen, "the trainer did not hear it"
    assert sum(len(batch) for batch in batches) == 60, "the loader lost samples"
    batches._workers[0].terminate()
    batches._workers[0].join(10)
    say("ended with", batches._workers[0].exitcode)  # torch's own handler: 0 when the parent ends it
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_loader_survives_a_strangers_term_but_not_its_parents(tmp_path, method):
    with trainer(tmp_path, LOADER, method) as process:
        expect(process, "ready")
        for _ in range(3):
            os.killpg(process.pid, signal.SIGTERM)
        go_on(process)
        expect(process, "ended with 0")
        assert "Terminated" not in process.communicate()[1], "ended by itself at exit, in order"
        assert process.returncode == 0
