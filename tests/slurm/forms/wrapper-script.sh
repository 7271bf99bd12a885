#!/bin/bash
#SBATCH -N1
srun ./with_env.sh python train.py
