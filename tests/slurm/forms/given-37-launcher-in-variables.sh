#!/bin/bash
# two nodes, launcher put together from pieces
#SBATCH --job-name=pieces
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1          # one per node, always
#SBATCH --cpus-per-task=1           # all of them
#SBATCH                 # whole nodes
#SBATCH --output=%x-%j.out
echo "begin: $(date)"
set -eo pipefail
set -x
LOG="run_log.txt"
GPUS=2
N=$SLURM_NNODES
HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
PORT=6123
START="python -u -m torch.distributed.run \
    --nproc_per_node $GPUS \
    --nnodes $N \
    --rdzv_endpoint $HEAD:$PORT \
    --rdzv_backend c10d \
    --max_restarts 0 \
    --role `hostname -s`: \
    --tee 3 \
    "
WHAT="\
pretrain.py --width 64 \
"
export CMD="$START $WHAT"
echo $CMD
EXTRA=" \
    --wait=60 \
    --kill-on-bad-exit=1 \
    "
srun $EXTRA --jobid $SLURM_JOB_ID bash -c "$CMD" 2>&1 | tee -a $LOG
echo "end: $(date)"
