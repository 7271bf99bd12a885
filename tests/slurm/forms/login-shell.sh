#!/bin/bash -l
#SBATCH -N1
srun /usr/bin/python3 train.py
