"""The cause of an attempt's end, the rank or node to blame, and the decision that follows."""
