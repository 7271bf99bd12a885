#!/bin/bash
#SBATCH --job-name=olm
#SBATCH --output=logs/%j.log
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --requeue

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export CXI_FORK_SAFE=1
srun \
  --cpus-per-task=$SLURM_CPUS_PER_TASK \
  --distribution=block:block \
  --kill-on-bad-exit \
  scripts/with_env.sh \
  python src/train.py configs/7b.yaml --run_name=${SLURM_JOB_NAME}_x
