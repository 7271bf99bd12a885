"""Batch inference: requests from files, answered by a pool of replicas, every one exactly once.

In the supervisor: ``coordinator`` (who answers what) and ``ledger`` (what is answered). In the agent: ``pool`` (the
node's replicas). In each replica's process: ``driver``, which owns one engine. Shared: ``requests`` and ``segments``.
"""
