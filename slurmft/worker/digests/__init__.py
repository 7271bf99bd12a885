"""Digests of the state of each replica, and the first of them, which tell what differs by design."""
