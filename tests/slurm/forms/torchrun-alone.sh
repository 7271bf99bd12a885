#!/bin/bash
#SBATCH -N1
torchrun --standalone --nproc_per_node=2 train.py --lr 1
