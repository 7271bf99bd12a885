"""Ranks that stand still, on a real cluster: the right one is named, with its section, and the run goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import Run
from slurmft.lab.cluster import Lab
from slurmft.storage.journal import Event

pytestmark = pytest.mark.slurm

TRAINER = ["python", str(Path(__file__).parent / "trainers" / "hangs.py")]
STEPS = 100
LIMITS = {"num_warmup_iterations": 3, "num_in_job_restarts": 3}


@pytest.fixture
def trained(new_run: Callable[..., Run]) -> Callable[..., Run]:
    """A run, submitted."""

    def start(*options: str, save_every: int = 10, **limits: object) -> Run:
        run = new_run(
            command=[*TRAINER, "--steps", str(STEPS), *options], checkpoint={"interval_steps": save_every},
            fault_tolerance=LIMITS | limits,
        )  # fmt: skip
        run.submit()
        return run

    return start


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    """Of runs of the same training, whatever happened to them."""
    return {}


def ended_alike(run: Run, digests: dict[str, str]) -> None:
    run.wait_until_done()
    digests[run.path.name] = run.digest()
    assert len(set(digests.values())) == 1, digests


def hung(run: Run) -> Event:
    event = run.wait_for("worker hung", within_s=45)
    assert len(run.events("worker hung")) == 1
    return event


def test_a_healthy_run_with_tight_limits_sees_no_alarm(trained: Callable[..., Run], digests: dict[str, str]):
    run = trained(
        rank_section_timeouts="setup:60,step:3,checkpointing:10,load:2,forward:2.5", rank_out_of_section_timeout=20,
        initial_rank_heartbeat_timeout=60, rank_heartbeat_timeout=10,
    )  # fmt: skip
    ended_alike(run, digests)
    assert run.events("worker hung") == []
    assert len(run.events("workers started")) == 1


@pytest.mark.parametrize(
    ("options", "limits", "section", "limit_s"),
    [
        pytest.param(["--hang", "nested"], {"rank_section_timeouts": {"forward": 3, "load": 1000}}, "forward", 3,
                     id="in a nested section whose own limit is generous", marks=pytest.mark.soak),
        pytest.param(["--hang", "step", "--rank", "1"], {"rank_section_timeouts": "step:3"}, "step", 3, id="in a step"),
        pytest.param(["--hang", "start", "--rank", "3"], {"initial_rank_heartbeat_timeout": 6}, "start-up", 6,
                     id="before the first call"),
    ],
)  # fmt: skip
def test_the_rank_that_hangs_is_named_and_the_run_goes_on(
    trained: Callable[..., Run], digests: dict[str, str], options: list[str], limits: dict[str, object], section: str,
    limit_s: float,
):  # fmt: skip
    run = trained(*options, **limits)
    event = hung(run).details
    rank = int(options[-1]) if "--rank" in options else 2
    hosts = run.wait_for("agents ready").details["hosts"]
    assert (event["rank"], event["node"]) == (rank, hosts[rank // 2]), run.story()
    assert (event["section"], event["limit_s"]) == (section, limit_s)
    assert limit_s - 0.01 < event["held_s"] < limit_s + 0.3, run.story()
    ended_alike(run, digests)
    verdict = next(each.details for each in run.events("verdict"))
    assert (verdict["cause"], verdict["rank"]) == ("hang", rank), run.story()


@pytest.mark.long
def test_a_rank_that_was_stopped_is_named(trained: Callable[..., Run], lab: Lab, digests: dict[str, str]):
    run = trained(rank_section_timeouts={"step": 3}, save_every=1000)  # in a save, it would hang in that section
    run.wait_for_step(20)
    pid = run.output(rank=2).partition("process ")[2].split()[0]
    lab.run_on_as_admin(run.wait_for("agents ready").details["hosts"][1], ["kill", "-STOP", pid])
    event = hung(run).details
    assert (event["rank"], event["section"]) == (2, "step"), run.story()
    assert "stopped" in event["reason"]
    ended_alike(run, digests)
