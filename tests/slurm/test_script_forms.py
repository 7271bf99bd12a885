"""Batch scripts of many forms: under `slurmft sbatch` each does what it does under sbatch, or says why it is refused.

The trainer prints its arguments, its folder and the variables that tell it its place; of torchrun and others there are
stand-ins, which set a rank's variables.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
FORMS = sorted(path.stem for path in (HERE / "forms").glob("*.sh"))
RUNS = dict.fromkeys(FORMS, 1) | {
    "given-21-lines-after-the-head": 0,  # python alone, without a launcher
    "given-32-handler-body": 0,
    "given-41-uv-run": 1,
    "loop-of-seeds": 3,
    "side-by-side": 2,
    "two-trainings": 2,
    "uneven-tasks": 0,
    "cyclic-tasks": 0,
    "said-off": 0,
    "heredoc-trainer": 0,
    "absolute-path": 0,
}
"""How many launches of each are supervised; of others the script runs as it would, and that is said."""

REFUSED = {"given-20-het-job": "not one run"}
SAID = {
    "given-21-lines-after-the-head": "it calls no launcher by its name",
    "given-32-handler-body": "it calls no launcher by its name",
    "uneven-tasks": "its 3 tasks are not spread over 2 nodes in equal blocks",
    "cyclic-tasks": "its 4 tasks are not spread over 2 nodes in equal blocks",
    "said-off": "the script says off of it",
    "heredoc-trainer": "its program comes from standard input",
    "absolute-path": "an absolute path or exec passes slurmft by",
}
SETTINGS = {"exit-code": ["--set", "fault_tolerance.num_in_job_restarts=0",
                          "--set", "fault_tolerance.num_job_retries_on_failure=0"]}  # fmt: skip
ARGUMENTS = {"arguments-of-the-script": ["one", "two words"], "given-38-default-values": ["--extra"]}

TRAINER = """
import json, os, sys
told = [name for name in os.environ if name.startswith("SLURM_") or name in os.environ.get("SHOWN", "").split()]
facts = {"args": sys.argv[1:], "folder": os.getcwd(), "place": {name: os.environ[name] for name in sorted(told)}}
with open(f"{os.environ['SLURM_SUBMIT_DIR']}/place-{os.uname().nodename}-{os.getpid()}.json", "w") as file:
    json.dump(facts, file)
os.write(1, " ".join(["trainer", *sys.argv[1:], chr(10)]).encode())  # at once: several write to one file
sys.exit(int(os.environ.get("CODE", "0")))
"""
SHOWN = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "CXI_FORK_SAFE",
         "DATADIR", "TMPDIR", "NCCL_DEBUG", "NCCL_IB_HCA", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "WANDB_MODE",
         "HF_HOME", "FI_PROVIDER", "LOGLEVEL", "LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME", "HEAD_NODE_PORT", "MODE",
         "KEPT", "DROPPED", "SHOWN"]  # fmt: skip
OF_ONE_PROCESS = re.compile(
    r"SLURM_(STEP_?ID|TASK_PID|SRUN_COMM_\w+|STEP_LAUNCHER_PORT|LAUNCH_NODE_IPADDR|PRIO_PROCESS|JOB_?ID|OPEN_MODE"
    r"|NODE_ALIASES|\w*NODELIST|TOPOLOGY_ADDR|JOB_USER|SUBMIT_DIR|WORKING_CLUSTER|CONF)"
)
"""Variables that differ between two jobs with the same script as well: the scheduler chooses other nodes."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A job that has ended."""

    code: int
    """Of ``sbatch --wait``: the script's."""

    submission: str
    lines: list[str]
    said: list[str]
    """Lines of slurmft's own."""

    runs: list[str]


