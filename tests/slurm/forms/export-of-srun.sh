#!/bin/bash
#SBATCH -N1
export KEPT=1 DROPPED=1
srun --export=PATH,KEPT,MODE=given python train.py
