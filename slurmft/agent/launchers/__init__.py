"""Launchers of other projects under the agent, which sees each of their nodes as a worker of its own."""
