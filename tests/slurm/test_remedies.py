"""What a run changes about itself before it is tried again: real runs, on this machine and on a cluster."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import Run
from slurm.test_local import LocalRun

pytestmark = pytest.mark.timeout(400)
FRAIL = Path(__file__).parent / "trainers" / "frail.py"


def frail(path: Path, *options: str, **changes: object) -> LocalRun:
    command = ["python", str(FRAIL), "--steps", "12", "--micro-batch", "2", *options]
    # its steps are so fast that none would be on disk when it dies; and it dies of what is on disk
    saves = {"interval_steps": 4, "async_save": False, "just_in_time": False}
    config = {"nodes": 1, "checkpoint": saves, "fault_tolerance": {"poison_after": 2}}
    return LocalRun(path, **{"command": command, **config, **changes})


def weights(run: LocalRun) -> str:
    found = re.findall(r"^final weights sha256: (\w+)", output(run), re.MULTILINE)
    assert len(found) == 1, run.story() + output(run)
    return str(found[0])


def output(run: LocalRun, rank: int = 0) -> str:
    paths = sorted(run.folder.attempts.glob(f"*/rank-{rank}.log"), key=lambda path: path.stat().st_mtime)
    return "".join(path.read_text() for path in paths)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the same training, left alone."""
    run = frail(tmp_path_factory.mktemp("remedies") / "undisturbed")
    run.submit("--wait")
    return weights(run)


def test_a_batch_that_does_not_fit_is_computed_in_smaller_pieces(tmp_path: Path, undisturbed: str) -> None:
    """Too large at the first step, twice: all steps were computed in the same pieces, so the weights are the same."""
    run = frail(tmp_path / "reduced", "--micro-batch", "8", "--fits", "2", oom={"action": "reduce_batch"})
    run.submit("--wait")
    assert [event.details["micro_batches"] for event in run.events("batch reduced")] == [[4], [2]], run.story()
    assert {event.details["cause"] for event in run.events("verdict")[:2]} == {"out of host memory"}
    assert weights(run) == undisturbed


@pytest.mark.soak
def test_a_batch_that_cannot_be_smaller_ends_the_run(tmp_path: Path) -> None:
    run = frail(
        tmp_path / "too-large", "--micro-batch", "8", "--fits", "1", oom={"action": "reduce_batch", "min_batch": 3}
    )
    run.submit("--wait", check=False)
    decision = run.events("decision")[-1].details
    assert (decision["action"], decision["exit_code"]) == ("stop", 93), run.story()
    assert "the micro-batch of 4 samples could next be 2, below oom.min_batch=3" in decision["reason"]


def test_a_checkpoint_from_which_the_run_dies_is_given_up(tmp_path: Path, undisturbed: str) -> None:
    """There is one machine only, so nobody can say that it is the node."""
    run = frail(tmp_path / "poisoned", "--dies-from", "8", "--fails-at", "9")
    run.submit("--wait")
    quarantined = [event.details for event in run.events("checkpoint quarantined")]
    assert [details["step"] for details in quarantined] == [8], run.story()
    assert [event.details["resumed_from"] for event in run.events("first step")] == [0, 4], run.story()
    assert (run.folder.path / "checkpoints" / quarantined[0]["checkpoint"] / "quarantined.json").exists()
    told = run.slurmft("explain", str(run.folder.path)).stdout
    assert "checkpoint quarantined" in told and "2 attempts have died from step-00000008" in told
    assert weights(run) == undisturbed


@pytest.mark.soak
def test_without_an_earlier_checkpoint_it_ends(tmp_path: Path) -> None:
    run = frail(tmp_path / "only-one", "--dies-from", "4", "--fails-at", "5")
    run.submit("--wait", check=False)
    decision = run.events("decision")[-1].details
    assert (decision["action"], decision["exit_code"]) == ("stop", 93), run.story()
    assert "there is no other checkpoint, and fault_tolerance.poison_from_scratch is false" in decision["reason"]


@pytest.mark.soak
@pytest.mark.slurm
def test_a_checkpoint_is_tried_on_another_node_before_it_is_given_up(new_run: Callable[..., Run]) -> None:
    command = ["python", str(FRAIL), "--steps", "12", "--dies-from", "8", "--fails-at", "9"]
    run = new_run(command=command, nodes=1, nproc_per_node=1,
                  checkpoint={"interval_steps": 4, "async_save": False, "just_in_time": False},
                  fault_tolerance={"num_in_job_restarts": 3, "poison_after": 2})  # fmt: skip
    run.submit()
    run.wait_until_done()
    nodes = [event.details["nodes"][0] for event in run.events("checkpoint tried")]
    assert len(nodes) == 3 and nodes[0] == nodes[1] != nodes[2], run.story()
    repeated = [event.details for event in run.events("evidence") if event.details["kind"] == "repeated death"]
    assert [details["node"] for details in repeated] == nodes[:1], run.story()
    assert [event.details["step"] for event in run.events("checkpoint quarantined")] == [8], run.story()
    assert [event.details["resumed_from"] for event in run.events("first step")] == [0, 4], run.story()
