"""What the supervisor sees while an attempt runs: hangs, stragglers, saves."""
