"""Inference on a pool of replicas: a batch of requests from files, every one answered exactly once, or an endpoint.

In the supervisor: ``coordinator`` (who answers what) and ``ledger`` (what is answered). In the agent: ``pool`` (the
node's replicas). In each replica's process: ``driver``, which owns one engine. Shared: ``requests``, with the
segments of answers. ``router``, ``gate`` and ``endpoint`` have what an endpoint needs beside them; its
clients are those of OpenAI's interface.
"""
