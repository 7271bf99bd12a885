"""How long things took in earlier attempts and runs: one bounded file each."""
