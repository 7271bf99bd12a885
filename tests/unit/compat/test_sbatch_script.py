"""Batch scripts as people have them, converted to configurations of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurmft.compat.converters import Converted, convert
from slurmft.config.run import RunConfig, from_values
from slurmft.errors import SlurmftError, UsageError

TORCHRUN = r"""#!/bin/bash
#SBATCH --job-name=llama-7b
#SBATCH -N 4
#SBATCH --ntasks-per-node=1 --gpus-per-node=8
#SBATCH --time=24:00:00   # a day
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
source ~/venv/bin/activate
export NCCL_DEBUG=INFO
export WANDB_API_KEY=abc
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
DATA=/data/c4
srun --label torchrun --nnodes=$SLURM_NNODES --nproc_per_node=$SLURM_GPUS_ON_NODE \
    --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:29500 \
    train.py --data $DATA --out "runs/$SLURM_JOB_ID" 2>&1 | tee log.txt
"""


def settings_of(found: Converted) -> RunConfig:
    return from_values(dict(found.settings), source="it", known_here=lambda options: options)


def test_a_script_with_torchrun():
    found = convert(TORCHRUN, "job")
    config = settings_of(found)
    assert config.command == ("python", "train.py", "--data", "/data/c4", "--out", "runs/$SLURM_JOB_ID")
    assert (config.nodes, config.nproc_per_node, config.run_folder.name) == (4, 8, "llama-7b")
    assert (config.preemption.signal, config.preemption.signal_lead_s) == ("SIGUSR1", 180)
    assert (config.slurm.time, config.slurm.gpus_per_node) == ("24:00:00", "8")
    assert config.environment == {"NCCL_DEBUG": "INFO"}
    assert [remark.partition(": ")[0] for remark in found.remarks] == ["line 10", "line 12", "line 16", "line 16"]
    assert "abc" not in str(found), "no secret is repeated"


def test_a_script_with_ft_launcher_and_a_range_of_nodes():
    found = convert(
        "#SBATCH --nodes=2-4\nsrun ft_launcher --nproc-per-node 8 --max-restarts=5 --ft-rank-heartbeat-timeout=450 "
        "-m pkg.train --lr 1e-4\n", "job",
    )  # fmt: skip
    config = settings_of(found)
    assert config.command == ("python", "-m", "pkg.train", "--lr", "1e-4")
    assert (config.nodes, config.elastic.min_nodes, config.nproc_per_node) == (4, 2, 8)
    assert config.fault_tolerance.num_in_job_restarts == 5
    assert config.fault_tolerance.rank_heartbeat_timeout == 450


def test_srun_alone_starts_a_rank_for_each_task():
    found = convert("#SBATCH -N2 -n8 -p gpu -A me --exclusive\ncd /work\nexec srun -u --mpi=none python3 t.py\n", "job")
    config = settings_of(found)
    assert (config.command, config.nodes, config.nproc_per_node) == (("python3", "t.py"), 2, 4)
    assert (config.slurm.partition, config.slurm.account) == ("gpu", "me")
    assert config.slurm.srun_args == ("--mpi=none",)
    assert str(config.working_directory) == "/work"


def test_pyxis():
    found = convert(
        "srun --ntasks-per-node=8 --container-image=nvcr.io#nvidia/pytorch:25.01 --container-mounts=/data,/a:/b:ro "
        "--container-mount-home bash -c 'python train.py --x \"a b\"'", "job",
    )  # fmt: skip
    config = settings_of(found)
    assert config.command == ("python", "train.py", "--x", "a b")
    assert config.nproc_per_node == 8
    assert (config.container.runtime, config.container.image) == ("pyxis", "nvcr.io#nvidia/pytorch:25.01")
    assert [(str(mount.source), mount.read_only) for mount in config.container.mounts] == [
        ("/data", False),
        ("/a", True),
    ]
    assert config.container.options == ("--container-mount-home",)


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        ("#SBATCH --array=0-9", "line 1: --array is not taken over: a run is one job"),
        ("#SBATCH --signal=HUP@60", "line 1: --signal=HUP@60 is not taken over"),
        ("accelerate launch train.py", "line 1: accelerate is not converted"),
        ("export HOST=$(hostname)", "line 1: HOST=$(hostname) is found out when the script runs"),
        ("rm -rf /scratch/x", "line 1: 'rm -rf /scratch/x' has no counterpart"),
        ("python prepare.py", "line 2: a second command is not taken over: a run has one, here that of line 1"),
    ],
)
def test_what_is_not_mapped_is_named_with_its_line(line, remark):
    found = convert(f"{line}\nsrun python train.py\n", "job")
    assert any(each.startswith(remark) for each in found.remarks), found.remarks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "no command that trains"),
        ("", "no command that trains"),
        ("#SBATCH --nodes=many\nsrun python t.py", "line 1: --nodes=many"),
        ("srun python 'train.py", "line 1: No closing quotation"),
        ("srun --label", "line 1: srun has no command"),
        ("torchrun --nnodez=2 t.py", "no option --nnodez"),
        ("torchrun --nproc-per-node=gpu t.py", "give a number"),
    ],
)
def test_what_cannot_be_converted_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        convert(text, "job")


def test_the_head_ends_with_the_first_command():
    """As for sbatch: what comes behind it is a comment."""
    found = convert("srun python t.py\n#SBATCH --nodes=4\n", "job")
    assert found.settings["nodes"] == 1


@given(st.lists(st.sampled_from([
    "#SBATCH", "-N", "--nodes=2", "--signal=", "srun", "torchrun", "python", "t.py", "-m", "\\", "\n", "$(a", ")", "'",
    '"', "`", "export A=", "$A", "${A:-b}", "|", "&&", "--", "-c", "bash", "\0", "\r\n", "=", "--container-image", "#",
    "é",
]), max_size=30).map(" ".join))  # fmt: skip
def test_any_text_is_converted_or_refused(text):
    try:
        found = convert(text, "job")
        config = settings_of(found)
    except SlurmftError:
        return
    assert config.command


def test_the_verb(tmp_path: Path):
    script, output = tmp_path / "job.sh", tmp_path / "run.yaml"
    script.write_text(TORCHRUN)

    def slurmft(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "slurmft", *words], capture_output=True, text=True, check=False)

    printed = slurmft("convert", str(script))
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.startswith("# From job.sh\n# line 10: ")
    assert slurmft("convert", str(script), "--output", str(output)).returncode == 0
    assert output.read_text() == printed.stdout
    assert yaml.safe_load(output.read_text())["nodes"] == 4
    again = slurmft("convert", str(script), "-o", str(output))
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert slurmft("convert", str(tmp_path)).returncode == 2
    assert "dry-run" not in slurmft("submit", str(output), "--dry-run", "--cluster", "local").stderr


@pytest.mark.parametrize(
    "line",
    [
        "srun nsys profile -o report --trace=cuda torchrun --nproc_per_node=8 train.py --lr 1",
        "nsys profile torchrun --nproc_per_node=8 train.py --lr 1",
        "ncu --set full python -m torch.distributed.run --nproc_per_node=8 train.py --lr 1",
        "srun bash -c 'nsys profile torchrun --nproc_per_node=8 train.py --lr 1'",
    ],
)
def test_a_profiler_in_front_is_left_out_with_a_remark(line):
    found = convert(f"#!/bin/bash\n#SBATCH --nodes=2\n{line}\n", "job")
    assert (found.settings["command"], found.settings["nproc_per_node"]) == (["python", "train.py", "--lr", "1"], 8)
    (remark,) = found.remarks
    assert "is left out" in remark and "write it in front of command" in remark


@pytest.mark.parametrize(
    "line",
    [
        "export WANDB_API_KEY=s3cr3t-value\nsrun train.py --key $WANDB_API_KEY",
        'HF_TOKEN="s3cr3t-value"\nsrun train.py --hf-token $HF_TOKEN',
        "srun train.py --hf_token=s3cr3t-value",
        "srun train.py --db-password s3cr3t-value",
        "srun train.py --url https://me:s3cr3t-value@host/x",
        "export GITHUB=ghp_s3cr3t-value\nsrun train.py",
        "export DB=postgres://me:s3cr3t-value@host/x\nsrun train.py",
        "huggingface-cli login --token s3cr3t-value\nsrun train.py",
        "WANDB_API_KEY=s3cr3t-value wandb login\nsrun train.py",
        'curl -H "Authorization: Bearer s3cr3t-value" http://x\nsrun train.py',
    ],
)
def test_secrets_reach_neither_the_configuration_nor_the_remarks(line):
    found = convert(f"#!/bin/bash\n#SBATCH --nodes=2\n{line}\n", "job")
    assert "s3cr3t" not in str(found)


def test_what_only_looks_like_a_secret_stays():
    text = "export TOKENIZERS_PARALLELISM=false\nsrun python train.py --max_tokens 5 --tokenizer gpt2 --pad_token_id=3"
    found = convert(text, "job").settings
    assert found["environment"] == {"TOKENIZERS_PARALLELISM": "false"}
    assert found["command"][-5:] == ["--max_tokens", "5", "--tokenizer", "gpt2", "--pad_token_id=3"]
