#!/bin/bash
# Purpose: train one run under slurmft in a Slurm job. Copy it (`slurmft examples train.sh > train.sh`), edit it, submit
#          it: CONFIG=my.yaml sbatch train.sh
#          `slurmft submit CONFIG` writes such a script by itself; this one is for those who keep their own.
# Needs:   slurmft installed where every node sees it, in PATH or named by SLURMFT, and a configuration whose
#          `nodes` equals --nodes below; time, partition and GPUs are asked for here, not in its `slurm` section.
# Writes:  the run folder named in the configuration; the log of --output in the folder you submit from.

#SBATCH --job-name=slurmft
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=30
#SBATCH --signal=SIGTERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurmft-%j.log

# --nodes            the configuration's `nodes`
# --ntasks-per-node  always 1: one agent on each node starts that node's workers (`nproc_per_node`)
# --signal           SIGTERM to the steps, 120 s before the time limit; the lead is `preemption.signal_lead_s`.
#                    Never B:TERM: it would reach this script only, and the workers would not save.
# --requeue          lets slurmft put the job back into the queue after it has saved
# --open-mode        append: a requeued job keeps the log of its earlier starts

set -euo pipefail

# Set them here, or in the environment: CONFIG=my.yaml sbatch train.sh
# Relative paths start at the job's working folder: where you submit, or --chdir.
# Not as arguments: a successor job, submitted where the site forbids requeueing, inherits only the environment.
: "${CONFIG:=configs/quickstart.yaml}"
: "${SLURMFT:=$(command -v slurmft || echo bin/slurmft)}"

# exec: the supervisor must be the batch step's own process, since Slurm's signals and the exit code pass through it
exec "$SLURMFT" run "$CONFIG"
