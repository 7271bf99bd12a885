"""Looks in processes of their own: crashes, hangs, floods and deaths of one are its own."""

import os
import signal
import subprocess
import sys
import time

import pytest
from waiting import slowness, until

from slurmft.system.processes import MAX_ANSWER_BYTES, Errand, run_all


def errand(task, name="it", limit_s=5.0):
    return Errand(name=name, limit_s=limit_s, task=task)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise RuntimeError("no\nsuch luck")


def leave():
    raise SystemExit(0)


def test_answers_come_in_the_order_of_the_errands():
    answers = run_all([errand(lambda number=number: number, str(number)) for number in range(20)], at_once=7)
    assert [(answer.name, answer.value) for answer in answers] == [(str(number), number) for number in range(20)]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        pytest.param(fail, "RuntimeError: no", id="raises"),
        pytest.param(be_killed, "died without an answer", id="is killed"),
        pytest.param(leave, "died without an answer", id="leaves"),
        pytest.param(lambda: os._exit(0), "died without an answer", id="exits"),
        pytest.param(lambda: {1, 2}, "TypeError", id="answers what is no JSON"),
        pytest.param(lambda: "x" * (MAX_ANSWER_BYTES + 10), "died without an answer", id="floods"),
    ],
)
def test_what_crashes_is_told_and_harms_no_other(task, words):
    answers = run_all([errand(task), errand(lambda: "well", "other")])
    assert words in answers[0].error
    assert not answers[0].timed_out
    assert answers[1].value == "well"


def test_what_hangs_is_left_behind_and_the_others_are_not_late():
    began = time.monotonic()
    answers = run_all([errand(lambda: time.sleep(60), "hangs", 0.3), errand(lambda: "well", "other")])
    assert time.monotonic() - began < 5 * slowness()
    assert answers[0].timed_out
    assert answers[0].error == "no answer within 0.3 s"
    assert answers[1].value == "well"


def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.run(["sleep", "60"], check=False)


def test_what_a_hanging_one_has_started_ends_with_it(tmp_path):
    def hang():
        (tmp_path / "pid").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        deaf()

    run_all([errand(hang, limit_s=1.0)])
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not _lives(pid), 5)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stream:
            return stream.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_children_hold_none_of_our_streams_open():
    """Whoever reads our output sees its end although a child was left behind."""
    script = (
        "import time; from slurmft.system.processes import *;"
        "run_all([Errand(name='x', limit_s=0.2, task=lambda: time.sleep(30))]); print('done')"
    )
    began = time.monotonic()

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "done\n"
    assert time.monotonic() - began < 15 * slowness()


def test_no_errands_no_answers():
    assert run_all([]) == []
