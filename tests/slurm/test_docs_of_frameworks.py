"""The pages on frameworks, as a reader follows them: their scripts, configurations and commands, on this machine."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from extras import needs

from slurm.conftest import eventually
from slurmft.integrations.folders import finished_steps
from slurmft.storage.run_folder import RunFolder

pytestmark = [needs("transformers"), pytest.mark.slow, pytest.mark.timeout(600)]
PAGES = Path(__file__).parents[2] / "docs" / "how-to"


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", (PAGES / page).read_text(), re.M | re.S)


def commands(page: str) -> list[list[str]]:
    lines = [line[2:] for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line) for line in lines if line.startswith("slurmft ")]


def follow(page: str, folder: Path, name: str) -> tuple[RunFolder, str]:
    """Type what the page says, the next command when the run has done some steps; returns what the last one printed."""
    run, said, started = RunFolder(folder / "runs" / name), "", 0
    for words in commands(page):
        if words[1] == "submit":
            words += ["--cluster", "local"]
            started += 1
        else:
            eventually(lambda: ((run.progress() or {}).get("step") or 0) >= 3, 200, lambda: f"step 3: {logs(run)}")
        result = subprocess.run(
            [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        assert result.returncode == 0, f"{words}: {result.stdout}{result.stderr}{logs(run)}"
        said = result.stdout
    assert started == 2
    return run, said


def logs(run: RunFolder) -> str:
    return "".join(path.read_text()[-2000:] for path in run.attempts.glob("*/rank-0.log"))


def agreed(run: RunFolder, event: str) -> int:
    return next(int(one.details["step"]) for one in run.journal().read() if one.event == event)


@pytest.mark.long
def test_the_page_on_the_trainer(tmp_path: Path) -> None:
    script = blocks("huggingface.md", "python")[0].replace("save_steps=20,", "save_steps=20, use_cpu=True,")
    # so slow that the commands find it training
    (tmp_path / "train.py").write_text(f"import time\n{script}".replace(
        "        tokens = torch", "        time.sleep(0.02)\n        tokens = torch"))  # fmt: skip
    (tmp_path / "trainer.yaml").write_text(blocks("huggingface.md", "yaml")[0])
    run, said = follow("huggingface.md", tmp_path, "trainer")
    stopped = agreed(run, "stop agreed")
    assert agreed(run, "save requested") <= stopped
    assert f"saved step {stopped} in" in logs(run)
    assert finished_steps(tmp_path / "out") == [20, 40] or stopped > 20
    assert "finished. all 4 ranks finished at step 40" in said
    assert (run.progress() or {})["resumed"] == stopped
    assert (run.progress() or {})["metric"] < 4, "the loss is shown"


@pytest.mark.long
def test_the_page_on_accelerate(tmp_path: Path) -> None:
    configuration = next(one for one in blocks("accelerate.md", "yaml") if "accelerate_loop" in one)
    (tmp_path / "accelerate.yaml").write_text(configuration)
    run, said = follow("accelerate.md", tmp_path, "accelerate")
    (tmp_path / "calm.yaml").write_text(configuration.replace("runs/accelerate", "runs/calm").replace('"0.1"', '"0"'))
    calm = subprocess.run(
        [sys.executable, "-m", "slurmft", "submit", "calm.yaml", "--cluster", "local", "--wait"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert agreed(run, "stop agreed") == (run.progress() or {})["resumed"] > 0
    (digest,) = re.findall(r"weights +sha256 (\w+)", said)
    assert digest in calm.stdout, "not the weights of an undisturbed run"


@pytest.mark.soak
def test_the_example_like_torchtitan(tmp_path: Path) -> None:
    configuration = next(one for one in blocks("accelerate.md", "yaml") if "titan_loop" in one)
    digests = []
    for name, is_stopped in (("titan", True), ("calm", False)):
        text = configuration.replace("runs/titan", f"runs/{name}").replace('"0.1"', '"0.1"' if is_stopped else '"0"')
        (tmp_path / f"{name}.yaml").write_text(text)
        run = RunFolder(tmp_path / "runs" / name)
        submit = [sys.executable, "-m", "slurmft", "submit", f"{name}.yaml", "--cluster", "local"]
        if is_stopped:
            subprocess.run(submit, cwd=tmp_path, check=True, timeout=100)
            eventually(lambda run=run: ((run.progress() or {}).get("step") or 0) >= 3, 200, lambda run=run: logs(run))
            stop = [sys.executable, "-m", "slurmft", "stop", str(run.path), "--timeout", "120"]
            subprocess.run(stop, cwd=tmp_path, check=True, timeout=150)
        result = subprocess.run(
            [*submit, "--wait"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 0, result.stdout + logs(run)
        if is_stopped:
            assert (run.progress() or {})["resumed"] == agreed(run, "stop agreed")
        digests += re.findall(r"weights +sha256 (\w+)", result.stdout)
    assert len(digests) == 2 and digests[0] == digests[1]
