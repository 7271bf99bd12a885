"""Wrong results: computed again in place, then on different nodes; who is to blame is on the exclusion list."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm.conftest import Run
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
TRAINER = ["python", str(Path(__file__).parent / "trainers" / "rerun.py"), "--steps", "12"]


@pytest.fixture
def validated(new_run: NewRun, request: pytest.FixtureRequest) -> Callable[..., Run]:
    """A run of 2 nodes x 1 rank whose results are validated; its exclusion list is its own."""

    def make(*options: str, **rerun: Any) -> Run:
        run = new_run(
            re.sub(r"\W+", "-", request.node.name.removeprefix("test_")).strip("-"), nproc_per_node=1,
            command=[*TRAINER, *options], rerun=rerun, checkpoint={"interval_steps": 5},
        )  # fmt: skip
        run.configure(exclusions={"path": str(run.path.with_suffix(".exclusions"))})
        return run

    return make


@pytest.fixture(scope="module")
def clean(lab: Lab) -> str:
    """The digest of the same training without any error."""
    run = Run(lab, lab.home / "reruns-clean")
    config = {"command": TRAINER, "run_folder": str(run.path), "nodes": 2, "nproc_per_node": 1}
    run.config.write_text(json.dumps(config))
    run.submit()
    run.wait_until_done()
    return run.digest()


def kinds(run: Run) -> list[tuple[str, str]]:
    return [(event.details["kind"], event.details["node"]) for event in run.events("evidence")]


def standing(run: Run) -> dict[str, str]:
    """State of each node on the run's exclusion list."""
    text = run.slurmft("exclude", "list", "--json", "--file", str(run.path.with_suffix(".exclusions")))
    return {node["node"]: node["state"] for node in json.loads(text)["nodes"]}


@pytest.mark.long
def test_a_node_that_computes_wrong_is_convicted_and_the_run_goes_on_elsewhere(
    validated: Callable[..., Run], clean: str
) -> None:
    run = validated("--nan-on", "n1")
    job = run.submit()
    run.wait_until_done()
    story = run.story()
    starts = run.events("attempt started")
    assert [event.attempt for event in starts] == [f"{job}.0.0", f"{job}.1.0"], story
    assert starts[0].details["nodes"] == "n[1-2]", story
    assert "n1" not in starts[1].details["nodes"], story
    verdict = run.events("verdict")[0].details
    assert (verdict["cause"], verdict["exit_code"], verdict["rerun"]) == ("rerun elsewhere", 16, "undecided"), story
    assert kinds(run) == [("rerun undecided", "n1"), ("rerun persistent", "n1")], story
    assert standing(run) == {"n1": "excluded"}, story
    why = run.slurmft("exclude", "why", "n1", "--file", str(run.path.with_suffix(".exclusions")))
    assert "rerun persistent" in why, why
    assert run.digest() == clean


@pytest.mark.long
def test_a_transient_error_costs_one_rerun_in_place(validated: Callable[..., Run], clean: str) -> None:
    run = validated(error_injection_step=4, error_injection_type="transient_error", error_injection_rank=1)
    run.submit()
    run.wait_until_done()
    story = run.story()
    assert len(run.events("attempt started")) == 1, story
    assert [kind for kind, _ in kinds(run)] == ["rerun transient"], story
    assert set(standing(run).values()) == {"probation"}, story
    assert run.digest() == clean


@pytest.mark.soak
def test_a_result_that_is_the_same_everywhere_acquits_the_node(validated: Callable[..., Run]) -> None:
    run = validated(error_injection_step=4, error_injection_type="correct_result", error_injection_rank=0)
    job = run.submit()
    run.wait_until_out_of_queue(job, within_s=120)
    story = run.story()
    assert len(run.events("attempt started")) == 2, story
    last = run.events("verdict")[-1].details
    assert (last["cause"], last["exit_code"], last["rerun"]) == ("result validation failed", 17, "correct"), story
    assert run.events("decision")[-1].details["exit_code"] == 17, story
    assert kinds(run) == [("rerun undecided", "n1"), ("rerun acquitted", "n1")], story
    assert standing(run).get("n1", "free") == "free", story
    assert run.folder.done() is None, story
