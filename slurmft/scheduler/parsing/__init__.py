"""Slurm's output as values. Pure; tested on recorded output."""
