"""Snapshots in memory, on their way from the trainer's tensors to the writer."""
