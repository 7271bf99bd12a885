"""The elastic script that is there to copy from: run, stopped, and continued on another number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import blocks


def train(script: Path, ranks: int, steps: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script.name]
    environment = {**os.environ, "STEPS": str(steps), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=240,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def weights(output: str) -> list[float]:
    (line,) = re.findall("weights: (.*)", output)
    return [float(value) for value in line.split()]


@pytest.mark.long
def test_the_script_ends_with_the_same_weights_whatever_the_ranks(tmp_path):
    """60 steps are more than an epoch of 50: on 3 ranks and then on one, and on one from the beginning."""
    [block] = [each for each in blocks("python") if "ranks go on from step" in each.text]
    for name in ("changed", "calm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "elastic_training.py").write_text(block.text)
    script = tmp_path / "changed" / "elastic_training.py"
    assert "3 ranks go on from step 0" in train(script, 3, 30)
    changed = train(script, 1, 60)
    assert "1 ranks go on from step 30" in changed
    calm = train(tmp_path / "calm" / "elastic_training.py", 1, 60)
    assert max(abs(one - other) for one, other in zip(weights(changed), weights(calm), strict=True)) < 1e-4
