#!/bin/bash
#SBATCH -N1
said=$(srun sh -c 'python train.py --quietly; echo aside >&2')
echo "said: $said"
