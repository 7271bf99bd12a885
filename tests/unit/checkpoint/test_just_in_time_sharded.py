"""Just in time where weights are spread over ranks that have replicas: each part from any of them, or nothing.

Four ranks, FSDP2 over gloo (``support/hsdp_life.py``); a step is lost where the restart begins before the sixth.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import hsdp_life
import pytest
from hsdp_life import Case

IN_NODE, ACROSS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
"""Each node has a replica; each node has one shard of all replicas."""

SAVED, KEPT = hsdp_life.SAVED_AT, hsdp_life.FAILS_IN - 1
CASES = [
    (Case("a rank", IN_NODE, dead=[3]), KEPT),
    (Case("rank 0", IN_NODE, dead=[0]), KEPT),
    (Case("two of different parts", IN_NODE, dead=[0, 3]), KEPT),
    (Case("a rank that only raises", IN_NODE), KEPT),
    (Case("both of a part", IN_NODE, dead=[1, 3]), SAVED),
    (Case("all ranks of a node", IN_NODE, dead=[2, 3]), KEPT),
    (Case("all ranks of the node of rank 0", IN_NODE, dead=[0, 1]), KEPT),
    (Case("a node with its memory", IN_NODE, dead=[2, 3], lost_node=1), SAVED),
    (Case("a node with its memory and notes elsewhere", IN_NODE, dead=[2, 3], lost_node=1, sends_notes=True), KEPT),
    (Case("the node of rank 0 with notes elsewhere", IN_NODE, dead=[0, 1], lost_node=0, sends_notes=True), KEPT),
    (Case("across nodes, a rank", ACROSS, dead=[1]), KEPT),
    (Case("across nodes, a rank of each", ACROSS, dead=[0, 3]), KEPT),
    (Case("across nodes, all of a part", ACROSS, dead=[2, 3]), SAVED),
    (Case("across nodes, a node", ACROSS, dead=[2, 3], lost_node=1, sends_notes=True), SAVED),
    (Case("one node", IN_NODE, per_node=4, dead=[1, 2]), KEPT),
    (Case("a rank on each node", IN_NODE, per_node=1, dead=[1, 2]), KEPT),
    (Case("one part is a step further", IN_NODE, is_through=[0, 2]), SAVED),
    (Case("one replica is a step further", IN_NODE, is_through=[0, 1]), KEPT),
    (Case("a rank ends the step after its neighbour", IN_NODE, is_through=[0, 1, 2, 3], dead=[2], late=1), KEPT + 1),
    (Case("fused", IN_NODE, dead=[3], optimizer="fused"), KEPT),
    (Case("tensor by tensor", IN_NODE, dead=[3], optimizer="loop"), KEPT),
    (Case("the restart dies as well", IN_NODE, dead=[0, 3], again=True), KEPT),
    (Case("a part from before a load", IN_NODE, dead=[1, 3], stale=[1]), SAVED),
    (Case("killed in its copy, beside a replica", IN_NODE, per_node=4, dead=[2], dies_copying=1), KEPT),
    (Case("killed in its copy, the last of a part", IN_NODE, dead=[3], dies_copying=1), SAVED),
    (Case("a full node", IN_NODE, dead=[3], full_node=1), KEPT),
    (Case("a full node with the last of a part", IN_NODE, dead=[3], full_node=0), SAVED),
    (Case("half of the ranks go on", IN_NODE, dead=[3], shrinks=True), KEPT),
    (Case("no replicas", [0, 1, 2, 3], dead=[3]), SAVED),
    (Case("replicas of one shard", [[0], [1], [2], [3]], dead=[0, 1, 2]), KEPT),
]
"""Each with the step that the restart begins with."""

OFTEN = {
    "a rank", "rank 0", "two of different parts", "both of a part", "a node with its memory",
    "a node with its memory and notes elsewhere", "across nodes, a rank of each", "one part is a step further",
    "the restart dies as well", "a part from before a load", "killed in its copy, beside a replica", "no replicas",
}  # fmt: skip
EVERY = [pytest.param(*one, id=one[0].name, marks=[] if one[0].name in OFTEN else pytest.mark.soak) for one in CASES]


@dataclasses.dataclass(frozen=True)
class Lives:
    """The reports of all ranks."""

    root: Path

    def of(self, case: Case, attempt: int) -> list[dict]:
        ranks = 2 if case.shrinks and attempt > 1 else case.ranks
        paths = [self.root / case.name / f"report-{attempt}-{rank}.json" for rank in range(ranks)]
        return [json.loads(path.read_text()) for path in paths]

    def undisturbed(self, case: Case) -> list[str]:
        return [one["digest"] for one in self.of(calm(case), 1)]


def calm(case: Case) -> Case:
    """The same without a failure."""
    name = f"undisturbed {case.mesh} {case.optimizer}"
    return Case(name, case.mesh, optimizer=case.optimizer, fails=False)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Lives:
    """Of the cases that were selected; one process imports torch for all of them."""
    root = tmp_path_factory.mktemp("lives")
    cases = [one.callspec.params["case"] for one in request.session.items if one.module is request.module]
    cases += [CASES[0][0]] if any(case.shrinks for case in cases) else []
    every = list({one.name: dataclasses.asdict(one) for one in (*map(calm, cases), *cases)}.values())
    argv = [sys.executable, hsdp_life.__file__, str(root), json.dumps(every)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return Lives(root)


@pytest.mark.long
@pytest.mark.parametrize(("case", "step"), EVERY)
def test_a_restart_takes_each_part_from_any_replica_and_ends_as_without_a_failure(lives, case, step):
    for report in lives.of(case, 2):
        assert report["step"] == step, report["source"]
    last = lives.of(case, 3 if case.again else 2)
    assert [one["step"] for one in last] == [step] * len(last)
    if case.shrinks:  # other ranks sum in another way, but begin with the same
        assert last[0]["values"] == lives.of(CASES[0][0], 2)[0]["values"]
    else:
        assert [one["digest"] for one in last] == lives.undisturbed(case)
