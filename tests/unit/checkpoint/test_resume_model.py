"""Whatever dies when, a run goes on with exactly what it had at some step, or says that it cannot.

Stories are drawn by lot and lived by real processes (``resume_world``): saves, what is kept just in time, copies
of peers, and the disk; deaths of any ranks and nodes at any point; worlds of 1 to 6; loaders with uneven shares, with
several micro-batches in a step, and with positions of each rank's own. A long profile runs under the marker ``soak``.

A story that goes wrong is named by its number: ``SLURMFT_TEST_STORY=number`` replays it, and nothing else.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from save_points import COMMIT_POINTS, STAGING_POINTS, WRITER_POINTS

WORLD = Path(__file__).parents[1] / "support" / "resume_world.py"
MAX_RANKS = 6
STORIES = 5
"""About 3 s of processor time each."""

STORY_VARIABLE = "SLURMFT_TEST_STORY"
LONG_S = float(os.environ.get("SLURMFT_TEST_STORIES_S", "1200"))


def placed(chance: random.Random) -> list[list[int]]:
    """Nodes with so many ranks each."""
    nodes = chance.randint(1, 3)
    return [[node, chance.randint(1, MAX_RANKS // nodes)] for node in range(nodes)]


def deaths(chance: random.Random, story: dict[str, Any], nodes: list[list[int]], until: int) -> list[dict[str, Any]]:
    """Who dies where: one rank, all of a node, or any; all at one point, or each somewhere else."""
    firsts = [sum(count for _, count in nodes[:number]) for number in range(len(nodes) + 1)]
    ranks = range(firsts[-1])
    of_a_node = [list(range(first, after)) for first, after in itertools.pairwise(firsts)]
    who = chance.choice(
        [[chance.choice(ranks)], [0], chance.choice(of_a_node), chance.sample(ranks, chance.randint(1, len(ranks)))]
    )
    points = ["begin", "updating", "updated", "end"]
    points += [f"{what} {number}" for what in ("data", "forward", "reduced") for number in range(story["accumulate"])]
    saves = [f"save {point}" for point in STAGING_POINTS]

    def one() -> dict[str, Any]:
        step, every = chance.randrange(max(0, until - 3), until), story["save_every"]
        if chance.random() < 0.25 and step >= every:
            return {"step": step // every * every, "point": chance.choice(saves)}
        return {"step": step, "point": chance.choice(points)}

    first, are_alike = one(), chance.random() < 0.5
    return [{"rank": rank, **(first if are_alike else one())} for rank in who]


def drawn(seed: int) -> dict[str, Any]:
    """A story."""
    chance = random.Random(seed)
    story: dict[str, Any] = {
        "seed": seed % 1000,
        "loader": chance.choice(["shared", "shared", "own"]),
        "accumulate": chance.randint(1, 2),
        "batch": chance.randint(1, 3),
        "uneven": chance.randint(0, 2),
        "buffers": chance.random() < 0.3,
        "tail_every": chance.choice([0, 1, 3]),
        "tail_ranks": chance.choice(["all", "lead"]),
        "optimizer": chance.choice(["sgd", "adamw", "wrapped sgd", "wrapped adamw"]),
        "save_every": chance.choice([1, 2, 2, 3]),
    }
    nodes, attempts, until = placed(chance), [], 2
    for last in [False] * chance.randint(1, 3) + [True]:
        until += chance.randint(2, 3)
        ranks = range(sum(count for _, count in nodes))
        lost = [chance.choice(nodes)[0]] if not last and chance.random() < 0.3 else []
        attempts.append(
            {
                "nodes": nodes,
                "until": until,
                "deaths": [] if last else deaths(chance, story, nodes, until),
                "lost": lost,
                "silent": chance.sample(ranks, 1) if chance.random() < 0.2 else [],
                "dies_keeping": chance.sample(ranks, 1) if chance.random() < 0.2 else [],
                "writers": chance.choice(["finish", "killed"]),
                "peers": chance.random() < 0.5,
                "reader": until - 1 if chance.random() < 0.3 else None,
                "writer_dies": chance.sample(ranks, 1) if not last and chance.random() < 0.2 else [],
                "writer_point": chance.choice([*WRITER_POINTS, *COMMIT_POINTS]),
            }
        )
        change = chance.random()
        if change < 0.15:
            nodes = placed(chance)
        elif change < 0.25:
            nodes = chance.sample(nodes, len(nodes))
        else:  # spares in the place of nodes that are gone
            nodes = [[node + 10 if node in lost else node, count] for node, count in nodes]
    copies = {"peer_interval": chance.choice([0, 0, 1, 2]), "just_in_time": chance.random() < 0.7}
    return story | {"attempts": attempts, "checkpoint": copies if copies["peer_interval"] else {}}


class Teller:
    """The process that lives stories."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, str(WORLD), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        self.counted: Counter[str] = Counter()

    def tell(self, story: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(story) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that lives the stories has ended: {json.dumps(story)}"
        found: dict[str, Any] = json.loads(answer)
        self.counted["stories"] += 1
        facts: list[dict[str, Any]] = found["facts"]
        for fact in facts[1:]:
            source = fact.get("source", "")
            is_anew = fact.get("step", 1) == 0
            self.counted["refused" if "refused" in fact else "anew" if is_anew else "resumed"] += 1
            self.counted["from memory"] += "memory" in source and not is_anew
            self.counted["from a peer"] += "memory of a peer" in source
            self.counted["from disk"] += "disk" in source
            self.counted["nothing lost"] += fact.get("lost", 1) == 0 and "memory" in source
        assert not found["violation"], f"{found['violation']}\n{json.dumps(story)}\n{facts}"
        return facts

    def tell_drawn(self, seed: int) -> None:
        """The story of that number.

        Raises:
            AssertionError: it goes wrong; with how to replay it.
        """
        try:
            self.tell(drawn(seed))
        except AssertionError as error:
            raise AssertionError(f"story {seed} goes wrong; {STORY_VARIABLE}={seed} replays it: {error}") from None

    def close(self) -> None:
        """Every story is over: nothing is waited for."""
        with self._process as process:
            process.kill()


@pytest.fixture(scope="module")
def teller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teller]:
    teller = Teller(tmp_path_factory.mktemp("world"))
    yield teller
    teller.close()


