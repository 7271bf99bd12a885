"""Ten batch scripts as people write them, under `slurmft sbatch`: preempted, requeued, a rank killed, a node lost.

Their trainer saves by itself, every few steps and at a signal. Whatever happens, the script goes on behind its launch,
once, and the result is that of an undisturbed training.
"""

import hashlib
import os

import pytest

from slurm.conftest import PATIENCE_S, eventually, preempt
from slurm.test_script_life import Script
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(900)]

STEPS = 200
TRAINER = """
import argparse, hashlib, os, signal, sys, time
rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
given = argparse.ArgumentParser()
given.add_argument("--steps", type=int)
given.add_argument("--out", default="state")
given, others = given.parse_known_args()
step, state, path = 0, "", f"{given.out}-{rank}"
if os.path.exists(path):
    step, state = open(path).read().split(",")
    step = int(step)
def save():
    with open(path + ".new", "w") as file:
        file.write(f"{step},{state}")
    os.replace(path + ".new", path)
told = []
for each in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(each, lambda number, frame: told.append(number))
print("begins", rank, "at", step, "pid", os.getpid(), flush=True)
while step < given.steps and not told:
    time.sleep(0.1)
    state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    step += 1
    if step % 20 == 0:
        save()
save()
if told:
    sys.exit(128 + told[0])
print("final", rank, state, flush=True)
"""
SCRIPTS = {
    "plain srun": """#!/bin/bash
#SBATCH --job-name=gpt --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --time=10 --output=out
set -x
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun python3 train.py --steps {steps}
""",
    "addresses": """#!/bin/bash
#SBATCH -J pretrain
#SBATCH -N 2
#SBATCH --ntasks-per-node 1
#SBATCH -t 00:10:00
#SBATCH -o out
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
export MASTER_ADDR=${{nodes[0]}} MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
echo "head $MASTER_ADDR of ${{#nodes[@]}}"
srun --kill-on-bad-exit=1 python3 -u train.py --steps {steps} --master $MASTER_ADDR
""",
    "a launcher in a variable": """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 -t10 -o out
CMD="train.py --steps {steps} --lr 3e-4"
LAUNCHER="python3 -u"
srun --jobid $SLURM_JOBID bash -c "$LAUNCHER $CMD" 2>&1 | tee -a main.log
""",
    "a loop over phases": """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 -t10 -o out
set -euo pipefail
for phase in warmup main; do
    srun python3 train.py --steps {steps} --out "state" --phase $phase
done
""",
    "a heredoc and a copy": """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 -t10 -o out
cat > settings.json <<JSON
{{"steps": {steps}}}
JSON
srun --ntasks-per-node=1 cp settings.json /tmp/
srun python3 train.py --steps {steps} --settings settings.json
rm -f settings.json
""",
    "a strict shell with a trap": """#!/usr/bin/env bash
#SBATCH -N2 --ntasks-per-node=1 -t10 -o out
set -Eeuo pipefail
trap 'echo "cleaning $SLURM_JOB_ID"' EXIT
srun --unbuffered python3 train.py --steps {steps}
""",
    "a handler that requeues": """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 -t10 -o out --signal=B:USR1@60 --requeue
requeue() {{ kill -USR1 $pid; wait $pid; scontrol requeue $SLURM_JOB_ID; exit; }}
trap requeue USR1
srun python3 train.py --steps {steps} &
pid=$!
wait $pid
""",
    "modules and an environment": """#!/bin/bash -l
#SBATCH -N2 --ntasks-per-node=1 -t10 -o out
module() {{ echo "module $*" > /dev/null; }}
module purge; module load cuda/12.4 gcc
source ./activate
ulimit -n 4096
export NCCL_DEBUG=WARN PYTHONUNBUFFERED=1
srun --cpu-bind=none --export=ALL python train.py --steps {steps}
""",
    "a try again": """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 -t10 -o out --open-mode=append
until srun python3 train.py --steps {steps}; do
    code=$?
    [ "$code" -ge 128 ] || exit $code
    echo "again after $code"
done
""",
    "a function in a second file": """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 -t10 -o out
. ./functions.sh
train --steps {steps}
""",
}
END = "echo code $?\n"


def final(steps: int) -> str:
    state = ""
    for step in range(steps):
        state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    return state


@pytest.fixture
def script(lab: Lab, left_idle: None, request: pytest.FixtureRequest) -> Script:
    again = "-again" if getattr(request.node, "execution_count", 1) > 1 else ""
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")
    found = Script(lab, lab.home / f"{name}{again}")
    found.write("train.py", TRAINER)
    found.write("activate", f"export PATH={found.folder}/env:$PATH\n")
    found.write("functions.sh", 'train() { srun python3 train.py "$@"; }\n')
    (found.folder / "env").mkdir()
    (found.folder / "env/python").symlink_to("/usr/bin/python3")
    os.chown(found.folder / "env", lab.uid, lab.gid)
    return found


def saved(script: Script) -> int:
    texts = [path.read_text() for path in script.folder.glob("state-[01]")]
    return min((int(text.partition(",")[0]) for text in texts), default=0) if len(texts) == 2 else 0


def happens(what: str, script: Script, job: str) -> str | None:
    """Do it; the node that must be started again."""
    lab, nodes = script.lab, script.lab.run(["scontrol", "show", "hostnames", script.squeue(job, "%N")]).stdout.split()
    if what == "preempted":
        preempt(lab)
    elif what == "requeued":
        lab.run(["scontrol", "requeue", job])
    elif what == "a rank killed":
        line = next(line for line in script.output().splitlines()[::-1] if line.startswith("begins 1 "))
        lab.run_on_as_admin(nodes[1], ["kill", "-KILL", line.split()[-1]])
    else:
        lab.kill_node(nodes[1])
        return nodes[1]
    return None


@pytest.mark.parametrize("what", ["preempted", "requeued", "a rank killed", "a node lost"])
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_a_script_as_people_write_them_ends_as_if_nothing_had_happened(script: Script, name: str, what: str) -> None:
    text = SCRIPTS[name].format(steps=STEPS) + END
    job = script.submit(text, "-plow", words=("job.sh",))
    eventually(lambda: saved(script) >= 40, 2 * PATIENCE_S, script.story)
    lost = happens(what, script, job)
    try:
        script.wait_for("code 0", within_s=400)
    finally:
        if lost is not None:
            script.lab.start_node(lost)
    script.wait_until_gone(job)
    told = script.output() + "".join(path.read_text() for path in script.folder.glob("main.log"))
    for rank in (0, 1):
        assert f"final {rank} {final(STEPS)}" in told, script.story()
    assert script.output().splitlines().count("code 0") == 1, script.story()
    begun = [int(line.split()[3]) for line in told.splitlines() if line.startswith("begins ")]
    assert max(begun) >= 40, "it went on from what it had saved"
