#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1
srun torchrun --standalone --nproc_per_node=2 train.py
