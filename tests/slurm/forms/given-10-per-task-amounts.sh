#!/bin/bash
#SBATCH --job-name=pl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --signal=SIGUSR1@90
srun python train.py --nodes 2 --devices 4
