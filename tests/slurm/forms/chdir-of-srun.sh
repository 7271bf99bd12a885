#!/bin/bash
#SBATCH -N1
mkdir -p below && cp train.py below
srun --chdir=below python train.py
