"""Files, processes and authentication on one machine: what every other package may use."""
