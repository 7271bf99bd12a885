#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1
set -o pipefail
srun python train.py 2>&1 | tee train-$SLURM_JOB_ID.log | sed 's/^/piped /'
