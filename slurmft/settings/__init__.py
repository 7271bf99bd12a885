"""Sections of the configuration that are long enough for a file of their own, and the types of all values."""
