"""TERM and SIGKILL at every awkward moment of a worker's life, and with everything a worker may have beside it.

One small trainer (``trainers/moments.py``) is caught at a named moment, on real Slurm, by real signals. Slurm signals
the whole tree of the step's processes here (proctrack/linuxproc), so that loader workers and helpers get it too.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm.conftest import Run, eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
TRAINER = Path(__file__).parent / "trainers" / "moments.py"
STEPS = 12
RANKS = 4


@dataclass
class Caught:
    """A run of the trainer that waits at its moment."""

    run: Run
    job: str
    marks: Path

    def places(self) -> list[tuple[str, str]]:
        """Node and process id of each rank that has reached the moment."""
        return [(words[0], words[1]) for path in self.marks.glob("reached-*") if (words := path.read_text().split())]

    def wait_until_reached(self, ranks: int = 1) -> list[tuple[str, str]]:
        eventually(lambda: len(self.places()) == ranks, 60, lambda: f"the moment\n{self.run.story()}")
        return self.places()

    def go_on(self) -> None:
        (self.marks / "go").touch()

    def term(self) -> None:
        """From Slurm, to the whole step; the moment lasts until the stop is known."""
        self.run.lab.run(["scancel", "--signal=TERM", self.job])
        self.run.wait_for("stop requested")
        self.go_on()


@pytest.fixture
def catch(new_run: NewRun, request: pytest.FixtureRequest) -> Callable[..., Caught]:
    """Submit the trainer with options of its own."""

    def submit(*options: str) -> Caught:
        run = new_run(re.sub(r"\W+", "-", request.node.name.removeprefix("test_")).strip("-"))
        marks = run.path.with_name(f"{run.path.name}-marks")
        marks.mkdir()
        os.chown(marks, run.lab.uid, run.lab.gid)
        run.configure(command=command(marks, *options), checkpoint={"interval_steps": 5, "async_save": False})
        return Caught(run, run.submit(), marks)

    return submit


def command(marks: Path, *options: str) -> list[str]:
    return ["python", str(TRAINER), "--marks", str(marks), "--steps", str(STEPS), *options]


@pytest.fixture(scope="module")
def alone(lab: Lab) -> str:
    """The digest of the weights after the same training, left alone; it depends on no option but the steps."""
    run = Run(lab, lab.home / "moments-alone")
    config = {"command": command(run.path), "run_folder": str(run.path), "nodes": 2, "nproc_per_node": 2}
    run.path.with_suffix(".yaml").write_text(json.dumps(config))
    run.submit()
    run.wait_until_done()
    return run.digest()


def saves(run: Run) -> list[int]:
    """Every step that was saved, in order, as the lead tells."""
    return [int(step) for step in re.findall(r" saved step (\d+) in ", run.output())]


def assert_nothing_is_left(run: Run) -> None:
    """No process of the user on any node."""
    names: dict[str, str] = {}

    def none_left() -> bool:
        for node in run.lab.nodes:
            found = run.lab.run_on_as_admin(node, ["pgrep", "-u", str(run.lab.uid), "-a", "."], check=False)
            names[node] = found.stdout
        return not any(names.values())

    eventually(none_left, 20, lambda: f"no process left: {names}")


def assert_one_stop(run: Run, job: str, digest: str, *, saved: set[int]) -> int:
    """One request, one save, one requeue; the step that was saved."""
    story = run.story()
    assert len(run.events("stop requested")) == 1, story
    assert not run.events("worker failed"), story
    assert not run.events("stop without a save"), story
    verdict = run.events("verdict")[0].details
    assert verdict["cause"] == "signalled", story
    assert verdict["reason"].endswith(f"all ranks stopped at step {verdict['saved_step']}"), story
    assert verdict["saved_step"] == verdict["last_step"], story
    assert verdict["saved_step"] in saved, story
    assert len(run.events("requeued")) == 1, story
    assert len(run.events("attempt started")) == 2, story
    assert run.folder.jobs() == [job], story
    assert run.events("first step")[1].details["resumed_from"] == verdict["saved_step"], story
    assert saves(run) == sorted({1, 5, 10, STEPS, verdict["saved_step"]}), run.output()
    assert run.digest() == digest
    return int(verdict["saved_step"])


MOMENTS = [
    pytest.param(["--at", "forward", "--step", "0"], {1}, id="the first forward pass", marks=pytest.mark.soak),
    pytest.param(["--at", "data"], {7}, id="a sample that takes long", marks=pytest.mark.soak),
    pytest.param(
        ["--at", "data", "--workers", "fork"], set(range(2, 8)), id="a sample that takes long in a loader worker"
    ),
    pytest.param(["--at", "evaluation", "--step", "8"], {9}, id="one rank's evaluation", marks=pytest.mark.soak),
    pytest.param(["--at", "write", "--step", "5"], {5}, id="a save, writing", marks=pytest.mark.soak),
    pytest.param(["--at", "commit", "--step", "5", "--rank", "0"], {5}, id="a save, before its marker"),
]


@pytest.mark.long
@pytest.mark.parametrize(("options", "saved"), MOMENTS)
def test_a_term_during(catch: Callable[..., Caught], alone: str, options: list[str], saved: set[int]) -> None:
    caught = catch(*options)
    caught.wait_until_reached()
    caught.term()
    caught.run.wait_until_done()
    assert_one_stop(caught.run, caught.job, alone, saved=saved)
    assert_nothing_is_left(caught.run)


@pytest.mark.long
def test_a_term_when_all_ranks_evaluate(catch: Callable[..., Caught], alone: str) -> None:
    """They stop at its next batch, and the resumed run repeats it."""
    caught = catch("--at", "evaluation", "--step", "8", "--rank", "-1")
    caught.wait_until_reached(RANKS)
    caught.term()
    caught.run.wait_until_done()
    assert_one_stop(caught.run, caught.job, alone, saved={8})


def test_a_term_when_a_rank_has_not_come_to_the_rendezvous(catch: Callable[..., Caught], alone: str) -> None:
    caught = catch("--at", "start-up", "--step", "0")
    caught.wait_until_reached()
    caught.run.lab.run(["scancel", "--signal=TERM", caught.job])
    caught.run.wait_for("requeued")
    caught.go_on()
    caught.run.wait_until_done()
    verdict = caught.run.events("verdict")[0].details
    assert (verdict["cause"], verdict["last_step"], verdict.get("saved_step")) == ("signalled", 0, None)
    assert not caught.run.events("stop without a save"), "there was nothing to lose"
    assert len(caught.run.events("requeued")) == 1
    assert saves(caught.run) == [1, 5, 10, STEPS]
    assert caught.run.digest() == alone


@pytest.mark.soak
def test_a_term_before_there_are_workers(catch: Callable[..., Caught], alone: str) -> None:
    caught = catch()
    run = caught.run
    eventually(lambda: f"{caught.job}.0" in run.lab.run(["squeue", "-h", "-s", "-j", caught.job]).stdout, 30, "a step")
    run.lab.run(["scancel", "--signal=TERM", caught.job])
    run.wait_until_done()
    assert run.events("verdict")[0].details["cause"] == "signalled", run.story()
    assert len(run.events("requeued")) == 1, run.story()
    assert saves(run) == [1, 5, 10, STEPS]
    assert run.digest() == alone


def test_a_term_that_only_one_agent_gets_before_it_has_reported(catch: Callable[..., Caught], alone: str) -> None:
    """srun waits for the other agents, which wait for the supervisor, which waits for this one."""
    caught = catch()
    run = caught.run
    kill_at_once = "until pkill -TERM -f '[s]lurmft agent'; do :; done"
    run.lab.run_on_as_admin("n2", ["timeout", "30", "bash", "-c", kill_at_once])
    run.wait_until_done()
    assert run.events("verdict")[0].details["cause"] == "signalled", run.story()
    assert len(run.events("requeued")) == 1, run.story()
    assert run.events("agents ready")[0].attempt.endswith(".1.0"), run.story()
    assert run.digest() == alone


def test_a_term_in_the_last_save_lets_it_finish(catch: Callable[..., Caught], alone: str) -> None:
    caught = catch("--at", "write", "--step", str(STEPS))
    caught.wait_until_reached()
    caught.term()
    caught.run.wait_until_done()
    run = caught.run
    run.wait_until_out_of_queue(caught.job)
    assert run.events("verdict")[-1].details["cause"] == "finished", run.story()
    assert not run.events("requeued"), run.story()
    assert saves(run) == [1, 5, 10, STEPS]
    assert run.digest() == alone


COMPANY = [
    pytest.param(["--workers", "fork", "--helpers", "fork", "--handler"], ["fork"], id="fork"),
    pytest.param(
        ["--workers", "spawn", "--helpers", "spawn", "programs"],
        ["spawn"],
        id="spawn and programs",
        marks=pytest.mark.soak,
    ),
    pytest.param(
        ["--workers", "forkserver", "--helpers", "forkserver"], ["forkserver"], id="forkserver", marks=pytest.mark.soak
    ),
]


@pytest.mark.parametrize(("options", "methods"), COMPANY)
def test_a_term_between_two_steps_harms_nothing_that_a_worker_has_started(
    catch: Callable[..., Caught], alone: str, options: list[str], methods: list[str]
) -> None:
    caught = catch("--at", "between", *options)
    caught.wait_until_reached()
    caught.term()
    caught.run.wait_until_done()
    step = assert_one_stop(caught.run, caught.job, alone, saved={7, 8})
    output = caught.run.output(rank=1)
    assert f"saved step {step} with loader workers [True, True]" in output
    assert output.count("helper: True, alive until told") == 2 * len(methods), "in each attempt"
    assert output.count("helper: ended with 0") == 2 * len(methods)
    if "programs" in options:
        assert output.count("programs: ended with 0 and -15") == 2, output
    if "--handler" in options:
        for rank in range(RANKS):
            assert "user's handler: signal 15" in caught.run.output(rank), f"rank {rank}"
    assert_nothing_is_left(caught.run)


def kill_one(caught: Caught) -> None:
    ((node, pid),) = caught.places()
    caught.run.lab.run_on_as_admin(node, ["kill", "-9", pid])


def kill_node(caught: Caught) -> None:
    """All ranks of one node at once; their agent lives."""
    node = caught.places()[0][0]
    pids = [pid for place, pid in caught.places() if place == node]
    assert len(pids) == 2
    caught.run.lab.run_on_as_admin(node, ["kill", "-9", *pids])


KILLS: list[Any] = [
    pytest.param(["--at", "write"], 1, kill_one, id="one rank that writes", marks=pytest.mark.soak),
    pytest.param(["--at", "commit", "--rank", "0"], 1, kill_one, id="the lead before the marker"),
    pytest.param(["--at", "write", "--rank", "-1"], RANKS, kill_node, id="all ranks of a node", marks=pytest.mark.soak),
]


@pytest.mark.long
@pytest.mark.parametrize(("options", "ranks", "kill"), KILLS)
def test_a_kill_inside_a_save(
    catch: Callable[..., Caught], alone: str, options: list[str], ranks: int, kill: Callable[[Caught], None]
) -> None:
    """The save at step 10; the checkpoint of step 5 continues."""
    caught = catch("--step", "10", *options)
    run = caught.run
    caught.wait_until_reached(ranks)
    checkpoints = run.path / "checkpoints"
    committed = {path.parent.name[:13] for path in checkpoints.glob("step-*/manifest.json")}
    assert committed == {"step-00000001", "step-00000005"}
    kill(caught)
    caught.go_on()
    run.wait_until_done()
    verdict = run.events("verdict")[0].details
    assert (verdict["cause"], verdict["saved_step"]) == ("signal crash", 5), run.story()
    assert len(run.events("requeued")) == 1, run.story()
    assert run.events("first step")[1].details["resumed_from"] == 5
    assert saves(run) == [1, 5, 10, STEPS]
    assert all((path / "manifest.json").exists() for path in checkpoints.glob("step-*"))
    assert run.digest() == alone
    assert_nothing_is_left(run)
