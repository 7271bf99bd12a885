"""How many examples of a property are drawn."""

import os

IS_WHOLE = os.environ.get("SLURMFT_TEST_EXAMPLES") == "all"


def examples(count: int) -> int:
    """A third of them in `make test`, all in `make soak`."""
    return count if IS_WHOLE else count // 3
