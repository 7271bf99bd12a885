"""Files, processes and authentication on one machine, for all other packages."""
