"""Shared by a session and the checkpoint managers in the trainer's process: devices, generators, a group, savers."""
