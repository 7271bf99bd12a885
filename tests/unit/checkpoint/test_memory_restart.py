"""Two ranks, each one a node of its own with memory of its own, train an FSDP2 model and begin anew from memory."""

import pytest
from ranks import SAVING, reports_of_ranks

SCRIPT = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
root, rank = Path(sys.argv[1]), int(sys.argv[2])
memory = root / f"memory of {rank}"
memory.mkdir()
(memory / "copies.key").write_bytes(b"k" * 64)
os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
               "SLURMFT_MEMORY_DIR": str(memory)}
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from slurmft.checkpoint import CheckpointManager; from slurmft.checkpoint import memory_sources
from slurmft.storage.checkpoint_names import Quarantine, write_quarantine

dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2,))
fetched = {}
remove = memory_sources.remove_fetched

def look_and_remove(folder):
    for path in (folder / "fetched").glob("*.image"):
        fetched[path.name] = [path.stat().st_size, path.stat().st_blocks * 512]
    remove(folder)

memory_sources.remove_fetched = look_and_remove

def trained(seed):
    torch.manual_seed(seed)
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 300)), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    return model, optimizer

def values(model):
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}

def loaded():
    model, optimizer = trained(9)
    checkpoints = CheckpointManager(root / "checkpoints")
    found = checkpoints.load_latest(model, optimizer)
    checkpoints.close()
    return found, values(model)

checkpoints, saved = CheckpointManager(root / "checkpoints"), {}
for step in (5, 10):
    model, optimizer = trained(step)
    folder = checkpoints.save(model, optimizer, step=step)
    checkpoints.wait()
    saved[step] = values(model)
checkpoints.close()
dist.barrier()
report = {}
for name in ("newest", "quarantined"):
    found, now = loaded()
    same = all(torch.equal(value, now[key]) for key, value in saved[found.step].items())
    report[name] = {"step": found.step, "source": found.source, "same": same, "fetched": dict(fetched)}
    dist.barrier()
    if rank == 0 and name == "newest":
        (marked,) = (root / "checkpoints").glob("step-00000010.*")
        write_quarantine(marked, Quarantine(reason="runs die from it"))
    dist.barrier()
(root / f"report-{rank}.json").write_text(json.dumps(report))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    return reports_of_ranks(SCRIPT, tmp_path_factory.mktemp("restart"), ahead=SAVING)


def test_each_node_reads_its_own_memory_and_fetches_only_what_all_need(reports):
    for rank, report in enumerate(reports):
        found = report["newest"]
        assert (found["step"], found["source"], found["same"]) == (10, "memory: step 10, all 2 shards", True)
        ((name, (size_bytes, held_bytes)),) = found["fetched"].items()
        assert name == f"shard-{1 - rank}.a.image"
        assert held_bytes < size_bytes / 4


def test_what_is_quarantined_on_disk_is_not_read_from_memory(reports):
    for report in reports:
        found = report["quarantined"]
        assert (found["step"], found["same"]) == (5, True)
        assert "it is quarantined" in found["source"]
