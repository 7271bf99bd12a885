#!/bin/bash
#SBATCH -N1
srun python -u -m train --as-module
