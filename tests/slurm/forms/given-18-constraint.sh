#!/bin/bash
#SBATCH -N 2
srun torchrun --nproc_per_node=2 --nnodes=2 t.py
