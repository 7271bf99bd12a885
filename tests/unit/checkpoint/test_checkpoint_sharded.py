"""FSDP2 over gloo: 2 x 2 ranks save, 4 load and save, then 2, then 3; the full state stays the same to the bit.

One process imports torch once and forks the ranks; ranks that a part does not need wait.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from slurmft import CheckpointManager
from slurmft.errors import UsageError

SCRIPT = """
import hashlib, json, os, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
import stored_state
from slurmft.checkpoint.state import capture
from slurmft.checkpoint.image import Layout
from slurmft.checkpoint.image_file import Spread, read_index
from slurmft.checkpoint.loading import prepare
from slurmft.checkpoint.state import Trainee

root, parts = Path(sys.argv[1]), json.loads(sys.argv[2])
torch.set_num_threads(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(7, 10)   # 10 and 7 are no multiples of 4 or 3
        self.narrow = torch.nn.Linear(10, 1, bias=False)  # 1 row: only one rank has a part
        self.norm = torch.nn.BatchNorm1d(10)
        self.free = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return self.narrow(self.norm(self.wide(x))) * self.free.sum()

def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value

def hashed(flat):
    return {key: hashlib.sha256(full(value).contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for key, value in sorted(flat.items()) if isinstance(value, torch.Tensor) and value.numel()}

def play(rank, source, target, mesh):
    size, group = mesh.size(), mesh.get_group() if mesh.ndim == 1 else None
    torch.manual_seed(int(source is None))
    model = Net()
    fully_shard(model.wide, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.free})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainee, report = Trainee(model, optimizer), {}

    def train():
        torch.manual_seed(5)
        model(torch.randn(6, 7)).pow(2).mean().backward()  # the same on all ranks
        optimizer.step()
        optimizer.zero_grad()

    if source is None:
        train(), train()
    else:
        ranks = len(list((root / source).glob("*.distcp")))
        stored = stored_state.opened(root / source, rank=rank, ranks=ranks)
        prepared = prepare(trainee, stored, rank=rank, world_size=ranks)
        prepared.apply()
        holders = read_index(root / source / "__0_0.json").holders.by_key
        report["rows"] = sorted(key for key, holder in holders.items() if isinstance(holder, Spread))
        report["is_own"] = prepared.is_own
    state = capture(trainee, None, rank=rank)
    report["digest"] = hashed(state.tensors)
    report["sharded"] = sorted(key for key, value in state.tensors.items() if isinstance(value, DTensor))
    report["fingerprint"] = Layout.plan(state.tensors, shard=rank, shards=size).fingerprint
    (root / target).mkdir(exist_ok=True)
    index = stored_state.save(root / target, trainee, extra={"of": target}, rank=rank, ranks=size)
    report["bytes"] = sum(item.data_length for item in index.items if item.kind == "tensor")
    report["keys"] = [[item.key, item.starts] for item in index.items if item.kind == "tensor"]
    dist.barrier(group)
    if rank == 0:
        stored_state.commit(root / target, size)
    dist.barrier(group)
    train()  # torch alone reads it, into other values
    report["changed"] = hashed(capture(trainee, None, rank=rank).tensors) != report["digest"]
    plain = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(plain, checkpoint_id=root / target, process_group=group)
    report["dcp"] = hashed(flatten_state_dict(plain)[0])
    (root / f"report-{target}-{rank}.json").write_text(json.dumps(report))

def main(rank):
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=4,
                            timeout=timedelta(seconds=60))
    for source, target, ranks in parts:
        names = ("replicate", "shard") if isinstance(ranks[0], list) else ("shard",)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        if mesh.get_coordinate() is not None:
            play(rank, source, target, mesh)
        dist.barrier()
    dist.destroy_process_group()

torch.optim.AdamW(Net().parameters())  # imports what is slow
children = []
for rank in range(4):
    if not (child := os.fork()):
        main(rank)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
"""

PARTS = [
    (None, "hybrid", [[0, 1], [2, 3]]),
    ("hybrid", "four", [0, 1, 2, 3]),
    ("four", "two", [0, 1]),
    ("two", "three", [0, 1, 2]),
]
SIZES = {"hybrid": 4, "four": 4, "two": 2, "three": 3}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, list[dict]]:
    root = tmp_path_factory.mktemp("sharded")
    (root / "script.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, str(root / "script.py"), str(root), json.dumps(PARTS)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return {
        name: [json.loads((root / f"report-{name}-{rank}.json").read_text()) for rank in range(size)]
        for name, size in SIZES.items()
    }


def test_the_full_state_is_the_same_at_every_size(reports):
    first = reports["hybrid"][0]["digest"]
    assert len(first) > 15
    assert [report["digest"] for ranks in reports.values() for report in ranks] == [first] * 13


def test_plain_torch_reads_each_of_them(reports):
    for ranks in reports.values():
        for report in ranks:
            assert report["changed"] and report["dcp"] == report["digest"]


def test_weights_and_optimizer_state_are_spread_over_ranks(reports):
    for ranks in reports.values():
        assert {"model.wide.weight", "optimizer.state.wide.weight.exp_avg"} <= set(ranks[0]["sharded"])
        assert "optimizer.state.wide.weight.step" not in ranks[0]["sharded"]


def test_every_part_is_stored_once(reports):
    for ranks in reports.values():
        parts = [str(part) for report in ranks for part in report["keys"]]
        assert len(parts) == len(set(parts))
        assert sum(report["bytes"] for report in ranks) == sum(report["bytes"] for report in reports["two"])


def test_ranks_agree_on_the_layout(reports):
    for ranks in reports.values():
        assert len({report["fingerprint"] for report in ranks}) == 1
    assert len({ranks[0]["fingerprint"] for ranks in reports.values()}) == 4


def test_shard_0_knows_which_shards_have_which_weights(reports):
    for name in ("four", "two", "three"):
        for report in reports[name]:
            assert report["rows"] == report["sharded"]


def test_a_rank_that_did_not_exist_says_so(reports):
    assert [report["is_own"] for report in reports["two"]] == [True, True]
    assert [report["is_own"] for report in reports["three"]] == [True, True, False]


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "ZeroRedundancyOptimizer"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_knows_no_names_of_its_parts_is_refused_at_the_load(name, tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: torch.nn.Module = torch.nn.Linear(4, 4)
        if name == "FullyShardedDataParallel":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optim = importlib.import_module("torch.distributed.optim")  # warns where it is imported
            optimizer = optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(UsageError, match=f"{name} cannot be saved") as caught:
            CheckpointManager(tmp_path).load_latest(model, optimizer)
    finally:
        dist.destroy_process_group()
    assert "fully_shard" in caught.value.hint
