#!/bin/bash
#SBATCH -N1
trap 'echo cleaned up' EXIT
srun python train.py
