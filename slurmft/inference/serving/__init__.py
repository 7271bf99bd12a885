"""An endpoint on the replica pool: routers that clients talk to, and a gate in front of each engine.

In each replica's process: ``driver`` with its ``gate``. In each router's process: ``entry``, ``router`` and
``replicas``. In the supervisor: ``roster``. ``endpoint`` has the files by which clients find the routers.
"""
