"""Seconds that commands take, in turns: ``python time_commands.py ROUNDS < commands.json``; JSON on standard output.

The commands are a JSON object, label to argument list or to several argument lists that are run one after the other.
``{n}`` in an argument becomes a number that no other run of it has.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time

NUMBERS = itertools.count()


def seconds(argvs: list[list[str]]) -> float:
    number = str(next(NUMBERS))
    filled = [[word.replace("{n}", number) for word in argv] for argv in argvs]
    began = time.perf_counter()
    for argv in filled:
        subprocess.run(argv, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main(rounds: int) -> None:
    commands = json.load(sys.stdin)
    times: dict[str, list[float]] = {label: [] for label in commands}
    for number in range(rounds + 1):
        for label, argvs in commands.items():
            took = seconds(argvs if isinstance(argvs[0], list) else [argvs])
            if number:  # the first one fills the caches
                times[label].append(took)
    json.dump(times, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
