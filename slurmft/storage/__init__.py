"""The run folder and its files. No torch, no Slurm."""
