"""Rules about a site, its Slurm, its clouds and its NCCL."""