def in_work_folder(folder: Path) -> None:
    """Everything that the scripts name."""
    shutil.copytree(HERE / "forms", folder, dirs_exist_ok=True)
    shutil.copytree(HERE / "forms_bin", folder / "bin")
    (folder / "other").mkdir()
    shutil.copy(HERE / "forms_bin" / "torchrun", folder / "other" / "torchrun")
    for name in ("train", "main", "pre", "real_train", "vit", "pretrain", "ft", "t", "src/train", "scripts/train",
                 "titan/train"):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(TRAINER)
    (folder / "prepare.py").write_text("print('prepared')\n")
    for name in ("with_env.sh", "scripts/with_env.sh", "prepare_env.sh"):
        (folder / name).write_text('#!/bin/sh\necho "with $#"\n[ $# = 0 ] || exec "$@"\n')
        (folder / name).chmod(0o755)
    for name in ("venv/bin/activate", "myenv/bin/activate"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("export ACTIVATED=1\n")
    (folder / "torch/distributed").mkdir(parents=True)
    run = 'import runpy, shutil\nrunpy.run_path(shutil.which("torchrun"), run_name="__main__")\n'
    (folder / "torch/distributed/run.py").write_text(run)


def submitted(lab: Lab, folder: Path, verb: list[str], form: str) -> Outcome:
    """Run the script in a folder of its own, until its job has ended."""
    in_work_folder(folder)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, lab.uid, lab.gid)
    path = lab.run(["printenv", "PATH"]).stdout.strip()
    environment = [f"PATH={folder}/bin:{path}", f"SHOWN={' '.join(SHOWN)}", "SLURM_GPUS_ON_NODE=2", "WITH_CONDA=true"]
    options = ["-W", "-t5", "-o", f"{folder}/out", "-e", f"{folder}/err"]
    own = SETTINGS.get(form, []) if "slurmft" in verb else []
    argv = ["env", *environment, *verb, *own, *options, f"{form}.sh", *ARGUMENTS.get(form, [])]
    result = lab.run(argv, cwd=folder, check=False, timeout=900)
    out, err = (path.read_text() if (path := folder / name).exists() else "" for name in ("out", "err"))
    records = [json.loads(line) for path in folder.glob("runs/*.launches") for line in path.read_text().splitlines()]
    ended = [record for record in records if record.get("code") is not None]
    said = [line for line in err.splitlines() if line.startswith("slurmft")]
    return Outcome(code=result.returncode, submission=result.stdout + result.stderr, said=said,
                   lines=sorted(out.splitlines()), runs=[str(record["words"]) for record in ended])  # fmt: skip


def comparable(line: str, folder: Path) -> str:
    """The line without what is different in any two jobs."""
    return re.sub(r"\bn\d\b|\d+:\d+:\d+|\d+\.\d+\.\d+\.\d+|-\d+\b", "N", line).replace(str(folder), "W")


def places(folder: Path) -> list[str]:
    """What each trainer was told, without what is different in any two jobs."""
    found = set()
    for path in folder.glob("place-*.json"):
        facts = json.loads(path.read_text())
        facts["place"] = {name: value for name, value in facts["place"].items() if not OF_ONE_PROCESS.fullmatch(name)}
        found.add(json.dumps(facts, sort_keys=True).replace(str(folder), "W"))
    return sorted(found)


@pytest.fixture(scope="module")
def outcomes(lab: Lab) -> Iterator[dict[tuple[str, str], tuple[Outcome, Path]]]:
    """Of each form under both verbs; many wait in the queue at a time."""
    base = lab.home / "forms"
    base.mkdir()
    os.chown(base, lab.uid, lab.gid)
    verbs = {"plain": ["sbatch"], "ours": ["slurmft", "sbatch"]}
    pairs = [(form, how) for form in FORMS for how in verbs]
    with ThreadPoolExecutor(12) as pool:
        found = pool.map(lambda pair: submitted(lab, base / f"{pair[0]}-{pair[1]}", verbs[pair[1]], pair[0]), pairs)
        yield {pair: (outcome, base / "-".join(pair)) for pair, outcome in zip(pairs, found, strict=True)}


@pytest.mark.long
@pytest.mark.parametrize("form", [form for form in FORMS if form not in REFUSED])
def test_a_script_does_what_it_does_under_sbatch(
    outcomes: dict[tuple[str, str], tuple[Outcome, Path]], form: str
) -> None:
    (plain, its_folder), (ours, folder) = outcomes[form, "plain"], outcomes[form, "ours"]
    expected = sorted(comparable(line, its_folder) for line in plain.lines)
    logs = "".join(path.read_text()[-1500:] for path in folder.glob("runs/*/logs/*.log"))
    err = (folder / "err").read_text()[-3000:] if (folder / "err").exists() else "it never began"
    told = f"{ours.code}: {ours.said}\n{ours.submission}\n{err}\n{logs}"
    assert sorted(comparable(line, folder) for line in ours.lines) == expected, told
    assert places(folder) == places(its_folder), told
    assert ours.code == plain.code, told
    assert len(ours.runs) == RUNS[form], told
    assert not SAID.get(form) or any(SAID[form] in line for line in ours.said), told


@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_be_done_is_refused_before_it_is_submitted(
    outcomes: dict[tuple[str, str], tuple[Outcome, Path]], form: str
) -> None:
    ours, _ = outcomes[form, "ours"]
    assert ours.code == 2
    assert REFUSED[form] in ours.submission
    assert "Submitted" not in ours.submission
