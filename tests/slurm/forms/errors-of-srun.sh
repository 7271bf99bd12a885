#!/bin/bash
#SBATCH -N1
srun -o own-out.txt -e own-err.txt sh -c 'python train.py; echo aside >&2'
sed 's/^/out /' own-out.txt
sed 's/^/err /' own-err.txt
