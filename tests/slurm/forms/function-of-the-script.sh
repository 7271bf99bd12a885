#!/bin/bash
#SBATCH -N1
run_training() { srun python train.py "$@"; }
run_training --epochs 3
