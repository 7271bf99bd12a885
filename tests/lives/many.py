"""Many lives, on all cores: ``make lives SEEDS=0-99999``. The first that fail are told, each with the fewest of its
faults with which it still fails; the story of one: ``make lives STORY=SEED``.
"""

import argparse
import functools
import gc
import multiprocessing
import os
import random
import sys
import time
from dataclasses import replace

from lives import batches, faults
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


STEPPED_IN_EACH = 7
"""Into one of so many lives a person steps in, whatever else befalls them: most are to be lived to their end."""


def _drawn(seed: int, *, stepped_in: bool) -> Drawn:
    drawn = (life_of if seed % BATCH_EACH else batches.life_of)(seed, most=MOST)
    if not stepped_in and seed % STEPPED_IN_EACH:
        return drawn
    chance, befalls = random.Random(f"stepped in {seed}"), list(drawn.faults)
    befalls.append(faults.stepped_in(chance, befalls, in_slurm=drawn.in_slurm is not None))
    return replace(drawn, faults=sorted(befalls, key=lambda each: each[0]))


def _violations(seed: int, *, stepped_in: bool) -> tuple[int, list[str]]:
    drawn = _drawn(seed, stepped_in=stepped_in)
    return seed, drawn.lived(drawn.faults, seed=seed).violations


def tell(seed: int, *, stepped_in: bool) -> str:
    """The story of this seed, with as few faults as it takes to fail; with all of them where it does not."""
    drawn = _drawn(seed, stepped_in=stepped_in)
    least = shortest(drawn, seed=seed) or drawn.faults
    world = drawn.lived(least, seed=seed)
    names = ", ".join(f"{fault.__name__} at {at_s:.2f} s" for at_s, fault in least)
    return f"seed {seed}, {len(least)} of {len(drawn.faults)} faults: {names}\n{drawn.settings}\n{story(world)}"


def main() -> int:
    """Returns 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="?", default="0-999", metavar="FIRST-LAST")
    parser.add_argument("--story", type=int, metavar="SEED", help="live this one, and tell it")
    parser.add_argument("--stepped-in", action="store_true", help="a person steps in in each of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N")
    options = parser.parse_args()
    if options.story is not None:
        print(tell(options.story, stepped_in=options.stepped_in))
        return 0
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    first, _, last = options.seeds.partition("-")
    seeds, began, told_s, found = range(int(first), int(last or first) + 1), time.monotonic(), time.monotonic(), 0
    live = functools.partial(_violations, stepped_in=options.stepped_in)
    with multiprocessing.Pool(options.processes, maxtasksperchild=500) as pool:
        for done, (seed, violations) in enumerate(pool.imap_unordered(live, seeds, chunksize=10), 1):
            if violations:
                found += 1
                print(f"seed {seed}: {'; '.join(violations)[:300]}", flush=True)
                if found <= TOLD:
                    print(tell(seed, stepped_in=options.stepped_in), flush=True)
            if time.monotonic() - told_s > EVERY_S or done == len(seeds):
                told_s = time.monotonic()
                print(f"{done} lives in {told_s - began:.0f} s, {found} with a violation", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
