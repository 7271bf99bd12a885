#!/bin/bash
#SBATCH -N1
accelerate launch --num_processes 2 train.py
