#!/bin/bash
#SBATCH -N1
exec srun python train.py
