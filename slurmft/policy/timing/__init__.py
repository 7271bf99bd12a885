"""How long things may take: stops, grace, hangs, stragglers, and how far apart checkpoints are."""
