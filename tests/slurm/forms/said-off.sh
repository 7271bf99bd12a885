#!/bin/bash
#SBATCH -N1
SLURMFT=off srun python train.py
