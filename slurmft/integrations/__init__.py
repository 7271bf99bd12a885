"""Adapters for training frameworks; each needs its framework only when it is used."""
