"""The pages for users of other tools: what they show is what the commands print, and their Python runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from docs_pages import DOCS, Block, blocks

from slurmft.config import run as configuration
from slurmft.policy import sbatch

SLURMFT = [sys.executable, "-P", "-m", "slurmft"]
PAGES = sorted((DOCS / "coming-from").glob("*.md"))
WITH_SCRIPT = ["lightning", "megatron", "nvrx", "torchrun"]


def of(page: str, *languages: str) -> list[Block]:
    return [block for block in blocks(*languages) if block.page == f"docs/coming-from/{page}.md"]


def run(words: list[str], folder: Path, limit_s: float = 60) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_page_is_in_the_list():
    listed = re.findall(r"\(\.\./coming-from/(\S+?\.md)\)", (DOCS / "how-to" / "coming-from.md").read_text())
    assert sorted(set(listed)) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", WITH_SCRIPT)
def test_the_launch_in_a_batch_script_of_a_page_trains(page: str):
    [script] = [block.text for block in of(page, "bash") if block.text.startswith("#!")]
    assert sbatch.with_guard(script, "GUARD; ").count("GUARD; ") == 1
    [launch] = re.findall(r"^srun ((?:.*\\\n)*.*)$", script, re.MULTILINE)
    line = sbatch.split_line(shlex.split(launch), sbatch.SRUN_FLAGS)
    assert sbatch.judged("srun", line.command, said="", environment={}).trains
    assert sbatch.why_not_srun(line) == ""


LAUNCHES = [(page.stem, line) for page in PAGES for block in of(page.stem, "bash") if not block.text.startswith("#!")
            for line in block.text.splitlines()]  # fmt: skip


@pytest.mark.parametrize(("page", "line"), LAUNCHES, ids=[page for page, _ in LAUNCHES])
def test_a_command_line_of_a_page_is_taken(page: str, line: str, tmp_path: Path):
    program, verb, *words = line.split()
    assert (program, verb) == ("slurmft", "ft-launch")
    printed = yaml.safe_load(run([*SLURMFT, verb, "--print-config", *words], tmp_path))
    assert printed["command"] == ["python", "train.py", "--lr", "1e-4"]


def test_the_callable_on_the_page_of_submitit_runs(tmp_path: Path):
    [text] = [block.text for block in of("submitit", "python") if "slurmft.submit(" in block.text]
    script = tmp_path / "notebook.py"
    script.write_text(text)
    loss = float(run([sys.executable, str(script)], tmp_path, limit_s=180).split()[-1])
    assert 0 < loss < 10


def test_the_plugins_on_the_page_of_nemo_run_say_what_it_shows(tmp_path: Path):
    [text] = [block.text for block in of("nemo-run", "python") if "slurmft.compat" in block.text]
    written = tmp_path / "printed.yaml"
    written.write_text(run([sys.executable, "-c", text], tmp_path))
    shown = tmp_path / "shown.yaml"
    [block] = of("nemo-run", "yaml")
    shown.write_text(block.text)
    assert configuration.load(written) == configuration.load(shown)


def test_the_loop_on_the_page_of_megatron_runs():
    """A loss that is NaN once, which computing again in place does not show again, does not end it."""
    [block] = of("megatron", "python")
    model = torch.nn.Linear(2, 1)
    losses: list[float] = []

    def forward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        losses.append(float(loss.detach()))
        return loss * float("nan") if len(losses) == 1 else loss

    names = {"train_iterator": iter([torch.ones(1, 2)]), "forward": forward,
             "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}  # fmt: skip
    exec(compile(block.text, str(block), "exec"), names)
    assert len(losses) >= 2 and len(set(losses)) == 1
    assert names["should_exit"] is False
