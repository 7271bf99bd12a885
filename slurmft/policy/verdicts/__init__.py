"""What ended an attempt, who is to blame, and what is done about it."""
