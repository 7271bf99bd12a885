"""One method or the floors in a process of its own: ``trial.py FILE`` with the order in JSON, and answers so.

It tells its parent on stdout where it is, and goes on when the parent has answered on stdin: the parent measures memory
meanwhile, so that this process is not disturbed while it measures time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import floors
from beside_loads import BesideLoads
from methods import METHODS, Method, SlurmftKeepingAll, join_alone
from state import SHAPES, State, Training

PATIENCE_S = 60.0
WARM_UP, NORMAL, BETWEEN = 10, 20, 8
WATCHED_SAVES = 1


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def ask(what: str) -> None:
    say(at=what)
    sys.stdin.readline()


def saves(order: dict[str, Any]) -> dict[str, Any]:
    """A first save, later ones, then more while memory is watched; the last one is the one that is compared."""
    state, training = State(SHAPES[order["size"]]).step_once(), Training()
    method = METHODS[order["method"]](state, Path(order["folder"]))
    for _ in range(WARM_UP):
        training.step()
    normal = [ended - began for began, ended in (training.step() for _ in range(NORMAL))]
    ask("before")
    began, rounds = time.monotonic(), []
    while len(rounds) < 1 + order["saves"] and (len(rounds) < 3 or time.monotonic() - began < order["limit_s"]):
        rounds.append(one_save(method, state, training, len(rounds)))
    ask("watched")
    more: list[dict[str, Any]] = []
    digests: dict[str, str] = {}
    for number in range(len(rounds), len(rounds) + WATCHED_SAVES):
        digests = state.digests() if number == len(rounds) + WATCHED_SAVES - 1 else digests
        more.append(one_save(method, state, training, number))
    ask("over")
    method.close()
    normal += [seconds for each in rounds for seconds in each.pop("normal")]
    lost = [_lost(each, statistics.median(normal)) for each in rounds]
    return {"rounds": rounds, "normal": normal, "lost": lost, "bytes": state.bytes(), "digests": digests}


def one_save(method: Method, state: State, training: Training, number: int) -> dict[str, Any]:
    """The call, then every value changes, then steps go on until the save is durable, and some more."""
    method.forget(number - 2)
    began = time.monotonic()
    method.save(number)
    returned = time.monotonic()
    state.change()
    steps = []
    while (committed := method.committed_at()) is None:
        steps.append(training.step())
        if time.monotonic() - began > PATIENCE_S:
            raise TimeoutError(f"save {number} is not durable after {PATIENCE_S:.0f} s")
    normal = [ended - start for start, ended in (training.step() for _ in range(BETWEEN))]
    within = [ended - start for start, ended in steps if ended <= committed]
    return {"stall": returned - began, "durable": committed - began, "within": within, "normal": normal}


def _lost(round_: dict[str, Any], normal: float) -> float:
    """Seconds that one save cost the training: the stall, and what its steps took longer."""
    return round_["stall"] + sum(seconds - normal for seconds in round_["within"])


def loads(order: dict[str, Any]) -> dict[str, Any]:
    """Seconds by circumstance; ``wrong`` counts the tensors that are not as they were when the save was called."""
    folder, state = Path(order["folder"]), State(SHAPES[order["size"]], seed=7)
    method = METHODS[order["method"]](state, folder)
    found: dict[str, list[float]] = {}
    beside = {
        where: BesideLoads(state, image) for where in order["circumstances"] if (image := newest_image(order, where))
    }
    for circumstance in order["circumstances"]:
        for number in range(order["rounds"] + 1):
            for name, work in beside[circumstance].floors(circumstance).items() if circumstance in beside else ():
                make_ready(circumstance, state, folder)
                seconds = floors.timed(work, floors.give_back)
                if number:
                    found.setdefault(f"{name}: {circumstance}", []).append(seconds)
            make_ready(circumstance, state, folder)
            for tries in Path(order["memory"]).rglob("tries.json"):  # else memory is given up after some restarts
                tries.unlink()
            seconds = floors.timed(lambda: method.load(state))
            if number:  # the first one also pays for memory that a virtual machine is given for the first time
                found.setdefault(circumstance, []).append(seconds)
            if ("memory" in circumstance) != method.source.startswith("memory"):
                raise RuntimeError(f"{circumstance}: it was loaded from {method.source}")
    method.close()
    digests = order["digests"]
    loaded = state.digests()
    wrong = sum(loaded.get(name) != digest for name, digest in digests.items())
    return {"loads": found, "wrong": wrong, "compared": len(digests)}


def make_ready(circumstance: str, state: State, folder: Path) -> None:
    if "cold" in circumstance:
        floors.forget_pages(folder)
    if "restart" in circumstance:
        state.forget_optimizer()
        floors.give_back()


def newest_image(order: dict[str, Any], circumstance: str) -> Path | None:
    """The file that slurmft reads; None of other methods."""
    if not order["method"].startswith("slurmft"):
        return None
    if "memory" in circumstance:
        indexes = Path(order["memory"]).glob("shard-*.json")
        return max(indexes, key=lambda path: path.stat().st_mtime).with_suffix(".image")
    return max(Path(order["folder"]).glob("step-*/__0_0.distcp"))


def floor(order: dict[str, Any]) -> dict[str, Any]:
    state = State(SHAPES[order["size"]]).step_once()
    found = floors.measure(state, Path(order["folder"]), Path(order["memory"]), order["rounds"])
    return {"floors": found, "bytes": state.bytes()}


def many(order: dict[str, Any]) -> dict[str, Any]:
    """What a save costs when so many others are in the directory: seconds of the call, and until it is durable."""
    state, found = State(SHAPES["1 MB"]).step_once(), {}
    make = SlurmftKeepingAll if order["method"].startswith("slurmft") else METHODS[order["method"]]
    method = make(state, Path(order["folder"]))
    last = max(order["earlier"]) + order["rounds"]
    for number in range(last):
        began = time.monotonic()
        method.save(number)
        returned = time.monotonic()
        while (committed := method.committed_at()) is None:
            time.sleep(0.001)
        found[number] = (returned - began, committed - began)
    method.close()
    return {"many": {earlier: [found[earlier + n] for n in range(order["rounds"])] for earlier in order["earlier"]}}


def main() -> None:
    warnings.simplefilter("ignore")  # of torch, about its own parts
    order = json.loads(Path(sys.argv[1]).read_text())
    join_alone()
    task = {"saves": saves, "loads": loads, "floors": floor, "many": many}[order["task"]]
    say(result=task(order))


if __name__ == "__main__":
    main()
