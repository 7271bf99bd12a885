"""Where a restart reads from, where copies go, and how a run is changed before it is tried again."""
