#!/bin/bash
#SBATCH -N1
set -euo pipefail
srun python train.py
echo afterwards
