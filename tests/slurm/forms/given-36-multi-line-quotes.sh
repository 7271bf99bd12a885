#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
head=`srun sh -c 'if test $SLURM_PROCID -eq 0; then hostname; fi'`
srun sh -xeuc '
     torchrun \
       --master-addr '$head' \
       --nnodes $SLURM_NNODES \
       --node-rank $SLURM_NODEID \
       --nproc-per-node 2 \
       main.py'
