#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
module purge
module load pytorch
export DATADIR=/scratch/p3/data
export TMPDIR=$LOCAL_SCRATCH
set -xv
srun torchrun --standalone --nproc_per_node=$SLURM_GPUS_ON_NODE main.py
