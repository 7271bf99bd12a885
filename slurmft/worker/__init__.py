"""Inside the worker: the session, its process groups, signals and saves. The trainer's own code imports it."""
