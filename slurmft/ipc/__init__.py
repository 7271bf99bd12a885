"""What processes of one run say to each other: pages in shared memory, and the control channel."""
