"""The layout of a checkpoint, and how it is read and checked."""
