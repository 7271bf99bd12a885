#!/bin/bash
#SBATCH -N2 -n3
srun python train.py
