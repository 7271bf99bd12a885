"""What the supervisor monitors while an attempt runs: hangs, stragglers, saves."""
