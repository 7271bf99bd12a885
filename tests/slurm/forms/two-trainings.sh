#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1
srun python train.py --stage 1 && srun -N1 -n1 python train.py --stage 2
