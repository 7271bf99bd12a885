#!/bin/bash
#SBATCH --nodes=1
cd $SLURM_SUBMIT_DIR
torchrun --nproc_per_node=2 scripts/train.py conf.yaml --load_path="/data/ck/step1/"
