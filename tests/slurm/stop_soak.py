"""Hundreds of stops of a framework's training, counted in a file: a soak goes on where an earlier one ended."""

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm.conftest import Run, eventually

WANTED = int(os.environ.get("SLURMFT_SOAK_STOPS", "100"))

PART_S = 60 * float(os.environ.get("SLURMFT_SOAK_MINUTES", "0"))
"""Seconds after which no stop is begun any more; 0: until all have been made."""

STOPS_PER_RUN = 20

START_S = 400.0
"""Four imports of a framework on a machine that others load as well."""

HURRY = "hurry"
"""A file in the folder of the training; from then on it does not wait in its steps."""


class Book:
    """A line for each run whose stops were all good: seed, digest of the final weights, step of each stop."""

    def __init__(self, name: str) -> None:
        self._path = Path(os.environ.get("SLURMFT_SOAK_BOOKS", "build")) / f"soak-{name}.tsv"
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self._path.read_text().splitlines()] if self._path.exists() else []

    def stops(self) -> int:
        return sum(len(steps) for _seed, _digest, *steps in self.lines())

    def add(self, seed: int, digest: str, steps: list[int]) -> None:
        with self._path.open("a") as file:
            file.write(" ".join([str(seed), digest, *map(str, steps)]) + "\n")

    def calm_digest(self, made_with: str, run: Callable[[], str]) -> str:
        """The digest of an undisturbed training, which is run once for these versions."""
        path = self._path.with_suffix(".calm")
        known = dict(line.rsplit(" ", 1) for line in path.read_text().splitlines()) if path.exists() else {}
        if made_with not in known:
            known[made_with] = run()
            path.write_text("".join(f"{key} {digest}\n" for key, digest in known.items()))
        return known[made_with]

    def seeds_until_done(self) -> Iterator[tuple[int, int]]:
        """Seeds of the runs that are still to be made, and the stops that are missing."""
        began = time.monotonic()
        while (missing := WANTED - self.stops()) > 0 and (not PART_S or time.monotonic() < began + PART_S / 2):
            yield 1000 + len(self.lines()), missing


def stop_at_random_moments(
    run: Run, dice: random.Random, *, stops: int, longest_s: float, hurry: Path, check: Callable[[int], None]
) -> list[int]:
    """Submit it, send it ``stops`` TERMs at random moments, and wait for its end; the steps it stopped at.

    ``check`` is called with the step of each stop, while the job is on its way through the queue.
    """
    job = run.submit()
    found, began = list[int](), time.monotonic()
    while len(found) < stops and not (PART_S and time.monotonic() > began + PART_S):
        run.wait_for("first step", len(found) + 1, START_S)
        time.sleep(dice.uniform(0.0, longest_s))
        run.lab.run(["scancel", "--signal=TERM", dice.choice(["--full", "--batch"]), job], check=False)
        verdict = run.wait_for("verdict", len(found) + 1).details
        agreed = run.events("stop agreed")[-1].details["step"]
        assert verdict["saved_step"] == verdict["last_step"] == agreed, "each stop has saved the step it stopped at"
        found.append(agreed)
        check(agreed)
    with contextlib.suppress(OSError):
        hurry.touch()
    run.wait_until_done(START_S)
    assert found == sorted(set(found)), f"each start went on behind the last one\n{run.story()}"
    eventually(lambda: len(run.events("verdict")) > len(found), 30, run.story)
    assert len(run.events("verdict")) == len(run.events("requeued")) + 1 == len(found) + 1, run.story()
    assert run.folder.jobs() == [job]
    return found
