"""Suspicion of nodes, which of them a run uses, and what a sweep does with them."""
