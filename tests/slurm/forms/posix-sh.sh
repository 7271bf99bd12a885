#!/bin/sh
#SBATCH -N1 -n2
srun python train.py
