"""Folders of a node that are kept at an address, for scripts that save by themselves; a process below the agent."""
