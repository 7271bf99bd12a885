"""Probes of a node: what they find, where it is kept, and what Slurm's hooks do with it. No torch, no Slurm commands
in Prolog, Epilog or HealthCheckProgram."""
