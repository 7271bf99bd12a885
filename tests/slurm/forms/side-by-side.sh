#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1
srun -N1 -n1 -r0 python train.py --part 0 &
srun -N1 -n1 -r1 python train.py --part 1 &
wait
echo both
