#!/bin/bash
#SBATCH -N1
python prepare.py
#SLURMFT train
python train.py --alone
