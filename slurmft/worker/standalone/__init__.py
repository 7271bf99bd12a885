"""Tools for training loops that have neither a session nor an agent."""
