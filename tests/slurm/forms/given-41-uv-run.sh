#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1
uv run torchrun --nproc-per-node 2 src/train.py @ configs/a.toml
