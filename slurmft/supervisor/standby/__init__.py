"""A second supervisor on another node of the job, which takes over when the first one is gone."""
