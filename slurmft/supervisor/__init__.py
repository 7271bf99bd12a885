"""The supervisor of a run: one process per job, from taking the run over to acting on its verdict."""
