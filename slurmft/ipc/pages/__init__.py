"""Pages that a worker and its agent share: written and read without a system call."""
