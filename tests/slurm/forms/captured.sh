#!/bin/bash
#SBATCH -N1
said=$(srun python train.py --quietly)
echo "said: ${said%%\{*}"
