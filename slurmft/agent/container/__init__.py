"""The two sides of a container that an agent runs in: outside, and inside."""
