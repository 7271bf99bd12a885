"""Two ranks over gloo and a trainer with the session: from a rejected result to its verdict, over several starts.

All starts are forked from one process that has torch, one after the other; every test looks at what its own have left.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reported_evidence import read_evidence

from slurmft.policy.verdict import Kind
from slurmft.storage.verdicts import read_verdict

TRAINER = Path(__file__).parents[3] / "slurm/trainers/rerun.py"
STEPS = ["--steps", "7"]

DRIVER = '''
"""Do the starts of a plan: a list of [folder, nodes of the ranks, settings, arguments, what breaks]."""
import json, os, runpy, signal, sys, tempfile
import torch
import slurmft.worker.session, slurmft.checkpoint
from slurmft.worker import rerun as reports

torch.set_num_threads(1)
torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())  # imports for a second, which the forks would do each
trainer, plan, root = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]

def start(folder, nodes, settings, arguments, breaks):
    os.makedirs(folder, exist_ok=True)
    number = len([name for name in os.listdir(folder) if name.startswith("started-")])
    children = []
    for rank, node in enumerate(nodes):
        if (child := os.fork()) == 0:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(nodes)), SLURMD_NODENAME=node,
                SLURMFT_CHECKPOINT_DIR=folder + "/checkpoints",
                SLURMFT_WORKER=json.dumps(
                    {"checkpoint": {"interval_steps": 0, "async_save": False}, "rerun": settings}),
                SLURMFT_EVIDENCE_FILE=f"{folder}/evidence-{number}-{rank}",
                SLURMFT_VERDICT_FILE=f"{folder}/verdict-{number}-{rank}")
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ["MASTER_PORT"] = str(port)
            log = os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1); os.dup2(log, 2)
            if breaks == "killed":
                reports.Departure.write_verdict = lambda self: os.kill(os.getpid(), signal.SIGKILL)
            sys.argv = [trainer, *arguments]
            code = 1
            try:
                runpy.run_path(trainer, run_name="__main__")
                code = 0
            except SystemExit as stop:
                code = stop.code
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    open(f"{folder}/started-{number}", "w").close()
    return codes

import socket
report = []
for folder, *rest in plan:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    report.append(start(root + "/" + folder, *rest))
print(json.dumps(report))
'''

AT_4 = {"error_injection_step": 4, "error_injection_rank": 1}
TRANSIENT = {**AT_4, "error_injection_type": "transient_error"}
PERSISTENT = {**AT_4, "error_injection_type": "persistent_error", "error_injection_node": "n2"}
CORRECT = {**AT_4, "error_injection_type": "correct_result"}
NAN = [*STEPS, "--nan-on", "n2"]

PLAN: list[tuple[str, list[str], dict[str, Any], list[str], str]] = [
    ("clean", ["n1", "n2"], {}, STEPS, ""),
    ("resumed", ["n1", "n2"], {}, ["--steps", "5"], ""),
    ("resumed", ["n1", "n2"], {}, STEPS, ""),
    ("disabled", ["n1", "n2"], {**TRANSIENT, "mode": "disabled"}, STEPS, ""),
    ("stats", ["n1", "n2"], {"mode": "report_stats", "report_interval_steps": 5}, STEPS, ""),
    ("transient", ["n1", "n2"], TRANSIENT, STEPS, ""),
    ("persistent", ["n1", "n2"], {}, NAN, ""),
    ("persistent", ["n1", "n3"], {}, NAN, ""),
    ("exit", ["n1", "n2"], {**PERSISTENT, "exit_on_persistent": True}, STEPS, ""),
    ("exit", ["n2", "n3"], {**PERSISTENT, "exit_on_persistent": True}, STEPS, ""),
    ("exit", ["n1", "n3"], {**PERSISTENT, "exit_on_persistent": True}, STEPS, ""),
    ("correct", ["n1", "n2"], CORRECT, STEPS, ""),
    ("correct", ["n3", "n4"], CORRECT, STEPS, ""),
    ("correct", ["n3", "n4"], {"mode": "disabled"}, STEPS, ""),
    ("landed", ["n1", "n2"], PERSISTENT, STEPS, ""),
    ("landed", ["n1", "n2"], PERSISTENT, STEPS, ""),
    ("landed", ["n1", "n2"], PERSISTENT, STEPS, ""),
    ("landed", ["n1", "n2"], PERSISTENT, STEPS, ""),
    ("landed", ["n1", "n3"], PERSISTENT, STEPS, ""),
    ("opaque", ["n1", "n2"], PERSISTENT, [*STEPS, "--opaque"], ""),
    ("opaque", ["n1", "n3"], PERSISTENT, [*STEPS, "--opaque"], ""),
    ("killed", ["n1", "n2"], PERSISTENT, STEPS, "killed"),
    ("killed", ["n1", "n2"], PERSISTENT, STEPS, ""),
    ("killed", ["n1", "n4"], PERSISTENT, STEPS, ""),
    ("spoiled", ["n1", "n2"], {}, [*STEPS, "--spoil"], ""),
    ("fewer", ["n1", "n2"], PERSISTENT, STEPS, ""),
    ("fewer", ["n3"], PERSISTENT, STEPS, ""),
]


class Left:
    """What the starts in one folder have left behind."""

    def __init__(self, folder: Path, codes: list[list[int]]) -> None:
        self.folder, self.codes = folder, codes

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text()

    @property
    def digest(self) -> str:
        digests = [line.split()[-1] for line in self.log(0).splitlines() if line.startswith("final weights")]
        assert len(digests) == 1, self.log(0)
        return digests[0]

    def evidence(self, number: int) -> list[tuple[Kind, str, int | None]]:
        found = [read_evidence(self.folder / f"evidence-{number}-{rank}") for rank in (0, 1)]
        return [(one.kind, one.suspect.node, one.step) for lines in found for one in lines if one is not None]

    def verdicts(self, number: int) -> set[tuple[str, str, tuple[str, ...]] | None]:
        found = [read_verdict(self.folder / f"verdict-{number}-{rank}") for rank in (0, 1)]
        return {one and (one.cause, one.rerun, tuple(suspect.node for suspect in one.suspects)) for one in found}

    def message(self, number: int) -> str:
        verdict = read_verdict(self.folder / f"verdict-{number}-0")
        assert verdict is not None
        return verdict.message


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Left]:
    root = tmp_path_factory.mktemp("re runs")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER_"))}
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, str(TRAINER), json.dumps(PLAN), str(root)],
        env={**own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    codes: dict[str, list[list[int]]] = {}
    for (name, *_), code in zip(PLAN, json.loads(result.stdout.splitlines()[-1]), strict=True):
        codes.setdefault(name, []).append(code)
    return {name: Left(root / name, codes[name]) for name in codes}


UNDECIDED = ("rerun elsewhere", "undecided", ("n2",))


def test_nothing_is_left_behind_when_all_is_well(left):
    for name in ("clean", "disabled"):
        assert left[name].codes == [[0, 0]]
        assert left[name].evidence(0) == [] and left[name].verdicts(0) == {None}
    assert left["disabled"].digest == left["clean"].digest


def test_a_resume_after_an_ordinary_save_is_bit_identical(left):
    assert left["resumed"].codes == [[0, 0], [0, 0]]
    assert left["clean"].digest in left["resumed"].log(0).splitlines()[-1]


def test_statistics_run_every_step_twice_and_change_nothing(left):
    assert left["stats"].codes == [[0, 0]]
    assert left["stats"].digest == left["clean"].digest
    assert "rerun statistics after 5 steps: loss: 5/5 identical" in left["stats"].log(1)
    assert "rerun statistics after 7 steps: loss: 7/7 identical" in left["stats"].log(1)


def test_a_transient_error_costs_one_rerun(left):
    case = left["transient"]
    assert case.codes == [[0, 0]]
    assert case.digest == left["clean"].digest
    assert case.evidence(0) == [(Kind.RERUN_TRANSIENT, "n2", 4)]
    assert case.verdicts(0) == {None}
    for line in (
        "Unexpected result tensor(nan) on rank 1 at iteration #4 invocation #1 (message='loss is NaN')",
        "First rerun: unexpected result is not reproducible within the tolerance",
        "Possible transient error!",
    ):
        assert line in case.log(1)


def test_a_persistent_error_is_found_on_another_node_and_training_goes_on(left):
    case = left["persistent"]
    assert case.codes == [[16, 16], [0, 0]]
    assert case.evidence(0) == [(Kind.RERUN_UNDECIDED, "n2", 3)]
    assert case.verdicts(0) == {UNDECIDED}
    assert case.evidence(1) == [(Kind.RERUN_PERSISTENT, "n2", 3)]
    assert case.verdicts(1) == {None}
    assert case.digest == left["clean"].digest
    for line in ("Need to rerun on a different GPU to verify correctness", "Possible persistent error!"):
        assert line in case.log(1)


def test_who_wants_to_exit_on_a_persistent_error_does(left):
    case = left["exit"]
    assert case.codes == [[16, 16], [17, 17], [0, 0]]  # rank 1 itself ran elsewhere; rank 0's node matters to nobody
    assert case.verdicts(1) == {("result validation failed", "persistent", ("n2",))}
    assert case.digest == left["clean"].digest


def test_a_correct_result_acquits_the_node_and_ends_the_run(left):
    case = left["correct"]
    assert case.codes == [[16, 16], [17, 17], [0, 0]]
    assert case.evidence(1) == [(Kind.RERUN_ACQUITTED, "n2", 4)]
    assert case.verdicts(1) == {("result validation failed", "correct", ())}
    assert "Correct result (but possible Application error)" in case.log(1)
    assert case.digest == left["clean"].digest  # the error was only played, and the saved batches came first


def test_the_suspect_itself_never_judges_and_the_tries_are_bounded(left):
    case = left["landed"]
    assert case.codes == [[16, 16], [16, 16], [16, 16], [17, 17], [0, 0]]
    assert [case.evidence(number) for number in (1, 2, 3)] == [[], [], []]
    assert case.verdicts(1) == case.verdicts(2) == {UNDECIDED}
    assert "landed on suspects again: n2" in case.message(1)
    assert "(placement 3 of 3)" in case.message(2)
    assert case.verdicts(3) == {("result validation failed", "inconclusive", ("n2",))}
    assert case.evidence(4) == [(Kind.RERUN_PERSISTENT, "n2", 4)]
    assert case.digest == left["clean"].digest


def test_other_data_proves_nothing(left):
    case = left["opaque"]
    assert case.codes == [[16, 16], [17, 17]]
    assert case.evidence(1) == []
    assert case.verdicts(1) == {("result validation failed", "inconclusive", ("n2",))}
    assert "the rerun got other data" in case.message(1)


def test_killed_between_the_checkpoint_and_the_verdict(left):
    case = left["killed"]
    assert case.codes == [[-9, -9], [16, 16], [0, 0]]
    assert case.verdicts(0) == {None}
    assert case.verdicts(1) == {UNDECIDED}
    assert case.evidence(2) == [(Kind.RERUN_PERSISTENT, "n2", 4)]
    assert case.digest == left["clean"].digest


def test_weights_that_are_not_finite_are_no_correct_result(left):
    case = left["spoiled"]
    assert case.codes == [[17, 17]]
    assert case.evidence(0) == []
    assert case.verdicts(0) == {("result validation failed", "inconclusive", ("n1", "n2"))}
    assert "the weights themselves are not finite" in case.message(0)


def test_another_number_of_ranks_proves_nothing(left):
    case = left["fewer"]
    assert case.codes == [[16, 16], [17]]
    assert "2 ranks rejected it, and 1 go on" in case.message(1)
