#!/bin/bash
#SBATCH -N1
srun python train.py &
child=$!
wait $child
echo "ended with $?"
