"""Inside the worker: the session, random number generators, data. The trainer's own code imports from here."""
