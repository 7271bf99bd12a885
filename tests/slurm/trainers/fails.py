"""A trainer that saves nothing, and whose chosen rank fails at its start as often as it is told to."""

import argparse
import os
import time
from pathlib import Path

from slurmft import start_session


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--times", type=int)
    parser.add_argument("--step-delay", type=float, default=0.0)
    args = parser.parse_args()
    earlier = len(list(Path(os.environ["SLURMFT_RUN_FOLDER"]).glob("attempts/*"))) - 1
    with start_session(seed=1) as session:
        for step in session.steps(start=0, until=4, save=lambda step: None):
            if step == 2 and session.rank == args.rank and earlier < args.times:
                raise ArithmeticError(f"failure {earlier + 1} of {args.times}")
            time.sleep(args.step_delay)


if __name__ == "__main__":
    main()
