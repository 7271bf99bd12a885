"""Training scripts to start from: one written for slurmft, one that does not use it."""
