"""Many lives, on all cores: ``make lives SEEDS=0-99999``; the story of one: ``make lives STORY=SEED``."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from lives.life import live, story

MOST = 8
"""Faults in a life; ``make test`` has fewer, and shorter stories."""

EVERY_S = 30.0


def _violations(seed: int) -> tuple[int, list[str]]:
    return seed, live(seed, most=MOST).violations


def main() -> int:
    """Returns 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="?", default="0-999", metavar="FIRST-LAST")
    parser.add_argument("--story", type=int, metavar="SEED", help="live this one, and tell it")
    options = parser.parse_args()
    if options.story is not None:
        print(story(live(options.story, most=MOST)))
        return 0
    first, _, last = options.seeds.partition("-")
    seeds, began, told_s, found = range(int(first), int(last or first) + 1), time.monotonic(), time.monotonic(), 0
    with multiprocessing.Pool(os.cpu_count(), maxtasksperchild=500) as pool:
        for done, (seed, violations) in enumerate(pool.imap_unordered(_violations, seeds, chunksize=10), 1):
            if violations:
                found += 1
                print(f"seed {seed}: {'; '.join(violations)[:300]}", flush=True)
            if time.monotonic() - told_s > EVERY_S or done == len(seeds):
                told_s = time.monotonic()
                print(f"{done} lives in {told_s - began:.0f} s, {found} with a violation", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
