#!/bin/bash
#SBATCH -N1
/usr/bin/srun python train.py
