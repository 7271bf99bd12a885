"""The supervisor of an inference run: its attempts, and their stops."""
