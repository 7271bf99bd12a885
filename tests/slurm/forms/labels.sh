#!/bin/bash
#SBATCH -N1 -n2
srun -l python train.py