@pytest.mark.long
def test_a_run_goes_on_with_exactly_what_it_had(teller):
    if replayed := os.environ.get(STORY_VARIABLE):
        teller.tell_drawn(int(replayed))
        return
    for seed in range(STORIES):
        teller.tell_drawn(seed)
    assert teller.counted["from memory"] and teller.counted["nothing lost"], teller.counted


def plain(*, then: dict[str, Any] | None = None, again: list[dict[str, Any]] | None = None, **changes: Any) -> Any:
    """A story of two nodes with one and two ranks, in which nothing special happens but what is given.

    ``again``: who dies in a second attempt; ``then``: what is special in the last one.
    """
    story = {
        "seed": 1, "loader": "shared", "accumulate": 1, "batch": 2, "uneven": 1, "buffers": False, "tail_every": 0,
        "tail_ranks": "all", "optimizer": "sgd", "save_every": 2, "checkpoint": {},
    }  # fmt: skip
    quiet = {"deaths": [], "lost": [], "silent": [], "dies_keeping": [], "writers": "finish", "peers": False,
             "reader": None, "writer_dies": [], "writer_point": ""}  # fmt: skip
    first = {**quiet, "nodes": [[0, 1], [1, 2]], "until": 6}
    first |= {name: value for name, value in changes.items() if name in first}
    attempts = [first]
    if again is not None:
        attempts.append({**quiet, "nodes": first["nodes"], "until": 6, "deaths": again})
    attempts.append({**quiet, "nodes": first["nodes"], "until": 7} | (then or {}))
    return story | {name: value for name, value in changes.items() if name in story} | {"attempts": attempts}


def dies(*ranks: int, step: int, point: str) -> list[dict[str, Any]]:
    return [{"rank": rank, "step": step, "point": point} for rank in ranks]


BEGIN = dies(1, step=3, point="begin")
NODE = dies(1, 2, step=5, point="forward 0")
KNOWN = {
    "rank 0, alone on its node": (plain(deaths=dies(0, step=3, point="begin")), 3),
    "the first of two nodes": (plain(deaths=dies(0, 1, step=3, point="data 0"), nodes=[[0, 2], [1, 1]]), 3),
    "rank 0 of a model with buffers": (plain(deaths=dies(0, step=3, point="begin"), buffers=True), 3),
    "a node that is gone": (plain(deaths=NODE, lost=[1], then={"nodes": [[0, 1], [11, 2]]}), 4),
    "accumulating, in the first step": (plain(deaths=BEGIN, again=dies(0, step=3, point="end"), accumulate=2), 3),
    "accumulating, at the end": (plain(deaths=dies(1, step=3, point="end"), accumulate=2), 2),
    "before it draws, in a rare step": (plain(deaths=dies(0, step=5, point="updated"), tail_every=3,
                                              tail_ranks="lead"), 4),
    "a wrapped optimizer": (plain(deaths=dies(2, step=3, point="data 0"), optimizer="wrapped adamw"), 3),
    "one who keeps the step dies": (plain(deaths=dies(2, step=3, point="begin"), nodes=[[0, 2], [1, 1]],
                                          dies_keeping=[0]), 3),
    "in the very first save": (plain(deaths=dies(0, step=4, point="save half staged"), nodes=[[0, 2]],
                                     save_every=4), 4),
    "in a save that the others have staged": (plain(deaths=dies(1, step=4, point="save half staged"), nodes=[[0, 2]]),
                                              4),
    "a reader beside a save": (plain(reader=5), 6),
    "more ranks than before": (plain(deaths=NODE, then={"nodes": [[0, 2], [1, 2]]}), 5),
    "fewer ranks than before": (plain(deaths=NODE, then={"nodes": [[1, 1]]}), 4),
    "more ranks with data of their own": (plain(deaths=NODE, loader="own", then={"nodes": [[0, 2], [1, 2]]}), None),
    "more ranks, and the buffers of rank 0 are lost": (plain(deaths=dies(0, step=3, point="begin"), loader="own",
                                                             buffers=True, lost=[0],
                                                             then={"nodes": [[10, 2], [1, 2]]}), None),
}  # fmt: skip
"""Stories that have gone wrong, and the step from which a run goes on in the end; None where it refuses to."""


@pytest.mark.parametrize("name", KNOWN)
def test_known_stories(teller, name):
    story, expected = KNOWN[name]
    found = teller.tell(story)[-1]
    assert found.get("step") == expected, found


@pytest.mark.soak
@pytest.mark.timeout(LONG_S + 300)
def test_many_runs_go_on_with_exactly_what_they_had(teller):
    ends_at = time.monotonic() + LONG_S
    for seed in itertools.count(time.time_ns() // 1000):
        if time.monotonic() > ends_at:
            break
        teller.tell_drawn(seed)
    print(teller.counted)
    assert teller.counted["nothing lost"] > 50, teller.counted
