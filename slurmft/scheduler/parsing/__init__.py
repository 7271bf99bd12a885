"""What Slurm printed, as values. Pure; tested on recorded output."""
