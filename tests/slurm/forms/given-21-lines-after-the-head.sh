#!/bin/bash
#SBATCH --job-name=broken
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH
--mem=32G
#SBATCH
python train.py
