#!/bin/bash
#SBATCH -N1 -n2
srun -o part-%j-%t.txt python train.py
cat part-$SLURM_JOB_ID-0.txt part-$SLURM_JOB_ID-1.txt
