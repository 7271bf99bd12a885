#!/bin/bash
#SBATCH -N2 --ntasks-per-node=2
srun python train.py --lr 0.1 "two words" 'a$b'
