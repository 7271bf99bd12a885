"""Two ranks over gloo: shared state once, agreement without deadlock, one checkpoint for all.

The scenarios run one after the other in one pair of processes (importing torch twice costs more than all of them); each
rank writes what it saw, and every test looks at its part.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
import torch

from slurmft.checkpoint import Catalog, CheckpointManager

SCRIPT = """
import errno, json, os, random, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from slurmft.checkpoint import CheckpointManager, manager
from slurmft.checkpoint.catalog import Catalog
from slurmft.training.data import ByteCorpus, WindowLoader

root, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
torch.set_num_threads(1)
random.seed(rank)
torch.manual_seed(rank)
plain = torch.nn.Linear(8, 4)
model = DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(model.parameters())
corpus = ByteCorpus(torch.arange(999).to(torch.uint8), "numbers")
loader = WindowLoader(corpus, 8, 2, rank=rank, world_size=2)
report = {}

def scenario(name):
    def run(function):
        folder = root / name
        try:
            report[name] = function(CheckpointManager(folder), folder)
        except Exception as error:
            report[name] = {"error": type(error).__name__, "text": str(error)}
        dist.barrier()
    return run

def save(checkpoints, step):
    x, _ = next(loader)
    model(x.float()).pow(2).mean().backward()
    optimizer.step()
    return checkpoints.save(model, optimizer, step=step, metrics={"loss": step}, loader=loader)

def load(checkpoints):
    loaded = checkpoints.load_latest(model, optimizer, loader=loader)
    return {"step": loaded.step, "skipped": [[p.name, why] for p, why in loaded.skipped]}

@scenario("plain")
def _(checkpoints, folder):
    save(checkpoints, 1)
    random_now = [random.random(), float(torch.rand(()))]
    weights = plain.weight.detach().clone()
    position = loader.position
    next(loader)
    with torch.no_grad():
        plain.weight.zero_()
    result = load(checkpoints)
    return result | {"same": bool((plain.weight == weights).all()), "position": loader.position == position,
                     "rng": [random.random(), float(torch.rand(()))] == random_now, "draw": random_now}

def failing(bad_rank, error, folder, checkpoints):
    save(checkpoints, 1)
    real = manager.write_payload
    def broken(path, payload):
        if rank == bad_rank:
            path.write_bytes(b"half")
            raise error
        return real(path, payload)
    manager.write_payload = broken
    try:
        save(checkpoints, 2)
        return {"error": None}
    except Exception as error:
        dist.barrier()  # rank 0 cleans up before it raises
        return {"error": type(error).__name__, "text": str(error), "left": sorted(p.name for p in folder.iterdir())
                } | load(checkpoints)
    finally:
        manager.write_payload = real

for bad_rank in (0, 1):
    @scenario(f"full-{bad_rank}")
    def _(checkpoints, folder):
        return failing(bad_rank, OSError(errno.ENOSPC, "full"), folder, checkpoints)

@scenario("bug-1")
def _(checkpoints, folder):
    return failing(1, ValueError("a bug in a state_dict"), folder, checkpoints)

@scenario("marker")
def _(checkpoints, folder):
    save(checkpoints, 1)
    real = manager.write_marker
    def broken(entry):
        real(entry)
        raise OSError(errno.EIO, "gone")
    manager.write_marker = broken
    try:
        save(checkpoints, 2)
        return {"error": None}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)} | load(checkpoints)
    finally:
        manager.write_marker = real

@scenario("steps-differ")
def _(checkpoints, folder):
    return {"path": str(save(checkpoints, 5 + rank))}

@scenario("fenced")
def _(checkpoints, folder):
    (root / "owner.json").write_text('{"format": 1, "generation": 9}')
    os.environ.update(SLURMFT_RUN_FOLDER=str(root), SLURMFT_GENERATION="8")
    try:
        return {"path": str(save(checkpoints, 1))}
    finally:
        del os.environ["SLURMFT_RUN_FOLDER"], os.environ["SLURMFT_GENERATION"]

def damaged(checkpoints, damage):
    for step in (1, 2):
        save(checkpoints, step)
    dist.barrier()
    if rank == 0:
        damage(Catalog(checkpoints.directory).committed()[0].path)
    dist.barrier()
    return load(checkpoints)

@scenario("no-rank-file")
def _(checkpoints, folder):
    return damaged(checkpoints, lambda path: (path / "rank-00001.pt").unlink())

@scenario("bad-rank-file")
def _(checkpoints, folder):
    def damage(path):
        size = (path / "rank-00001.pt").stat().st_size
        (path / "rank-00001.pt").write_bytes(b"x" * size)
    return damaged(checkpoints, damage)

@scenario("no-shared-file")
def _(checkpoints, folder):
    return damaged(checkpoints, lambda path: (path / "shared.pt").unlink())

@scenario("none-usable")
def _(checkpoints, folder):
    save(checkpoints, 1)
    if rank == 0:
        (Catalog(folder).committed()[0].path / "rank-00001.pt").unlink()
    dist.barrier()
    return load(checkpoints)

