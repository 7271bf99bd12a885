"""The probes themselves: one that looks, one that judges."""
