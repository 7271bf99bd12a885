"""The configuration of a run: one module per section, the settings, their documentation and their defaults, once."""
