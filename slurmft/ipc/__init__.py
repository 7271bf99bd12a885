"""Communication between processes of one run: pages in shared memory, and the control channel."""
