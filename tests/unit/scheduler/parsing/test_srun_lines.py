"""srun's and slurmstepd's lines, as several versions write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.policy.judge import StepWords, TaskEnd
from slurmft.scheduler.parsing import MAX_ENDS, MAX_NODES, parse_srun_lines

STEP = """\
slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-21T17:50:29 ***
srun: error: n2: tasks 4-7: Killed
srun: error: n1: task 0: Exited with exit code 16
srun: error: n1: tasks 1-3: Terminated
srun: error: n3: task 8: Segmentation fault (core dumped)
srun: launch/slurm: _step_signal: Terminating StepId=12.0
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
a worker wrote this: Exited with exit code 17
srun: error: Node failure on n3
srun: error: n2: tasks 4-7: Killed
"""


def test_a_steps_lines():
    assert parse_srun_lines(STEP) == StepWords(
        ends=(
            TaskEnd(nodes=("n2",), tasks="4-7", word="Killed"),
            TaskEnd(nodes=("n1",), tasks="0", word="Exited", code=16),
            TaskEnd(nodes=("n1",), tasks="1-3", word="Terminated"),
            TaskEnd(nodes=("n3",), tasks="8", word="Segmentation fault"),
        ),
        failed_nodes=("n3",),
    )


LAUNCH = """\
srun: error: Task launch for StepId=1.0 failed on node n2: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-23T15:27:21 ***
srun: error: n1: task 0: Killed
"""


def test_a_node_that_cannot_be_reached_at_launch_is_not_its_victim():
    """As 22.05 and 24.11 write it."""
    assert parse_srun_lines(LAUNCH).refused == (("n2", "Communication connection failure"),)


@pytest.mark.parametrize(
    "words", ["Job credential revoked", "Invalid job credential", "Slurmd could not execve job", "Invalid job id"]
)
def test_a_launch_that_fails_for_no_fault_of_the_node(words):
    assert parse_srun_lines(f"srun: error: Task launch for StepId=1.0 failed on node n2: {words}").refused == ()


@pytest.mark.parametrize(
    ("line", "nodes"),
    [
        ("srun: error: n[1-2,04]: tasks 0-2: Killed", ("n1", "n2", "04")),
        ("srun: error: gpu-[01-03]: tasks 0,2-3: Killed", ("gpu-01", "gpu-02", "gpu-03")),
        ("0: srun: error: n1: task 0: Killed", ("n1",)),
        ("srun: error: n[1: task 0: Killed", ("n[1",)),
        ("srun: error: n[1-999999999]: task 0: Killed", ("n[1-999999999]",)),
        (f"srun: error: n[1-{MAX_NODES}]: task 0: Killed", None),
    ],
)
def test_which_nodes(line, nodes):
    (end,) = parse_srun_lines(line).ends
    if nodes is None:
        assert len(end.nodes) == MAX_NODES
    elif nodes == ("n1", "n2", "04"):
        assert end.nodes == ("n1", "n2", "n04")
    else:
        assert end.nodes == nodes


@pytest.mark.parametrize(
    ("line", "nodes"),
    [
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
            (),
        ),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0 cgroup. Some of your processes may", ()),
        ("slurmstepd: error: Detected 2 oom-kill event(s) in step 7.batch cgroup.", ()),
        ("slurmstepd-n2: error: Detected 1 oom_kill event in StepId=7.0.", ("n2",)),
        ("slurmstepd: error: Exceeded step memory limit at some point.", ()),
        ("srun: error: n2: task 1: Out Of Memory", ("n2",)),
    ],
)
def test_memory(line, nodes):
    words = parse_srun_lines(line)
    assert (words.oom_somewhere, words.oom_nodes) == (True, nodes)
    assert words.oom_on("n2")
    assert words.oom_on("n1") is (nodes == ())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "srun: error: Unable to create step for job 7: Requested node configuration is not available",
        "srun: error: n1: task 0: ",
        "error: n1: task 0: Killed",
        "he said srun: error: Node failure on n1",
        "my oom_kill event",
        "srun: error: Timed out waiting for job step to complete",
    ],
)
def test_lines_that_say_nothing_of_an_end(line):
    assert parse_srun_lines(line) == StepWords()


def test_endless_output_is_bounded():
    text = "\n".join(f"srun: error: n{number}: task {number}: Killed" for number in range(10_000))
    assert len(parse_srun_lines(text).ends) == MAX_ENDS
    parse_srun_lines("srun: error: n1: task 0: " + " x" * 500_000)


@given(st.lists(st.sampled_from([*STEP.splitlines(), "srun: error: ", "n[1-2", ": task ", "\x00", "oom_kill"])))
def test_any_mixture_is_read(pieces):
    words = parse_srun_lines("\n".join(pieces) + "".join(pieces))
    assert set(words.failed_nodes) <= {"n3"} or "Node failure" in "".join(pieces)
