"""The training of the table of checkpoint intervals."""

STEPS_OF_EPOCH, STEPS, EVERY = 20, 200, (1, 5, 10)
STATE_MIB, STEP_S = 64, 0.05
KILL_AT = 170
"""Before the first save of ten epochs, near the last one of a single epoch."""
