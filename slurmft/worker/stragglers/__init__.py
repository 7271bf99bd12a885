"""How long this rank works for itself, measured."""
