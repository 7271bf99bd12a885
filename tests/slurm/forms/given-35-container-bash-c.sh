#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
module use /appl/training/modules
module load singularity-userfilesystems
C=/appl/containers/lumi-torch.sif
srun singularity exec $C bash -c '$WITH_CONDA && source myenv/bin/activate && python -m torch.distributed.run --standalone --nnodes=1 --nproc_per_node=2 vit.py'
