"""Ends of logs, each with its label: what is a symptom, and that our own lines never are."""

import io
import logging
import signal

import pytest
from log_endings import LABELS, log_endings
from of_each import of_each

from slurmft.policy.judge import Circumstances, WorkerEnd, judge
from slurmft.policy.judge import Testimony as Heard
from slurmft.policy.symptoms import cause_of_text, last_words, words_of_end
from slurmft.policy.verdict import Cause
from slurmft.supervisor.observations import report_of_text
from slurmft.worker.session import log_with_rank

ENDINGS = log_endings()
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited"
OURS = "slurmft rank 1: collective timeouts after the first step: {'default': 61.2}"


def test_endings_are_what_they_are_labelled():
    assert {each.name: found for each in ENDINGS if (found := each.found()) != each.label} == {}


def test_the_corpus_is_large_and_has_all_kinds():
    assert len(ENDINGS) >= 120
    assert {ending.label for ending in ENDINGS} == set(LABELS)
    assert sum(ending.name.startswith("our") for ending in ENDINGS) >= 15


def test_a_crash_behind_a_line_of_ours_is_a_crash():
    """It was judged a communication error, with evidence against its node."""
    report = report_of_text(f"step 1\n{OURS}\n", source="log", rank=1, node="n1", log=True)
    assert report.message == "step 1"
    end = WorkerEnd(rank=1, node="n1", code=-signal.SIGABRT)
    verdict = judge([end], world_size=2, seen=Circumstances(heard=Heard(reports=(report,))))
    assert verdict.cause is Cause.SIGNAL_CRASH


@of_each(ending=[each for each in ENDINGS if each.label != "none"])
def test_lines_of_ours_around_a_symptom_change_nothing(ending):
    for text in (f"{ending.text}\n{OURS}\n", f"{OURS}\n{ending.text}"):
        assert report_of_text(text, source="log", rank=0, node="n1", log=True).cause is LABELS[ending.label]


def test_the_cause_of_an_exception_of_ours_counts():
    text = f"Traceback (most recent call last):\n{NCCL}\n\nThe above exception was the direct cause of the following "
    text += "exception:\n\nTraceback (most recent call last):\nslurmft.errors.CheckpointError: rank 3: socket timeout\n"
    assert cause_of_text(text) is Cause.COMMUNICATION_ERROR
    assert last_words(text) == "slurmft.errors.CheckpointError: rank 3: socket timeout"


TRACE, READY = "Traceback (most recent call last):\n", "slurmft: the engine: exit code 1, before it was ready"
ENDS = (
    (f"{TRACE}FileNotFoundError: /m.pt\n{TRACE}RuntimeError: a worker failed to start\n{READY}\n",
     f"{READY}: FileNotFoundError: /m.pt; RuntimeError: a worker failed to start"),
    (f"(Core pid=5) ERROR 10-15 08:32:29 [core.py:708] {TRACE}(Core pid=5) ERROR 10-15 08:32:29 [core.py:708] "
     f"ValueError: too long\n(API pid=1) {TRACE}(API pid=1) RuntimeError: see root cause above\n{READY}\n",
     f"{READY}: ValueError: too long; RuntimeError: see root cause above"),
    (f"0.1 I srv: loading\n0.2 E gguf: failed to open '/m' (No such file)\n0.3 I srv: bye\n{READY}",
     f"{READY}: 0.2 E gguf: failed to open '/m' (No such file); 0.3 I srv: bye"),
    ("error: invalid argument: --nope\n" + READY, f"{READY}: error: invalid argument: --nope"),
    (f"{TRACE}KeyError: 1\n{READY}\n{READY}", READY),
    (f"an error of a life that was ended\nslurmft: the engine starts: x\nbad word\n{READY}", f"{READY}: bad word"),
    ("slurmft: it needs aiohttp\n  hint: pip install aiohttp\n", "slurmft: it needs aiohttp hint: pip install aiohttp"),
    ("", ""),
)  # fmt: skip


@pytest.mark.parametrize(("log", "told"), ENDS)
def test_an_engines_end_is_told_by_its_own_words_of_this_life(log, told):
    assert words_of_end(log) == told


@pytest.fixture
def fresh_logging(monkeypatch):
    """Logging as a new process has it."""
    root = logging.getLogger()
    handlers = root.handlers
    root.handlers = []
    monkeypatch.setenv("RANK", "3")
    yield root
    root.handlers = handlers


@pytest.mark.parametrize(
    "form", [None, "%(message)s", "%(asctime)s %(levelname)s [%(name)s] %(message)s", '{"text": "%(message)s"}']
)
def test_what_we_log_in_a_worker_is_marked_through_every_format(fresh_logging, monkeypatch, form):
    fresh_logging.handlers = []  # pytest adds its own to each test
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    if form is not None:
        logging.basicConfig(format=form, stream=written, level=logging.INFO)
    log_with_rank()
    log_with_rank()
    words = "collective timeouts after the first step: %s"
    logging.getLogger("slurmft.worker.session").warning(words, "{'default': 61.2}")
    [line] = written.getvalue().splitlines()
    assert line.count("slurmft rank 3: ") == 1
    assert cause_of_text(line) is cause_of_text(line) is None
    logging.getLogger("mine").warning(words, "{'default': 61.2}")
    assert "slurmft" not in written.getvalue().splitlines()[1]
    assert cause_of_text(written.getvalue()) is Cause.COMMUNICATION_ERROR, "the trainer's own words may be a symptom"


NCCLS_WORDS = (
    "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error, NCCL version 2.21.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
    "Last error:\nsocketPollConnect: Connect to 10.0.0.1 timed out"
)


def own_log(monkeypatch, form, say):
    """What a worker's log holds after our logger has said something."""
    written = io.StringIO()
    logging.getLogger().handlers = []
    monkeypatch.setattr("sys.stderr", written)
    if form is not None:
        logging.basicConfig(format=form, stream=written, level=logging.INFO)
    log_with_rank()
    say(logging.getLogger("slurmft.worker.session"))
    return f"step 1\n{written.getvalue()}"


def say_words(log):
    log.warning("communicators are left to the end of the process: %s", RuntimeError(NCCLS_WORDS))


def say_broken_words(log):
    log.warning("a store is gone: %s", "it said\rConnection reset by peer")


def say_exception(log):
    try:
        raise ConnectionResetError(104, "Connection reset by peer")
    except OSError:
        log.exception("step 5 was not copied")


@pytest.mark.parametrize("form", [None, "%(asctime)s %(levelname)s %(message)s", "\x1b[33m%(message)s\x1b[0m"])
@pytest.mark.parametrize("say", [say_words, say_broken_words, say_exception])
def test_each_line_of_what_we_log_is_marked(fresh_logging, monkeypatch, form, say):
    text = own_log(monkeypatch, form, say)
    assert len(text.splitlines()) > 2
    report = report_of_text(text, source="log", rank=3, node="n1", log=True)
    assert (report.cause, report.message, report.traceback) == (Cause.WORKER_ERROR, "step 1", "")


def test_a_trainers_exception_between_lines_of_ours_is_found(fresh_logging, monkeypatch):
    ours = own_log(monkeypatch, None, say_exception)
    theirs = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{NCCL}\n'
    report = report_of_text(f"{ours}{theirs}{ours}", source="log", rank=3, node="n1", log=True)
    assert (report.cause, report.message) == (Cause.COMMUNICATION_ERROR, NCCL)
