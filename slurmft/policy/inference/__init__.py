"""Decisions of inference: what follows an answer, how much at a time, and which request kills engines."""
