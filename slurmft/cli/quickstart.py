"""``slurmft quickstart``."""

from __future__ import annotations

import importlib.util
import os
import sys
from datetime import datetime
from pathlib import Path

import click

import slurmft.examples
from slurmft.cli import inference as inferring
from slurmft.cli import submit
from slurmft.cli.main import say
from slurmft.errors import UsageError
from slurmft.storage.run_folder import RunFolder

EXAMPLES = Path(slurmft.examples.__path__[0])
CONFIG = EXAMPLES / "quickstart.yaml"
INFER_CONFIG = EXAMPLES / "quickstart_infer.yaml"
PROMPTS, KILL_AFTER = 200, 40


@click.command()
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default="local", show_default=True,
              help="Where to train; auto: Slurm where its commands are, else this machine.")  # fmt: skip
@click.option("--data", help="Text file or folder to train on; default: Python's own standard library.")
@click.option("--infer", is_flag=True, help="Let the trained GPT answer 200 prompts on two replicas of this machine, "
              "one of which is killed on the way; it is trained first where no quickstart has.")  # fmt: skip
@click.pass_context
def quickstart(context: click.Context, *, cluster: str, data: str | None, infer: bool) -> int:
    """Train a small GPT, with live progress: about a minute, no Slurm and no GPU needed.

    The run's folder is made below runs/ in the current folder. The configuration is one to copy from.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError("the quickstart trains with torch, which is not installed here",
                         hint="pip install torch")  # fmt: skip
    # `make quickstart` activates no environment, and the example trains with what is installed in this one
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return _infer(context, cluster, data) if infer else _train(context, cluster, data)


def _train(context: click.Context, cluster: str, data: str | None) -> int:
    folder = _new_folder("quickstart")
    say(f"slurmft submit {CONFIG} --cluster {cluster} --wait --set run_folder={folder}", err=True)
    code: int = context.invoke(
        submit.submit, config=CONFIG, sbatch_options=(), dry_run=False, strict=False, wait=True, cluster=cluster,
        overrides=(f"run_folder={folder}",), data=data,
    )  # fmt: skip
    return code


def _infer(context: click.Context, cluster: str, data: str | None) -> int:
    from slurmft.operations import inference_demo as demo

    if (model := demo.trained_model(Path("runs"))) is None:
        if code := _train(context, cluster, data):
            return code
        model = demo.trained_model(Path("runs"))
    run = RunFolder(_new_folder("infer"))
    run.create()
    requests = run.path / "requests.jsonl"
    demo.write_prompts(requests, PROMPTS)
    settings = {"run_folder": run.path, "inference.input": requests, "environment.BYTE_GPT_CHECKPOINTS": model}
    overrides = tuple(f"{key}={value}" for key, value in settings.items())
    words = " ".join(f"--set {each}" for each in overrides)
    say(f"slurmft infer {INFER_CONFIG} --cluster local --wait {words}", err=True)
    killer = demo.ReplicaKiller(run, KILL_AFTER)
    killer.start()
    try:
        code = context.invoke(inferring.infer, config=INFER_CONFIG, sbatch_options=(), dry_run=False, wait=True,
                              cluster="local", overrides=overrides)  # fmt: skip
    finally:
        killer.stop()
    if code:
        return int(code)
    found = demo.summary_of(run)
    rows = {
        "requests": found.requests, "answered": found.answered, "errors": found.errors,
        "replicas killed": f"{killer.killed} (died: {found.died}, started again: {found.restarted})",
        "computed twice": f"{found.twice}; one answer of each counts", "seconds": f"{found.seconds:.1f}",
        "answers": found.output / "answers.jsonl",
    }  # fmt: skip
    for name, value in rows.items():
        say(f"  {name:<16} {value}")
    return 0


def _new_folder(name: str) -> Path:
    return Path("runs") / f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
