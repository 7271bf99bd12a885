"""``python -m slurmft``."""

from slurmft.cli.main import main

if __name__ == "__main__":
    main()
