"""What ended an attempt, which rank or node is to blame, and what follows."""
