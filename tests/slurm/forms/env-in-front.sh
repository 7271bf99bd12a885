#!/bin/bash
#SBATCH -N1
env MODE=fast srun python train.py
