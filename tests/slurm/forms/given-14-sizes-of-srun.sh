#!/bin/bash
#SBATCH --nodes=1
#SBATCH --cpus-per-task=2
srun -n 2 --cpus-per-task=1 python pre.py
