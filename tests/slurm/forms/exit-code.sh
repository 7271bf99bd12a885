#!/bin/bash
#SBATCH -N1 -n2
CODE=7 srun python train.py
code=$?
echo "code $code"
exit $code
