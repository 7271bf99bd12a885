"""What a fuzzed input starts from: runs of the caller and of another user, an exclusion list, results of nodes.

The runs come from a real local run of the code at hand, so that the files have today's formats; two are turned into
runs of Slurm that have lost their job. Slurm's commands are stand-ins that answer with recorded text and write down
every call.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CALLER = 54321
"""User id of the caller; another number than that of any account, so that nothing on the machine is theirs."""

STRANGER = 54322

FINISHED, LOST, FOREIGN = "alpha", "beta", "gamma"
BATCH = "batch"
"""A configuration with a section inference; its run is not there yet."""


TRAINER = ["python", "-m", "slurmft.examples.byte_gpt", "--steps", "4", "--channels", "8", "--layers", "1", "--window",
           "8", "--batch-size", "1", "--limit-bytes", "4000", "--eval-every", "100"]  # fmt: skip

_COMMANDS = ("squeue", "sinfo", "scontrol", "sacct", "sacctmgr", "sbatch", "scancel", "srun", "scrontab")
_STAND_IN = r"""#!/bin/sh
echo "$(id -u) ${0##*/} $*" >> "$FUZZ_CALLS"
name=${0##*/}
case "$name $*" in
    *"show config"*) name=config ;;
    *"show partition"*) name=partition ;;
    *"show job"*) name=job ;;
    scontrol*) name=nothing ;;
    sbatch*--test-only*) name=nothing ;;
esac
if [ -e "$FUZZ_ANSWERS/$name.error" ]; then cat "$FUZZ_ANSWERS/$name.error" >&2; exit 1; fi
[ -e "$FUZZ_ANSWERS/$name" ] || exit 0
for word; do last_but_one=$last; last=$word; [ "$last_but_one" = -o ] && format=$word; done
case "$name" in
    squeue|sinfo) printf '%s\n' "$format" | sed -f "$FUZZ_ANSWERS/$name" ;;
    *) cat "$FUZZ_ANSWERS/$name" ;;
esac
"""
_LETTERS = {
    "squeue": {"i": "7", "T": "RUNNING", "r": "None", "N": "n[1-2]", "B": "n1", "S": "1790000000", "e": "1799000000",
               "l": "2:00:00", "P": "low", "j": "beta", "u": "user", "U": str(CALLER), "V": "1790000000",
               "Z": "/home/user", "o": "/home/user/job.sh", "n": ""},
    "sinfo": {"N": "n1", "T": "idle", "E": "none", "P": "low", "n": "n1", "R": "low"},
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """One copy of everything."""

    folder: Path

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def calls(self) -> Path:
        """Every call of a stand-in: user id, command, arguments."""
        return self.folder / "calls"

    @property
    def outside(self) -> Path:
        """What no verb has any business with."""
        return self.folder / "outside"

    @property
    def executed(self) -> Path:
        """What a run's own script or command would leave."""
        return self.folder / "executed"

    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder / "home"), "LANG": "C.UTF-8",
            "SLURMFT_RUNS": str(self.runs), "SLURM_CONF": str(self.folder / "slurm.conf"),
            "FUZZ_CALLS": str(self.calls), "FUZZ_ANSWERS": str(self.folder / "answers"),
            "SLURMFT_HEALTH_CONFIG": str(self.folder / "health.yaml"), "TMPDIR": str(self.folder / "tmp"),
            "XDG_STATE_HOME": str(self.folder / "home"),
        }  # fmt: skip

    def move_to(self, folder: Path) -> World:
        """The same world at another place, its own paths in every text written anew; modes, times and owners stay."""
        subprocess.run(["cp", "-a", "--", str(self.folder), str(folder)], check=True)
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix not in (".distcp", ".pkl", ".metadata"):
                status, old = path.stat(), path.read_bytes()
                path.write_bytes(old.replace(os.fsencode(self.folder), os.fsencode(folder)))
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        for run in (LOST, FOREIGN):
            owner = folder / "runs" / run / "owner.json"
            value = {**json.loads(owner.read_text()), "inode": owner.parent.stat().st_ino}
            owner.write_text(json.dumps(value))
        return World(folder)


