"""Measures this rank's own work."""
