#!/bin/bash
#SBATCH --job-name=titan_like

#SBATCH --ntasks=2

#SBATCH --nodes=2


#SBATCH --cpus-per-task=1


names=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
first=${names[0]}
first_ip=$(srun --nodes=1 --ntasks=1 -w "$first" hostname --ip-address)
echo Address: $first_ip
export LOGLEVEL=INFO
export FI_PROVIDER="efa"
export LD_LIBRARY_PATH=/opt/efa/lib:$LD_LIBRARY_PATH
export NCCL_SOCKET_IFNAME="eth0,en,eth"
MODEL=${MODEL:-"tiny.models.a"}
dcgmi profile --pause
srun torchrun --nnodes 2 --nproc_per_node 2 --rdzv_id 101 --rdzv_backend c10d --rdzv_endpoint "$first_ip:29500" -m titan.train --module ${MODEL} "$@"
dcgmi profile --resume
