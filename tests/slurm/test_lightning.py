"""Lightning scripts without a line of slurmft: a TERM at any moment, one save, one requeue, the same weights."""

import importlib.util
import random
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from slurm.conftest import Run, eventually
from slurm.stop_soak import HURRY, START_S, STOPS_PER_RUN, Book, stop_at_random_moments
from slurmft.integrations.folders import COMPLETE_MARKER
from slurmft.lab.cluster import Lab

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="pip install lightning"),
]

NewRun = Callable[..., Run]
TRAINER = Path(__file__).parent / "trainers" / "plain_lightning.py"
STEPS = 24
"""Optimizer steps, in three epochs with a validation each; two batches make a step."""


@pytest.fixture
def new_lightning(lab: Lab, new_run: NewRun) -> Iterator[NewRun]:
    script = lab.home / TRAINER.name
    shutil.copy(TRAINER, script)  # where the lab's user may read it

    def make(name: str, *options: str, delay: float = 0.15) -> Run:
        root = lab.home / "lightning" / name
        command = ["python", str(script), "--root", str(root), "--samples", "256", "--accumulate", "2"]
        return new_run(name, command=[*command, "--step-delay", str(delay), *options], checkpoint={"interval_steps": 5})

    yield make


@pytest.fixture
def undisturbed(new_lightning: NewRun) -> str:
    run = new_lightning("lightning-undisturbed", delay=0.0)
    run.submit()
    run.wait_until_done(START_S)
    return run.digest()


def steps_saved(run: Run) -> dict[int, bool]:
    """Step of each save that is there, and whether it is marked."""
    folders = sorted((run.path / "checkpoints" / "lightning" / "fit-1").iterdir())
    return {int(folder.name[5:20]): (folder / COMPLETE_MARKER).exists() for folder in folders}


def disturb(lab: Lab, run: Run, stops: int, dice: random.Random) -> list[int]:
    """Submit it, send it ``stops`` TERMs at random moments, and wait for its end; the steps it stopped at."""
    job = run.submit()
    for number in range(1, stops + 1):
        run.wait_for("first step", number, START_S)
        time.sleep(dice.uniform(0.0, 0.6))
        if run.folder.done() is not None:
            break
        lab.run(["scancel", "--signal=TERM", dice.choice(["--full", "--batch"]), job], check=False)
        eventually(lambda n=number: len(run.events("verdict")) >= n, 150, run.story)
    run.wait_until_done(START_S)
    *verdicts, end = [event.details for event in run.events("verdict")]
    assert end["last_step"] == STEPS, run.story()
    found = [one["last_step"] for one in verdicts]
    assert [one.get("saved_step") for one in verdicts] == found, "each stop has saved the step it stopped at"
    assert found == sorted(set(found)), "each start went on behind the last one"
    assert run.output().count("going on from") == len(found)
    assert len(run.events("requeued")) == len(found), run.story()
    assert run.folder.jobs() == [job]
    return found


@pytest.mark.soak
def test_terms_at_random_moments(lab: Lab, new_lightning: NewRun, undisturbed: str) -> None:
    """With Lightning's own environment of Slurm and its requeueing asked for: ours alone saves and requeues."""
    run = new_lightning("lightning-terms", "--slurm-plugin")
    assert disturb(lab, run, 2, random.Random(20542)), "no TERM came before the end"
    assert run.digest() == undisturbed
    root = lab.home / "lightning" / "lightning-terms"
    assert "requeing job" not in run.output(), "Lightning's own handler is off"
    assert [path.name for path in root.iterdir()] == ["best"], "no hpc_ckpt of Lightning's own"
    assert (root / "best" / "last.ckpt").is_file(), "what the script saves itself is there"
    assert all(steps_saved(run).values())


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_100_terms_at_random_moments(lab: Lab, new_lightning: NewRun) -> None:
    """Goes on where it ended, with a run of its own for every twenty of them."""
    book = Book("lightning")
    epochs = ("--epochs", "12")
    versions = f"lightning {version('lightning')} torch {version('torch')} {epochs[1]} epochs"

    def calm() -> str:
        run = new_lightning("lightning-soak-calm", *epochs, delay=0.0)
        run.submit()
        run.wait_until_done(START_S)
        return run.digest()

    undisturbed = book.calm_digest(versions, calm)
    for seed, missing in book.seeds_until_done():
        run = new_lightning(f"lightning-soak-{seed}", *epochs)
        run.configure(fault_tolerance={"preload": ["lightning.pytorch"]})

        def check(step: int, run: Run = run) -> None:
            assert steps_saved(run)[step], run.story()

        steps = stop_at_random_moments(
            run, random.Random(seed), stops=min(missing, STOPS_PER_RUN), longest_s=1.2, check=check,
            hurry=lab.home / "lightning" / run.path.name / HURRY,
        )  # fmt: skip
        assert run.output().count("going on from") == len(steps)
        assert run.digest() == undisturbed, f"seed {seed}: {run.story()}"
        book.add(seed, undisturbed[:12], steps)
