#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=2
srun bash -c "source venv/bin/activate && python train.py --lr 0.1"
