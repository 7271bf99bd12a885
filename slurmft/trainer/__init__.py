"""What a session and the checkpoint managers share in the trainer's process: devices, generators, a group, savers."""
