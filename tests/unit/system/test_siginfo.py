"""A blocked signal is delivered as it came, and where that does not work, as the process's own."""

import functools
import signal
import subprocess
import sys

import pytest

from slurmft.trainer.savers import handled_signal

PROGRAM = """
import logging, os, signal, sys
from slurmft.worker.signals import redelivery
logging.basicConfig(format="%(message)s", stream=sys.stdout)
TERM = {signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, TERM)
if (child := os.fork()) == 0:
    deliver = redelivery(signal.SIGTERM, sys.argv[1] or None)
    came = signal.sigwaitinfo(TERM)
    def told(number, frame): print("handled", flush=True)
    signal.signal(signal.SIGTERM, told)
    deliver(came)
    # delivered to a blocked thread it can be read again, with its sender
    signal.pthread_sigmask = lambda *_: None
    deliver(came)
    again = signal.sigtimedwait(TERM, 5)
    print({os.getppid(): "the parent's", os.getpid(): "its own"}[again.si_pid], again.si_code == came.si_code)
    sys.stdout.flush()
    os._exit(0)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run(machine: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, machine], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_it_keeps_its_sender():
    assert run("") == ["handled", "the parent's True", "0"]


@pytest.mark.parametrize("machine", ["sparc"])
def test_where_the_call_is_unknown_it_is_the_process_s_own_and_the_log_says_so(machine):
    first, handled, sender, code = run(machine)
    assert first == "a forwarded SIGTERM will have this process as its sender: rt_tgsigqueueinfo is not known here"
    assert (handled, sender.split()[0], code) == ("handled", "its", "0")


def test_another_call_under_that_number_is_noticed():
    """Where the record were laid out otherwise, or the number of another call, the check at the start sees it."""
    broken = PROGRAM.replace("TERM = {", "from slurmft.worker import signals; signals.CALLS['odd'] = 39\nTERM = {")
    done = subprocess.run([sys.executable, "-c", broken, "odd"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("a forwarded SIGTERM will have this process as its sender")


def test_a_handler_is_known_by_its_frame_and_nothing_else_is():
    seen = list[int | None]()

    class Handler:
        def method(self, number, frame):
            self.inner(number, frame)

        def inner(self, *_arguments):
            seen.append(handled_signal())

    one = Handler()
    for handler in (one.method, one.inner, functools.partial(Handler.method, one)):
        before = signal.signal(signal.SIGUSR2, handler)
        try:
            signal.raise_signal(signal.SIGUSR2)
        finally:
            signal.signal(signal.SIGUSR2, before)
    assert seen == [signal.SIGUSR2] * 3
    one.method(signal.SIGUSR2, None)
    assert seen[3:] == [None] and handled_signal() is None
