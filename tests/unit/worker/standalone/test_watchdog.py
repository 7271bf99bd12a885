"""A timer that must be reset, and signals that all ranks learn of."""

import io
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from of_each import of_each

from slurmft import DistributedSignalHandler, WatchdogTimer
from slurmft.errors import UsageError

SOON_S = 0.05
NEVER_S = 3600.0


def test_it_runs_out_once_after_the_stacks_were_written(tmp_path):
    called, path = threading.Event(), tmp_path / "stacks"
    calls: list[str] = []

    def callback() -> None:
        calls.append(path.read_text())
        called.set()

    with path.open("w") as file, WatchdogTimer(SOON_S, callback, file=file) as watchdog:
        assert called.wait(10)
        assert watchdog.expired
    assert len(calls) == 1
    assert "most recent call first" in calls[0] and "test_watchdog.py" in calls[0]


def test_resetting_keeps_it_quiet_and_arms_it_again():
    called: list[float] = []
    again = threading.Event()

    def callback() -> None:
        called.append(time.monotonic())
        again.set()

    watchdog = WatchdogTimer(1.0, callback, file=io.StringIO())
    watchdog.start()
    ends_s = time.monotonic() + 1.5
    while time.monotonic() < ends_s:
        time.sleep(0.02)
        watchdog.reset()
    assert not called and not watchdog.expired
    watchdog.timeout = SOON_S
    for number in (1, 2):
        again.clear()
        watchdog.reset()
        assert again.wait(10) and len(called) == number
    watchdog.stop()


def test_leaving_ends_the_thread_and_a_body_that_fails_is_not_hidden():
    before = threading.active_count()
    with pytest.raises(KeyError), WatchdogTimer(NEVER_S):
        assert threading.active_count() == before + 1
        raise KeyError
    assert threading.active_count() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_may_stop_it_and_may_fail():
    done = threading.Event()
    watchdog = WatchdogTimer(SOON_S, lambda: (watchdog.stop(), done.set(), 1 / 0), file=io.StringIO())
    with watchdog:
        thread = watchdog._thread
        assert done.wait(10) and thread is not None
        thread.join(10)
        assert not thread.is_alive()
    assert watchdog.expired


def test_a_stream_without_a_file_gets_the_stacks_too():
    stream, called = io.StringIO(), threading.Event()
    with WatchdogTimer(SOON_S, called.set, file=stream):
        assert called.wait(10)
    assert "test_a_stream_without_a_file" in stream.getvalue()


def test_a_process_that_was_stopped_has_not_hung():
    """SIGSTOP for much longer than the timeout, then SIGCONT: the loop goes on and resets it."""
    script = (
        "import sys, time; from slurmft import WatchdogTimer\n"
        "with WatchdogTimer(5.0, lambda: print('hung', flush=True)) as watchdog:\n"
        "    print('ready', flush=True); sys.stdin.readline()\n"
        "    time.sleep(0.5)\n"
        "print('well', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin and process.stdout and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(7.0)
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stdout.read() == "well\n"


def test_it_does_not_keep_the_process_alive():
    script = f"from slurmft import WatchdogTimer; WatchdogTimer({NEVER_S}).start()"
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


class Told(WatchdogTimer):
    """As other packages have it: a subclass that says what follows."""

    def __init__(self, timeout_seconds: float = 60, *, error: Exception | None = None) -> None:
        super().__init__(timeout_seconds=timeout_seconds, file=io.StringIO())
        self.calls: queue.Queue[bool] = queue.Queue()
        self.error = error

    def on_timeout(self) -> None:
        self.calls.put(self.active)
        if self.error is not None:
            self.reset()
            raise self.error


def test_a_subclass_says_what_follows(caplog):
    assert WatchdogTimer().timeout_seconds == Told().timeout_seconds == 60
    watchdog = Told(timeout_seconds=SOON_S)
    assert not watchdog.active
    watchdog.start()
    assert watchdog.calls.get(timeout=10) is True
    assert watchdog.calls.empty(), "once, until it is reset"
    watchdog.stop()
    assert not watchdog.active and "WATCHDOG TIMEOUT" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_follows_may_fail_and_the_next_hang_is_seen_too():
    watchdog = Told(SOON_S, error=OSError("no mail was sent"))
    with watchdog:
        for _ in range(3):
            assert watchdog.calls.get(timeout=10)
    assert watchdog.expired
    for thread in (each for each in threading.enumerate() if each.name == "slurmft-watchdog"):
        thread.join(10)
        assert not thread.is_alive()


@of_each(
    arguments__named=[
        ({"timeout_seconds": 0}, "the timeout is 0"),
        ({"timeout_seconds": -5}, "the timeout is -5"),
        ({"timeout_seconds": "60"}, "the timeout is '60'"),
        ({"timeout_seconds": True}, "the timeout is True"),
        ({"timeout_seconds": float("nan")}, "the timeout is nan"),
        ({"timeout": 1, "timeout_seconds": 1}, "are the same"),
        ({"timeout_seconds": 1, "callback": 7}, "cannot be called"),
    ]
)
def test_a_timeout_that_is_none_is_named(arguments, named):
    with pytest.raises(UsageError, match=named):
        WatchdogTimer(**arguments)


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What a handler that was there before has heard."""
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGUSR2, before)


def test_a_signal_is_remembered_once_and_passed_on_and_the_handler_comes_back(heard):
    former = signal.getsignal(signal.SIGUSR2)
    with DistributedSignalHandler(signal.SIGUSR2) as handler:
        assert handler.signals_received() == [False]
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert handler.signals_received() == [True] and handler.signal_received
    assert heard == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR2) is former
    assert handler.release() is False
    with handler:
        assert handler.signals_received() == [False], "entered anew, it has seen nothing"


def test_a_handler_that_was_installed_meanwhile_stays(heard):
    with DistributedSignalHandler(signal.SIGUSR2):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN


def test_pythons_own_interrupt_is_not_raised():
    with DistributedSignalHandler(signal.SIGINT) as handler:
        os.kill(os.getpid(), signal.SIGINT)
        assert handler.signals_received() == [True]


@pytest.mark.parametrize("number", [signal.SIGKILL, 4096, "x"], ids=str)
def test_what_cannot_be_handled_is_refused(number):
    with pytest.raises(UsageError), DistributedSignalHandler(number):
        pass


def test_it_belongs_into_the_main_thread_and_is_entered_once():
    errors: list[Exception] = []

    def enter() -> None:
        try:
            DistributedSignalHandler().__enter__()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    with DistributedSignalHandler() as handler, pytest.raises(UsageError, match="already"):
        handler.__enter__()


THREE_RANKS = """
import os, signal, sys
import torch.distributed as dist
from slurmft import DistributedSignalHandler

children = []
for rank in range(3):
    if (child := os.fork()) == 0:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=3)
        with DistributedSignalHandler(signal.SIGUSR2) as handler:
            before = handler.signals_received()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
            print(f"{before} {handler.signals_received()}\\n", end="", flush=True)
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def test_all_ranks_learn_of_it(tmp_path):
    argv = [sys.executable, "-c", THREE_RANKS, str(tmp_path / "store")]
    output = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True).stdout
    assert output.splitlines() == ["[False, False, False] [False, True, False]"] * 3
