"""Checks of GPUs and of pairs of nodes, each a program of its own."""
