"""The agents of a job: started, called, replaced, and the nodes that they stand for."""
