#!/bin/bash
#SBATCH --nodes=1
if [ -f ckpt/last.pt ]; then
  RESUME="--resume ckpt/last.pt"
else
  RESUME=""
fi
srun python train.py --epochs 10 $RESUME
