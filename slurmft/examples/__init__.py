"""Training scripts to start from: one written for slurmft, one that has never heard of it."""
