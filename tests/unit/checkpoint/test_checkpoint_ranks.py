"""Two ranks over gloo: shared state once, agreement without deadlock, one checkpoint for all.

The scenarios run one after the other in one pair of processes (importing torch twice costs more than all of them); each
rank writes what it saw, and every test looks at its part.
"""

import errno
import json
import os
import random

import pytest
import torch
from of_each import of_each
from ranks import SAVING, reports_of_ranks

from slurmft.checkpoint import Catalog, CheckpointManager, loading
from slurmft.checkpoint.image_file import Damage

SCRIPT = """
import errno, json, os, random, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from slurmft.checkpoint import CheckpointManager
from slurmft.checkpoint.catalog import Catalog
from slurmft.checkpoint.write_requests import VARIABLE
from slurmft.worker.data import ByteCorpus, WindowLoader

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

def save(checkpoints, step, **parts):
    x, _ = next(loader)
    model(x.float()).pow(2).mean().backward()
    optimizer.step()
    return checkpoints.save(model, optimizer, step=step, metrics={"loss": step}, **{"loader": loader, **parts})

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

@scenario("own")
def _(checkpoints, folder):
    # a weight outside of DDP, as an expert of each rank's own; equal at the first save
    expert = torch.nn.Linear(2, 2)
    both = torch.nn.ModuleDict({"shared": torch.nn.Linear(2, 2), "expert": expert})
    for one in both.parameters():
        torch.nn.init.zeros_(one)
    both.register_buffer("noise", torch.tensor(float(rank)))  # rank 0's counts
    own = torch.optim.SGD(both.parameters(), lr=0.1)
    checkpoints.save(both, own, step=1)
    expert.weight.data.fill_(rank)
    try:
        checkpoints.save(both, own, step=2)
    finally:
        checkpoints.wait()
        report["own steps"] = [one.step for one in Catalog(folder).committed()]

def unlike(key, tensor):
    # state that one rank has alone, as a sharded optimizer has that gives each weight to one rank
    @scenario(f"unlike-{key}")
    def _(checkpoints, folder):
        one = torch.nn.Linear(2, 2)
        own = torch.optim.SGD(one.parameters(), lr=0.1)
        if tensor is not None:
            own.state[one.weight][key] = tensor
        return checkpoints.save(one, own, step=1)

unlike("missing", torch.zeros(2) if rank == 1 else None)
unlike("shape", torch.zeros(2 + rank))
unlike("type", torch.zeros(2, dtype=(torch.float32, torch.float64)[rank]))
unlike("odd\\tname\\n", None if rank == 1 else torch.zeros(2))

def failing(bad_rank, fault, folder, checkpoints, **parts):
    # a save of step 2 that meets the fault on one rank, and one of step 3 that does not
    save(checkpoints, 1)
    checkpoints.close()
    if rank == bad_rank:
        os.environ[VARIABLE] = fault  # a new manager's writer inherits it
    second = CheckpointManager(folder)
    try:
        save(second, 2, **parts)
        return {"error": None}
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error), "errno": getattr(error, "errno", None)}
        result["committed"] = [entry.step for entry in Catalog(folder).committed()]
        second.close()
        dist.barrier()
        os.environ.pop(VARIABLE, None)
        third = CheckpointManager(folder)
        result |= load(third)
        save(third, 3)
        return result | {"then": Catalog(folder).committed()[0].step}

for bad_rank in (0, 1):
    @scenario(f"full-{bad_rank}")
    def _(checkpoints, folder):
        return failing(bad_rank, f"image half written={errno.ENOSPC}", folder, checkpoints)

@scenario("no-memory-1")
def _(checkpoints, folder):
    return failing(1, f"half staged={errno.ENOMEM}", folder, checkpoints)

@scenario("marker-0")
def _(checkpoints, folder):
    return failing(0, f"before marker={errno.EIO}", folder, checkpoints)

class Buggy:
    def state_dict(self):
        if rank == 1:
            raise ValueError("a bug in a state_dict")
        return {}

    def load_state_dict(self, state):
        pass

@scenario("bug-1")
def _(checkpoints, folder):
    return failing(-1, "", folder, checkpoints, loader=Buggy())

@scenario("fenced-late")
def _(checkpoints, folder):
    late = root / "late"
    if rank == 0:
        late.mkdir()
    dist.barrier()
    os.environ.update(SLURMFT_RUN_FOLDER=str(late), SLURMFT_GENERATION="8")
    try:
        save(checkpoints, 1)
        if rank == 0:
            (late / "owner.json").write_text('{"format": 1, "generation": 9}')
        dist.barrier()
        save(checkpoints, 2)
        return {"error": None}
    finally:
        del os.environ["SLURMFT_RUN_FOLDER"], os.environ["SLURMFT_GENERATION"]

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

for shard in (0, 1):
    for name in (f"__{shard}_0.distcp", f"__{shard}_0.json"):
        @scenario(f"no-{name}")
        def _(checkpoints, folder):
            return damaged(checkpoints, lambda path: (path / name).unlink())

        @scenario(f"bad-{name}")
        def _(checkpoints, folder):
            return damaged(checkpoints, lambda path: (path / name).write_bytes(b"x" * (path / name).stat().st_size))

@scenario("bad-own")
def _(checkpoints, folder):
    # only rank 1 reads what rank 1 had for itself
    def damage(path):
        index = json.loads((path / "__1_0.json").read_text())
        [item] = [item for item in index["items"] if item["key"] == "slurmft.rank.1"]
        with (path / "__1_0.distcp").open("r+b") as stream:
            stream.seek(item["data_offset"] + item["data_length"] // 2)
            stream.write(b"?")
    return damaged(checkpoints, damage)

@scenario("none-usable")
def _(checkpoints, folder):
    save(checkpoints, 1)
    if rank == 0:
        (Catalog(folder).committed()[0].path / "__1_0.distcp").unlink()
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

@scenario("astray")
def _(checkpoints, folder):
    save(checkpoints, 1)
    if rank == 1:
        next(loader)  # of samples that are taken together, this rank has taken more
    save(checkpoints, 2)
    if rank == 0:
        next(loader)
    return load(checkpoints)

@scenario("second-manager-1")
def _(checkpoints, folder):
    save(checkpoints, 1)
    if rank == 0:
        checkpoints.close()
        checkpoints = CheckpointManager(folder)
    else:
        first, checkpoints = checkpoints, CheckpointManager(folder)
    return {"path": str(save(checkpoints, 2))}

@scenario("grown")
def _(checkpoints, folder):
    before = random.getstate()
    loaded = CheckpointManager(root / "one").load_latest(plain, optimizer, loader=loader)
    return {"step": loaded.step, "position": loader.position, "rng_kept": random.getstate() == before}

class Own:
    def __init__(self):
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]

@scenario("grown-own")
def _(checkpoints, folder):
    mine = Own()
    checkpoints = CheckpointManager(root / "one-own")
    try:
        checkpoints.load_latest(plain, optimizer, loader=mine)
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error), "taken": mine.taken}
    loaded = checkpoints.load_latest(plain, optimizer, loader=mine, allow_missing=["loader"])
    return result | {"step": loaded.step, "taken then": mine.taken}

(root / f"report-{rank}.json").write_text(json.dumps(report))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("two ranks")


class OwnPosition:
    """A loader that does not say what of its state all ranks have alike."""

    def state_dict(self):
        return {"taken": 7}

    def load_state_dict(self, state):
        raise AssertionError("it is never loaded")


@pytest.fixture(scope="module")
def reports(root):
    model = torch.nn.Linear(8, 4)
    from slurmft.worker.data import ByteCorpus, WindowLoader

    loader = WindowLoader(ByteCorpus(torch.arange(999).to(torch.uint8), "numbers"), 8, 3)
    next(loader)
    random.seed("neither rank's")
    CheckpointManager(root / "one").save(model, torch.optim.AdamW(model.parameters()), step=3, loader=loader)
    CheckpointManager(root / "one-own").save(model, torch.optim.AdamW(model.parameters()), step=3, loader=OwnPosition())
    return reports_of_ranks(SCRIPT, root, ahead=SAVING)


FILES = ["__0_0.distcp", "__0_0.json", "__1_0.distcp", "__1_0.json"]


def test_two_ranks_save_once_and_resume_exactly(reports, root):
    for report in reports:
        assert report["plain"]["step"] == 1
        assert report["plain"]["same"] and report["plain"]["position"] and report["plain"]["rng"]
    assert reports[0]["plain"]["draw"] != reports[1]["plain"]["draw"]
    [entry] = Catalog(root / "plain").committed()
    assert entry.world_size == 2
    names = [".metadata", "__0_0.distcp", "__0_0.json", "__1_0.distcp", "__1_0.json", "manifest.json"]
    assert sorted(path.name for path in entry.path.iterdir()) == names
    indexes = [json.loads((entry.path / f"__{shard}_0.json").read_text()) for shard in (0, 1)]
    keys = [[item["key"] for item in index["items"] if item["kind"] == "tensor"] for index in indexes]
    assert not set(keys[0]) & set(keys[1]) and all(keys), "each rank writes its share, and none twice"
    assert {"model.weight", "model.bias", "optimizer.state.weight.exp_avg"} < {*keys[0], *keys[1]}


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(reports, bad_rank):
    seen = [report[f"full-{bad_rank}"] for report in reports]
    assert seen[0] == seen[1]
    assert (seen[0]["error"], seen[0]["errno"]) == ("CheckpointError", errno.ENOSPC)
    assert f"rank {bad_rank}: {os.strerror(errno.ENOSPC)}" in seen[0]["text"]
    assert (seen[0]["committed"], seen[0]["step"], seen[0]["then"]) == ([1], 1, 3)


@pytest.mark.parametrize(
    ("name", "number"),
    [("no-memory-1", errno.ENOMEM), ("marker-0", errno.EIO)],
    ids=["no memory for the copy", "no marker"],
)
def test_any_error_of_the_system_has_its_number_on_all_ranks(reports, name, number):
    seen = [report[name] for report in reports]
    assert seen[0] == seen[1]
    assert (seen[0]["error"], seen[0]["errno"]) == ("CheckpointError", number)
    assert f"rank {name[-1]}: {os.strerror(number)}" in seen[0]["text"]
    assert (seen[0]["committed"], seen[0]["step"], seen[0]["then"]) == ([1], 1, 3)


def test_any_other_failure_of_one_rank_reaches_all(reports):
    mine, theirs = reports[1]["bug-1"], reports[0]["bug-1"]
    assert "rank 1: ValueError: a bug in a state_dict" in mine["text"]
    assert "rank 1: an error that its log shows" in theirs["text"]
    assert mine["step"] == theirs["step"] == 1 and mine["then"] == theirs["then"] == 3


@pytest.mark.parametrize(
    ("name", "error"),
    [("second-manager-1", "DirectoryInUse"), ("fenced", "Fenced"), ("fenced-late", "Fenced"),
     ("steps-differ", "CheckpointError"), ("misfit-on-one-rank", "CheckpointError"), ("unlistable", "CheckpointError")],
)  # fmt: skip
def test_what_one_rank_meets_is_the_same_error_on_both(reports, name, error):
    assert [report[name]["error"] for report in reports] == [error] * 2


def test_an_attempt_that_is_fenced_and_ranks_at_different_steps_commit_no_more(reports, root):
    assert Catalog(root / "steps-differ").scan().committed == []
    assert [entry.step for entry in Catalog(root / "fenced-late").committed()] == [1]


def test_parts_of_ranks_at_different_places_in_the_data_are_of_no_use(reports):
    assert reports[0]["astray"] == reports[1]["astray"]
    assert reports[0]["astray"]["step"] == 1
    [[name, reason]] = reports[0]["astray"]["skipped"]
    assert name == "step-00000002.g0.c2" and "ranks at different places in the data" in reason


def test_more_ranks_than_saved_do_not_take_another_ranks_own_position(reports):
    for rank, report in enumerate(reports):
        found = report["grown-own"]
        assert (found["error"], found["taken"]) == ("CheckpointError", 0)
        assert "1 ranks saved, and 2 load" in found["text"] and "shared_position()" in found["text"]
        assert (found["step"], found["taken then"]) == (3, 7 if rank == 0 else 0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((f"no-{name}", f"{name} is missing") for name in FILES),
        *((f"bad-{name}", f"{name} has the wrong checksum") for name in FILES),
        ("bad-own", "__1_0.distcp has the wrong checksum"),
    ],
)
def test_damage_seen_by_one_rank_makes_all_go_back(reports, name, reason):
    assert reports[0][name] == reports[1][name]
    assert reports[0][name]["step"] == 1
    assert reports[0][name]["skipped"] == [["step-00000002.g0.c2", reason]]


def test_nothing_usable_is_the_same_error_on_all(reports):
    assert reports[0]["none-usable"] == reports[1]["none-usable"]
    assert "__1_0.distcp is missing" in reports[0]["none-usable"]["text"]


@of_each(
    found__is_misfit=[
        ([Damage.NONE, Damage.NONE], False),
        ([Damage.NONE, Damage.MISFIT], True),
        ([Damage.MISFIT, Damage.MISFIT], True),
        ([Damage.MISSING, Damage.MISFIT], False),  # not whole: an older one may be, and says whether it fits
        ([Damage.CHANGED, Damage.NONE], False),
        ([Damage.NONE, loading._OTHER], True),
        ([Damage.MISSING, loading._OTHER], True),
    ]
)
def test_only_an_intact_checkpoint_is_refused_for_not_fitting(found, is_misfit):
    assert loading._fits_nowhere([[damage, 0] for damage in found]) == is_misfit


def test_more_ranks_than_saved_go_on_at_the_global_position(reports):
    assert [report["grown"]["step"] for report in reports] == [3, 3]
    assert [report["grown"]["position"] for report in reports] == [3, 3]
    assert [report["grown"]["rng_kept"] for report in reports] == [False, True]


def test_fewer_ranks_than_saved_go_on_at_the_global_position(reports, root, caplog):
    from slurmft.worker.data import ByteCorpus, WindowLoader

    model = torch.nn.Linear(8, 4)
    loader = WindowLoader(ByteCorpus(torch.arange(999).to(torch.uint8), "numbers"), 8, 4)
    loaded = CheckpointManager(root / "plain").load_latest(model, torch.optim.AdamW(model.parameters()), loader=loader)
    assert (loaded.step, loaded.world_size, loader.position) == (1, 2, 4)
    assert "2 ranks saved, 1 go on" in caplog.text


def test_a_plain_tensor_that_differs_between_ranks_is_refused_by_its_name(reports):
    for rank in reports:
        assert rank["own"]["error"] == "UsageError" and rank["own steps"] == [1]
        assert "model.expert.weight differs from rank to rank" in rank["own"]["text"]


@of_each(
    key__without=[("missing", 0), ("shape", 1), ("type", 1), ("odd\tname\n", 1)],
)
def test_a_tensor_that_some_rank_has_not_is_refused_by_its_name(reports, key, without):
    for rank in reports:
        found = rank[f"unlike-{key}"]
        assert found["error"] == "UsageError"
        assert f"rank {without} has no optimizer.state.weight.{repr(key)[1:-1]} of the same shape" in found["text"]