def build(folder: Path) -> World:
    """The first world; takes some ten seconds, most of them for the run."""
    world = World(folder)
    for each in (world.runs, world.outside, folder / "bin", folder / "home", folder / "tmp", folder / "answers"):
        each.mkdir(parents=True)
    _slurm(world)
    config = world.folder / "alpha.yaml"
    config.write_text(json.dumps({
        "command": TRAINER, "run_folder": str(world.runs / FINISHED), "nodes": 1, "nproc_per_node": 1,
        "checkpoint": {"interval_steps": 2}, "slurm": {"time": "30", "partition": "low"},
        "exclusions": {"path": str(world.folder / "excluded.json")},
    }))  # fmt: skip
    (world.folder / "requests.jsonl").write_text('{"custom_id": "a", "prompt": "x"}\n{"prompt": "y"}\n')
    (world.folder / f"{BATCH}.yaml").write_text(json.dumps({
        "run_folder": str(world.runs / BATCH), "slurm": {"time": "30", "partition": "low"},
        "exclusions": {"path": str(world.folder / "excluded.json")},
        "inference": {"input": str(world.folder / "requests.jsonl"), "engine": {"url": "http://127.0.0.1:9"}},
    }))  # fmt: skip
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    for name in [name for name in environment if name.startswith(("SLURM", "SBATCH"))]:
        del environment[name]
    subprocess.run([sys.executable, "-m", "slurmft", "submit", str(config), "--cluster", "local", "--wait"],
                   check=True, env=environment, cwd=folder, capture_output=True, timeout=200)  # fmt: skip
    _turn_into_a_lost_run(world, LOST)
    _turn_into_a_lost_run(world, FOREIGN)
    (world.outside / "precious").write_text("precious")
    (world.outside / "folder").mkdir()
    (world.outside / "folder" / "inner").write_text("inner")
    _lists(world, environment)
    if os.getuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            owner = STRANGER if {world.runs / FOREIGN, world.outside} & {path, *path.parents} else CALLER
            os.lchown(path, owner, owner)
        for path in [world.runs / FOREIGN, *(world.runs / FOREIGN).rglob("*")]:
            path.chmod(0o777 if path.is_dir() else 0o666)
    folder.chmod(0o755)
    return world


def _slurm(world: World) -> None:
    stand_in = world.folder / "bin" / "squeue"
    stand_in.write_text(_STAND_IN)
    stand_in.chmod(0o755)
    for name in _COMMANDS[1:]:
        shutil.copy2(stand_in, stand_in.with_name(name))
    answers = world.folder / "answers"
    for recorded in (Path(__file__).parent / "answers").iterdir():
        shutil.copy(recorded, answers / recorded.name)
    for name, letters in _LETTERS.items():
        (answers / name).write_text("".join(f"s\x01%{letter}\x01{value}\x01g\n" for letter, value in letters.items()))
    (answers / "sacct").write_text("FAILED\n")
    (answers / "sbatch").write_text("8\n")
    (world.folder / "slurm.conf").write_text("ClusterName=fuzz\n")
    world.calls.touch()
    world.calls.chmod(0o666)


def _turn_into_a_lost_run(world: World, name: str) -> None:
    """Of Slurm, not finished, its job forgotten: what a rescue continues."""
    run = world.runs / name
    shutil.copytree(world.runs / FINISHED, run)
    (run / "done.json").unlink()
    for path in run.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".yaml"):
            text = path.read_text().replace(str(world.runs / FINISHED), str(run))
            path.write_text(re.sub(r"local-\d+", "7", text).replace('"local"', '"slurm"'))
    for path in sorted((run / "attempts").iterdir()):
        path.rename(path.with_name(re.sub(r"local-\d+", "7", path.name)))
    journal = run / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"finished"' not in line and '"decision"' not in line))
    owner = json.loads((run / "owner.json").read_text())
    (run / "owner.json").write_text(json.dumps({**owner, "inode": run.stat().st_ino, "folder": str(run)}))
    script = f"#!/bin/sh\n#SBATCH --job-name={name}\ntouch {world.executed}\n"
    (run / "job.sh").write_text(script)
    (world.folder / f"{name}.yaml").write_text((run / "config.yaml").read_text())


def _lists(world: World, environment: dict[str, str]) -> None:
    def slurmft(*arguments: str) -> None:
        argv = [sys.executable, "-m", "slurmft", *arguments]
        everything = environment | world.environment()
        subprocess.run(argv, check=False, env=everything, cwd=world.folder, capture_output=True, timeout=60)

    config = str(world.folder / "alpha.yaml")
    (world.folder / "health.yaml").write_text(json.dumps({"results_folder": str(world.folder / "results")}))
    slurmft("exclude", "add", "n3", "--reason", "xid 79", "--config", config)
    slurmft("health", "--context", "cron", "--only", "memory")
    slurmft("sweep", "--config", config)
