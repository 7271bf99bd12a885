"""Command lines of ft_launcher and torchrun, as their documents show them, as runs of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from of_each import of_each

from slurmft.compat.neighbours import OURS, parse
from slurmft.config.run import RunConfig, from_values
from slurmft.errors import ConfigError, UsageError

SLURMFT = [sys.executable, "-m", "slurmft"]


def launched(line: str) -> RunConfig:
    return from_values(parse(line.split()).settings, source="it")


BRIDGE = """--rdzv_backend=c10d --rdzv_endpoint=n1:29500 --nnodes=2 --nproc-per-node=8
--ft-rank_section_timeouts=setup:600,step:180,checkpointing:420 --ft-rank_out_of_section_timeout=300
your_training_script.py"""


def test_each_option_of_the_torchrun_that_is_installed_is_known():
    from torch.distributed.run import get_args_parser

    options = {option: action.nargs == 0 for action in get_args_parser()._actions for option in action.option_strings}
    for option in sorted(options.keys() - {"-h", "--help"}):
        assert parse([option, *([] if options[option] else ["1"]), "train.py"]).settings["command"][-1] == "train.py"


def test_the_line_of_megatron_bridges_documents():
    launch = parse(BRIDGE.split())
    config = from_values(launch.settings, source="it")
    assert config.command == ("python", "your_training_script.py")
    assert (config.nodes, config.nproc_per_node, config.run_folder.name) == (2, 8, "your_training_script")
    timeouts = config.fault_tolerance.rank_section_timeouts
    assert (timeouts["setup"], timeouts["step"], timeouts["checkpointing"]) == (600, 180, 420)
    assert config.fault_tolerance.rank_out_of_section_timeout == 300
    assert [remark.split()[0] for remark in launch.remarks] == ["--rdzv-backend", "--rdzv-endpoint"]


def test_the_line_of_nemo_rls_documents(tmp_path):
    (tmp_path / "ft_config.yaml").write_text(
        "fault_tolerance:\n  initial_rank_heartbeat_timeout: 360\n  safety_factor: 3\n  segment: 4\n"
    )
    launch = parse(
        f"--ft-cfg-path {tmp_path}/ft_config.yaml --ft-rank-heartbeat-timeout 450 "
        "--ft-initial-rank-heartbeat-timeout 1200 --max-restarts 5 examples/run_grpo.py --config a.yaml".split()
    )
    section = from_values(launch.settings, source="it").fault_tolerance
    assert (section.rank_heartbeat_timeout, section.initial_rank_heartbeat_timeout) == (450, 1200), "options beat files"
    assert (section.safety_factor, section.num_in_job_restarts) == (3, 5)
    assert launch.settings["command"] == ["python", "examples/run_grpo.py", "--config", "a.yaml"]
    (remark,) = launch.remarks
    assert "segment has no counterpart" in remark


@of_each(
    line__expected=[
        ("train.py", {"nodes": 1, "nproc_per_node": 1}),
        ("--nnodes 1:4 train.py", {"nodes": 4, "elastic.min_nodes": 1}),
        ("--nnodes=3:3 train.py", {"nodes": 3, "elastic.min_nodes": None}),
        ("--nproc_per_node 4 train.py --nnodes=9", {"nproc_per_node": 4, "nodes": 1}),
        ("--term-timeout=90 train.py", {"preemption.stop_timeout_s": 90.0}),
        ("--max_restarts=0 train.py", {"fault_tolerance.num_in_job_restarts": 0}),
        ("--ft-param-rank_heartbeat_timeout=60 train.py", {"fault_tolerance.rank_heartbeat_timeout": 60}),
        ("--ft-rank-heartbeat-timeout none train.py", {"fault_tolerance.rank_heartbeat_timeout": 0}),
        ("--ft-max-no-progress-restarts=2 train.py", {"fault_tolerance.max_no_progress_cycles": 3}),
        ("--ft-num-warmup-iterations 7 train.py", {"fault_tolerance.num_warmup_iterations": 7}),
        ("--ft-calc-ft-timeouts=True train.py", {"fault_tolerance.calc_ft_timeouts": True}),
        ("--rdzv-id=my/job:1 train.py", {"run_folder.name": "my-job-1"}),
        ("--rdzv-id=none train.py", {"run_folder.name": "train"}),
        ("--rdzv-id=.. train.py", {"run_folder.name": "run"}),
        ("-m my.package.train --lr 1", {"command": ("python", "-m", "my.package.train", "--lr", "1")}),
        ("--no-python ./train.sh", {"command": ("./train.sh",)}),
        ("-- train.py", {"command": ("python", "train.py")}),
    ]
)
def test_each_option_has_its_key(line, expected):
    config = launched(line)
    for key, value in expected.items():
        found: object = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


def test_a_section_without_a_limit_has_none():
    sections = launched("--ft-rank-section-timeouts setup:null,step:None,own:30 train.py").fault_tolerance
    assert not sections.rank_section_timeouts["setup"] and not sections.rank_section_timeouts["step"]
    assert sections.rank_section_timeouts["own"] == 30


@of_each(
    line__remark=[
        ("--log-dir /logs -r 3 -t 0 train.py", "--log-dir has no counterpart: logs are in the run folder"),
        ("--ft-base-logfile /l train.py", "--ft-base-logfile has no counterpart"),
        ("--standalone --run-path /a/train.py", "--run-path has no counterpart"),
        ("--ft-restart-policy min-healthy train.py", "elastic.min_nodes"),
        ("--ft-enable-nic-monitor=True train.py", "enable_nic_monitor has no counterpart"),
        ("--ft-rank-termination-signal=SIGTERM train.py", "killed with SIGKILL"),
        ("--ft-max-no-progress-cycles=0 train.py", "cannot be switched off"),
        ("--ft-log-level DEBUG train.py", "log_level has no counterpart"),
    ]
)
def test_an_option_without_a_counterpart_is_named(line, remark):
    launch = parse(line.split())
    assert any(remark in each for each in launch.remarks), launch.remarks
    assert launch.standalone is ("--standalone" in line)


@of_each(
    line__error__named=[
        ("", UsageError, "no script"),
        ("--nnodes=2", UsageError, "no script"),
        ("--nnodes", UsageError, "--nnodes needs a value"),
        ("--nodes=2 train.py", UsageError, "no option --nodes=2; did you mean nnodes|no option --nodes=2"),
        ("--ft-rank-heartbeat-timout=3 train.py", UsageError, "did you mean ft-rank-heartbeat-timeout"),
        ("--ft-=3 train.py", UsageError, "no option --ft-=3"),
        ("--nnodes=4:1 train.py", ConfigError, "min_nodes"),
        ("--nnodes=0 train.py", UsageError, "--nnodes: '0' is not a whole number"),
        ("--nnodes=-1 train.py", UsageError, "--nnodes: '-1'"),
        ("--nnodes=1:2:3 train.py", UsageError, "--nnodes: '2:3'"),
        ("--nproc-per-node=gpu train.py", UsageError, "give a number"),
        ("--nproc-per-node=many train.py", UsageError, "--nproc-per-node: 'many'"),
        ("--max-restarts=-1 train.py", UsageError, "--max-restarts: '-1'"),
        ("--standalone=yes train.py", UsageError, "--standalone takes no value"),
        ("--term-timeout=-1 train.py", ConfigError, "stop_timeout_s"),
        ("--ft-rank-heartbeat-timeout=-5 train.py", ConfigError, "rank_heartbeat_timeout"),
        ("--ft-rank-section-timeouts=step train.py", ConfigError, "rank_section_timeouts"),
        ("--ft-cfg-path=/nowhere/ft.yaml train.py", ConfigError, "there is no configuration file"),
        ("--max-restarts 1 --dry-run train.py", UsageError, "in front of those of the launcher"),
    ]
)
def test_what_makes_no_sense_is_refused(line, error, named):
    with pytest.raises(error, match=named):
        launched(line)


def test_a_file_without_the_section_is_refused_and_a_nested_one_is_found(tmp_path):
    file = tmp_path / "ft.yaml"
    file.write_text("trainer:\n  fault_tolerance: {safety_factor: 2}\n")
    assert parse([f"--ft-cfg-path={file}", "t.py"]).settings["fault_tolerance"] == {"safety_factor": 2}
    file.write_text("trainer: {}\n")
    with pytest.raises(ConfigError, match="has no section fault_tolerance"):
        parse([f"--ft-cfg-path={file}", "t.py"])


def _run(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | variables
    return subprocess.run([*SLURMFT, "ft-launch", *words], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=90, check=False)  # fmt: skip


def test_the_configuration_can_be_printed_and_submitted(tmp_path):
    done = _run("--print-config", "--set", "slurm.time=30", "--nnodes=2", "train.py", "--print-config", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert (printed["nodes"], printed["slurm"]["time"]) == (2, "30")
    assert printed["command"] == ["python", "train.py", "--print-config"], "behind the script it is the script's"
    assert not (tmp_path / "runs").exists()


def test_ranks_train_with_the_variables_of_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(
        "import json, os, sys\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')\n"
        "open(f\"rank-{os.environ['RANK']}\", 'w').write(json.dumps([sys.argv[1:], *(os.environ[n] for n in names)]))\n"
    )
    done = _run(
        "--run-folder", "here", "--wait", "--standalone", "--nproc-per-node", "2", "train.py", "--lr", "1",
        folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    found = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert found == [[["--lr", "1"], str(rank), "2", str(rank), "2"] for rank in range(2)]
    assert (tmp_path / "here" / "journal.jsonl").exists()


def test_within_a_job_it_is_refused(tmp_path):
    done = _run("--dry-run", "train.py", folder=tmp_path, SLURM_PROCID="0")
    assert done.returncode == 2 and "where you would call sbatch" in done.stderr


def test_the_verbs_own_options_are_known():
    from slurmft.cli.submit import ft_launch

    own = {name.lstrip("-") for param in ft_launch.params for name in param.opts if name.startswith("--")}
    assert own == set(OURS)
