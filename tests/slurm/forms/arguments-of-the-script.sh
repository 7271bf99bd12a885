#!/bin/bash
#SBATCH -N1
srun python train.py "$@" --count $#
