"""Journeys of load, restart, just in time, shrink and grow on process groups that are as strict as NCCL.

``strict_group`` says what it refuses, ``strict_journeys`` what the ranks do. An operation that would hang on NCCL, or
be wrong there, ends its rank with an error, and with it the journey.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "support"
RANKS = [pytest.param(2, marks=pytest.mark.soak), 3, 4, pytest.param(8, marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: f"{ranks} ranks")
def journeys(request, tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("strict")
    argv = [sys.executable, str(HERE / "strict_journeys.py"), str(root), str(request.param)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        argv, env={**environment, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads((root / "report.json").read_text()) | {"ranks": request.param}


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", "strict-host"])
def test_every_node_gets_the_shards_of_all_others(journeys, backend):
    ranks = journeys["ranks"]
    for rank, found in enumerate(journeys[f"exchange-{backend}"]):
        assert found["lacking"] == 0
        assert found["got"] == [other for other in range(ranks) if other != rank]
        assert found["groups"] == 2, "one group for the device, one for the host, however often it is asked for"


def test_a_rank_that_dies_in_a_step_costs_no_complete_step(journeys):
    begun = journeys["undisturbed"][0]["digests"]["4"]
    for before, after in zip(journeys["undisturbed"], journeys["killed"], strict=True):
        assert (after["step"], after["begun"], after["end"]) == (4, begun, before["end"])


def test_with_a_node_the_run_goes_back_to_the_newest_checkpoint_that_all_have(journeys):
    begun = journeys["undisturbed"][0]["digests"]["3"]
    for before, after in zip(journeys["undisturbed"], journeys["node lost"], strict=True):
        assert (after["step"], after["begun"], after["end"]) == (3, begun, before["end"])


def test_fewer_and_then_more_ranks_go_on_with_the_same_weights(journeys):
    shrunk, grown = journeys["shrunk"], journeys["grown"]
    assert [found["step"] for found in shrunk] == [2] * len(shrunk)
    assert {found["begun"] for found in shrunk} == {journeys["undisturbed"][0]["digests"]["2"]}
    assert [found["step"] for found in grown] == [4] * len(grown)
    assert {found["begun"] for found in grown} == {shrunk[0]["end_parameters"]}


def test_an_abort_gets_a_rank_out_of_a_collective_that_a_dead_one_never_joins(journeys):
    assert journeys["abort"] == ["aborted"] * (journeys["ranks"] - 1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("without_a_batch", "every rank waits for another one"),
        ("host_data_over_nccl", "slurmft.checkpoint.agreement gives allreduce of data in main memory"),
        ("in_a_thread", "barrier in the thread beside"),
        ("in_another_order", "ranks differ"),
    ],
)
def test_the_double_finds(journeys, fault, said):
    assert all(said in found for found in journeys[fault])
