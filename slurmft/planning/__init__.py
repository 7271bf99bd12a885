"""Planning: a run's life on a described cluster, simulated with the policy that a real run has."""
