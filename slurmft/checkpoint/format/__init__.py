"""What lies where in a checkpoint, and how it is read and checked."""
