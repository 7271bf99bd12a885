#!/bin/bash
#SBATCH -N1
torchrun --nproc_per_node=2 train.py 2> errors.txt
wc -l < errors.txt
