#!/bin/bash -l
#SBATCH -N1
srun python train.py
