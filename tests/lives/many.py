"""Many lives, on all cores: ``make lives SEEDS=0-99999``. The first that fail are told, each with the fewest of its
faults with which it still fails; the story of one: ``make lives STORY=SEED``.
"""

import argparse
import gc
import multiprocessing
import os
import sys
import time

from lives import batches
from lives.life import Drawn, life_of, shortest, story

MOST = 8
"""Faults in a life; ``make test`` has fewer, and shorter stories."""

COLLECT_AFTER = 20_000
"""New objects between two collections. With Python's 700, lives take a quarter longer; with no collection, memory."""

EVERY_S = 30.0
TOLD = 5
"""Stories of lives that failed: the others may have the same cause."""


BATCH_EACH = 10
"""One of so many lives answers requests; the others train."""


def _drawn(seed: int) -> Drawn:
    return (life_of if seed % BATCH_EACH else batches.life_of)(seed, most=MOST)


def _violations(seed: int) -> tuple[int, list[str]]:
    drawn = _drawn(seed)
    return seed, drawn.lived(drawn.faults, seed=seed).violations


def tell(seed: int) -> str:
    """The story of this seed, with as few faults as it takes to fail; with all of them where it does not."""
    drawn = _drawn(seed)
    faults = shortest(drawn, seed=seed) or drawn.faults
    world = drawn.lived(faults, seed=seed)
    names = ", ".join(f"{fault.__name__} at {at_s:.2f} s" for at_s, fault in faults)
    return f"seed {seed}, {len(faults)} of {len(drawn.faults)} faults: {names}\n{drawn.settings}\n{story(world)}"


def main() -> int:
    """Returns 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="?", default="0-999", metavar="FIRST-LAST")
    parser.add_argument("--story", type=int, metavar="SEED", help="live this one, and tell it")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N")
    options = parser.parse_args()
    if options.story is not None:
        print(tell(options.story))
        return 0
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    first, _, last = options.seeds.partition("-")
    seeds, began, told_s, found = range(int(first), int(last or first) + 1), time.monotonic(), time.monotonic(), 0
    with multiprocessing.Pool(options.processes, maxtasksperchild=500) as pool:
        for done, (seed, violations) in enumerate(pool.imap_unordered(_violations, seeds, chunksize=10), 1):
            if violations:
                found += 1
                print(f"seed {seed}: {'; '.join(violations)[:300]}", flush=True)
                if found <= TOLD:
                    print(tell(seed), flush=True)
            if time.monotonic() - told_s > EVERY_S or done == len(seeds):
                told_s = time.monotonic()
                print(f"{done} lives in {told_s - began:.0f} s, {found} with a violation", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
