"""Actions after a verdict: the decision in the journal, then the requeue, the successor, the nodes to avoid."""
