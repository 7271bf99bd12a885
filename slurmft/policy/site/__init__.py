"""What a site, its Slurm, its clouds and its NCCL promise and refuse."""
