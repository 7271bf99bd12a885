"""Data that goes on exactly where it was, and the random number generators."""
