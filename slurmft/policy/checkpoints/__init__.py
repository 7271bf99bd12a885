"""Where a restart reads from, where copies go, and what a run changes about itself before it is tried again."""
