"""Supervisor, agents, workers' processes, and what passes between them. No torch, except in the zygote's preload."""