@scenario("misfit-on-one-rank")
def _(checkpoints, folder):
    save(checkpoints, 1)
    other = torch.nn.Linear(8, 4 + rank)
    checkpoints.load_latest(other, torch.optim.AdamW(other.parameters()))

@scenario("unlistable")
def _(checkpoints, folder):
    if rank == 0:
        folder.write_text("a file")
    dist.barrier()
    return load(checkpoints)

@scenario("grown")
def _(checkpoints, folder):
    before = random.getstate()
    loaded = CheckpointManager(root / "one").load_latest(plain, optimizer, loader=loader)
    return {"step": loaded.step, "position": loader.position, "rng_kept": random.getstate() == before}

(root / f"report-{rank}.json").write_text(json.dumps(report))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("two ranks")


@pytest.fixture(scope="module")
def reports(root):
    model = torch.nn.Linear(8, 4)
    from slurmft.training.data import ByteCorpus, WindowLoader

    loader = WindowLoader(ByteCorpus(torch.arange(999).to(torch.uint8), "numbers"), 8, 3)
    next(loader)
    CheckpointManager(root / "one").save(model, torch.optim.AdamW(model.parameters()), step=3, loader=loader)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(root), str(rank)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=150)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return [json.loads((root / f"report-{rank}.json").read_text()) for rank in (0, 1)]


def test_two_ranks_save_once_and_resume_exactly(reports, root):
    for report in reports:
        assert report["plain"]["step"] == 1
        assert report["plain"]["same"] and report["plain"]["position"] and report["plain"]["rng"]
    assert reports[0]["plain"]["draw"] != reports[1]["plain"]["draw"]
    [entry] = Catalog(root / "plain").committed()
    assert entry.world_size == 2
    assert sorted(path.name for path in entry.path.iterdir()) == [
        "manifest.json",
        "rank-00000.pt",
        "rank-00001.pt",
        "shared.pt",
    ]
    assert not any(name.startswith("module.") for name in torch.load(entry.path / "shared.pt")["model"])


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(reports, bad_rank):
    seen = [report[f"full-{bad_rank}"] for report in reports]
    assert seen[0] == seen[1]
    assert seen[0]["error"] == "CheckpointError"
    assert f"rank {bad_rank}: {os.strerror(errno.ENOSPC)}" in seen[0]["text"]
    assert seen[0]["left"] == ["step-00000001.g0.c1"] and seen[0]["step"] == 1


def test_any_other_failure_of_one_rank_reaches_all(reports):
    mine, theirs = reports[1]["bug-1"], reports[0]["bug-1"]
    assert "rank 1: ValueError: a bug in a state_dict" in mine["text"]
    assert "rank 1: an error that its log shows" in theirs["text"]
    assert mine["step"] == theirs["step"] == 1


def test_a_marker_that_may_not_be_durable_is_taken_back(reports):
    for report in reports:
        assert report["marker"]["error"] == "CheckpointError" and report["marker"]["step"] == 1


def test_ranks_at_different_steps_commit_nothing(reports, root):
    assert all(report["steps-differ"]["error"] == "CheckpointError" for report in reports)
    assert Catalog(root / "steps-differ").scan().committed == []


def test_a_fenced_attempt_is_told_so_on_every_rank(reports):
    assert [report["fenced"]["error"] for report in reports] == ["Fenced", "Fenced"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-rank-file", "rank-00001.pt is missing"),
        ("bad-rank-file", "rank-00001.pt has the wrong checksum"),
        ("no-shared-file", "shared.pt is missing"),
    ],
)
def test_damage_seen_by_one_rank_makes_all_go_back(reports, name, reason):
    assert reports[0][name] == reports[1][name]
    assert reports[0][name]["step"] == 1
    assert reports[0][name]["skipped"] == [["step-00000002.g0.c2", reason]]


def test_nothing_usable_is_the_same_error_on_all(reports):
    assert reports[0]["none-usable"] == reports[1]["none-usable"]
    assert "rank-00001.pt is missing" in reports[0]["none-usable"]["text"]


def test_a_model_that_fits_on_one_rank_only_fails_on_both(reports):
    assert [report["misfit-on-one-rank"]["error"] for report in reports] == ["CheckpointError"] * 2


def test_a_directory_that_cannot_be_listed_fails_on_both(reports):
    assert [report["unlistable"]["error"] for report in reports] == ["CheckpointError"] * 2


def test_more_ranks_than_saved_go_on_at_the_global_position(reports):
    assert [report["grown"]["step"] for report in reports] == [3, 3]
    assert [report["grown"]["position"] for report in reports] == [3, 3]
    assert [report["grown"]["rng_kept"] for report in reports] == [False, True]


def test_fewer_ranks_than_saved_go_on_at_the_global_position(reports, root, caplog):
    from slurmft.training.data import ByteCorpus, WindowLoader

    model = torch.nn.Linear(8, 4)
    loader = WindowLoader(ByteCorpus(torch.arange(999).to(torch.uint8), "numbers"), 8, 4)
    loaded = CheckpointManager(root / "plain").load_latest(model, torch.optim.AdamW(model.parameters()), loader=loader)
    assert (loaded.step, loaded.world_size, loader.position) == (1, 2, 4)
    assert "2 ranks saved, 1 go on" in caplog.text
