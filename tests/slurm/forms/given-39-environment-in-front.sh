#!/bin/bash
#SBATCH -J ft
#SBATCH -N 1
eval "$(conda shell.bash hook)"
conda activate ft
export WANDB_MODE=offline HF_HOME=/scratch/hf
ulimit -n 65536
OMP_NUM_THREADS=8 torchrun --standalone --nproc_per_node=2 ft.py \
   --model x \
   --bf16   # comment at the end
