#!/bin/bash
#SBATCH -N2 --ntasks-per-node=2
srun --distribution=cyclic python train.py
