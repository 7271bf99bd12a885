#!/bin/bash
#SBATCH -N1
PATH=$PWD/other:$PATH
torchrun --nproc_per_node=2 train.py
