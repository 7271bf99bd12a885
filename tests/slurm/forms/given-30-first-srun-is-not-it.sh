#!/bin/bash
#SBATCH --nodes 2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --output=%N-%j.out

## environments on all nodes ##
srun -N $SLURM_NNODES -n $SLURM_NNODES prepare_env.sh

export HEAD_NODE=$(hostname)
export HEAD_NODE_PORT=34567
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint $HEAD_NODE:$HEAD_NODE_PORT real_train.py
