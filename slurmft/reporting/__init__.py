"""What a run's journal shows: reports, metrics, the live view."""
