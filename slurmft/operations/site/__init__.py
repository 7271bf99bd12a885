"""Looks at a site: what works there, what it lacks, and a rehearsed preemption."""
