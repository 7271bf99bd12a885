"""A TERM at an awkward moment, a script that knows nothing of slurmft, and the script people edit: on real Slurm."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import TRAINER, Run, eventually, preempt
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.soak
def test_a_term_before_the_first_step_has_nothing_to_save(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    job = run.submit()
    run.wait_for("workers started")
    lab.run(["scancel", "--signal=TERM", job])
    run.wait_for("requeued")
    run.wait_until_done()
    verdict = run.events("verdict")[0].details
    assert (verdict["cause"], verdict["last_step"], verdict.get("saved_step")) == ("signalled", 0, None)
    assert not run.events("stop without a save"), "there was nothing to lose"
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_a_term_in_an_evaluation_repeats_it(lab: Lab, new_run: NewRun) -> None:
    """The evaluation at step 2 is long; the stop inside of it saves step 2, and the resumed run begins with it."""
    slow = [*TRAINER, "--steps", "6", "--eval-every", "2", "--eval-batches", "3000"]
    alone = new_run("evaluation-undisturbed", command=slow)
    alone.submit()
    alone.wait_until_done()
    run = new_run(command=slow)
    job = run.submit()

    def is_evaluating() -> bool:
        progress = run.folder.progress() or {}
        return progress.get("state") == "evaluating" and progress.get("step", 0) > 0

    eventually(is_evaluating, 60, run.story)
    lab.run(["scancel", "--signal=TERM", job])
    run.wait_until_done()
    verdict = run.events("verdict")[0].details
    assert "saved_step" in verdict, run.story()
    step = verdict["saved_step"]
    assert step % 2 == 0
    assert run.output().count(f"step {step:6d}/6  held-out loss") == 1, "interrupted once, told once"
    assert run.digest() == alone.digest()


@pytest.mark.long
def test_an_unchanged_script_survives_a_preemption_by_its_own_means(lab: Lab, new_run: NewRun) -> None:
    checkpoint = lab.home / "plain.pt"
    command = [
        "python",
        "-m",
        "slurmft.examples.plain_ddp",
        "--steps",
        "200",
        "--save-every",
        "5",
        "--step-delay",
        "0.1",
    ]
    run = new_run(command=[*command, "--checkpoint", str(checkpoint)])
    job = run.submit()
    eventually(checkpoint.exists, 60, run.story)
    lab.run(["scancel", "--signal=TERM", job])
    run.wait_until_done()
    assert "resuming at step" in run.output()
    assert "finished step 200" in run.output()
    assert len(run.events("requeued")) == 1


@pytest.mark.long
def test_sbatch_train_sh_runs_the_same_supervisor(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    """Edited as its header says, submitted with plain sbatch from a folder of the user's own."""
    run = new_run()
    script = lab.home / "train.sh"
    shutil.copy(REPOSITORY / "sbatch" / "train.sh", script)
    options = ["--parsable", "--nodes=2", "--partition=low", "--time=10", f"--output={lab.home}/train-%j.log"]
    environment = {"CONFIG": str(run.path.with_suffix(".yaml")), "SLURMFT": str(REPOSITORY / "bin" / "slurmft")}
    job = lab.run(["sbatch", *options, str(script)], cwd=lab.home, env=environment).stdout.strip()
    run.wait_for_step(10)
    lab.run(["scancel", "--signal=TERM", job])
    run.wait_until_done()
    assert run.folder.jobs() == [job]
    assert len(run.events("requeued")) == 1
    assert run.digest() == undisturbed


@pytest.mark.long
def test_a_preemption_without_grace_goes_on_from_the_newest_checkpoint(
    lab: Lab, new_run: NewRun, undisturbed: str
) -> None:
    """GraceTime 0: Slurm requeues by itself and would let the job wait 121 s."""
    run = new_run(slurm={"partition": "nograce"})
    job = run.reach(30)
    preempt(lab)
    run.wait_for("attempt started", 2)
    run.wait_until_done()
    assert run.folder.jobs() == [job]
    assert run.events("left to slurm"), run.story()
    assert not run.events("requeued"), "Slurm did; a second requeue would be one too many"
    assert run.digest() == undisturbed


@pytest.mark.long
def test_a_killed_srun_costs_seconds_and_no_steps_that_were_saved(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    run.reach(30)
    run.wait_for_saved(25)
    batch_host = run.events("agents ready")[0].details["hosts"][0]
    lab.run_on(batch_host, ["pkill", "-9", "-x", "srun"])
    run.wait_for("attempt started", 2)
    run.wait_until_done()
    verdict = run.events("verdict")[0].details
    assert verdict["last_step"] >= 30
    assert verdict["saved_step"] == 25
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_a_stop_outlives_the_attempt_that_could_not_finish_it(lab: Lab, new_run: NewRun) -> None:
    run = new_run()
    job = run.reach(5)
    (run.path / "KILL").touch()
    lab.run(["scontrol", "requeue", job])
    run.wait_until_out_of_queue(job, within_s=180)
    assert run.folder.done() is None
    assert run.events("decision")[-1].details["action"] == "stop"
    assert not (run.path / "KILL").exists()
