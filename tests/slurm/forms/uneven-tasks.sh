#!/bin/bash
#SBATCH -N2 -n3 --exclusive
srun python train.py
