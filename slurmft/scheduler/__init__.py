"""The only package that runs Slurm's commands and submits jobs. Argument lists and command output never leave it."""
