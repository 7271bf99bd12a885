"""Hugging Face's Trainer on the lab, with two lines for slurmft: real stops, and the weights of an undisturbed run."""

import importlib.metadata
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from extras import needs

from slurm.conftest import Run
from slurm.stop_soak import HURRY, STOPS_PER_RUN, Book, stop_at_random_moments
from slurmft.integrations.folders import FINISHED_MARKER, finished_steps
from slurmft.lab.cluster import Lab

pytestmark = [needs("transformers"), pytest.mark.slurm, pytest.mark.timeout(900)]

NewRun = Callable[..., Run]
TRAINER = ["python", str(Path(__file__).parent / "trainers" / "hf_trainer.py")]
STEPS = 40
"""Of 8 epochs with 5 steps each."""


def training(new_run: NewRun, name: str, *options: str, delay: float = 0.1, **changes: object) -> Run:
    run = new_run(name)
    run.configure(command=[*TRAINER, f"--output={run.path}/out", f"--delay={delay}", "--epochs=8", *options], **changes)
    return run


def term(run: Run) -> None:
    """What Slurm sends at a preemption: TERM to the job."""
    run.lab.run(["scancel", "--batch", "--signal=TERM", run.folder.jobs()[-1]])


def stop_at(run: Run, number: int, steps: random.Random) -> int:
    """TERM at a random step of what is left; returns the step at which all ranks have saved."""
    started = run.wait_for("attempt started", number)
    assert started
    now = (run.folder.progress() or {}).get("step") or 0
    run.wait_for_step(now + steps.randint(1, 6))
    term(run)
    saved = run.wait_for("stop saved", number)
    agreed = run.events("stop agreed")[number - 1].details["step"]
    assert saved.details["step"] == agreed, run.story()
    return int(agreed)


@pytest.fixture(scope="module")
def calm(lab: Lab) -> dict[str, str]:
    """Digests of undisturbed runs, by what was asked of them."""
    return {}


def undisturbed(calm: dict[str, str], new_run: NewRun, *options: str) -> str:
    key = " ".join(options)
    if key not in calm:
        run = training(new_run, f"calm-{abs(hash(key))}", *options, delay=0.0)
        run.submit()
        run.wait_until_done()
        calm[key] = run.digest()
    return calm[key]


@pytest.mark.long
def test_stops_at_random_moments_lose_nothing(lab: Lab, new_run: NewRun, calm: dict[str, str]) -> None:
    """Automodel#405 and accelerate#3400: SIGTERM in a job of Slurm is to save."""
    run = training(new_run, "hf-stops")
    run.submit()
    moments = random.Random(20)
    steps = [stop_at(run, number, moments) for number in (1, 2)]
    run.wait_until_done()

    assert steps == sorted(steps)
    resumed = [int(step) for step in re.findall(r"resumed from \S+-(\d+)", run.output())]
    assert resumed == [steps[-1]], run.output()
    assert run.digest() == undisturbed(calm, new_run)
    out = run.path / "out"
    assert finished_steps(out) == [30, STEPS], "save_total_limit=2"
    marker = json.loads((out / f"checkpoint-{STEPS}" / FINISHED_MARKER).read_text())
    assert (marker["step"], marker["ranks"]) == (STEPS, 4)
    assert "rng_state_3.pth" in marker["files"]
    status = json.loads(run.slurmft("status", str(run.path), "--json"))
    assert f'"step": {STEPS}' in json.dumps(status)


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_100_stops_at_random_moments(lab: Lab, new_run: NewRun) -> None:
    """Goes on where it ended, with a run of its own for every twenty of them."""
    book = Book("huggingface")
    epochs = "--epochs=30"
    versions = f"transformers {importlib.metadata.version('transformers')} torch {torch.__version__} {epochs}"

    def calm() -> str:
        run = training(new_run, "hf-soak-calm", epochs, delay=0.0)
        run.submit()
        run.wait_until_done()
        return run.digest()

    undisturbed = book.calm_digest(versions, calm)
    for seed, missing in book.seeds_until_done():
        run = training(new_run, f"hf-soak-{seed}", epochs, fault_tolerance={"preload": ["transformers.trainer"]})
        out = run.path / "out"

        def check(step: int, out: Path = out, run: Run = run) -> None:
            marker = json.loads((out / f"checkpoint-{step}" / FINISHED_MARKER).read_text())
            assert (marker["step"], marker["ranks"]) == (step, 4), run.story()
            assert finished_steps(out)[-1] == step

        steps = stop_at_random_moments(run, random.Random(seed), stops=min(missing, STOPS_PER_RUN), longest_s=1.2,
                                       hurry=out / HURRY, check=check)  # fmt: skip
        assert run.output().count("resumed from") == 1
        assert run.digest() == undisturbed, f"seed {seed}: {run.story()}"
        book.add(seed, undisturbed[:12], steps)


SCRIPTS = {"trl": ["trl_sft.py"], "fsdp": ["hf_fsdp.py", "--epochs=8"],
           "engine": ["hf_trainer.py", "--epochs=8", "--engine=slurmft"]}  # fmt: skip
"""SFTTrainer is a Trainer, its own callbacks and its data are not; FSDP2 has parts of the state on each rank."""


@pytest.mark.soak
@pytest.mark.parametrize("kind", SCRIPTS)
def test_others_are_stopped_and_go_on(lab: Lab, new_run: NewRun, kind: str) -> None:
    if kind == "trl":
        pytest.importorskip("trl")
    script, *options = SCRIPTS[kind]
    digests = []
    for name, delay in (("stopped", 0.2), ("calm", 0.0)):
        run = new_run(f"{kind}-{name}")
        path = Path(TRAINER[1]).with_name(script)
        run.configure(command=["python", str(path), f"--output={run.path}/out", f"--delay={delay}", *options])
        run.submit()
        if name == "stopped":
            stop_at(run, 1, random.Random(5))
        run.wait_until_done()
        digests.append(run.digest())
    assert digests[0] == digests[1]
