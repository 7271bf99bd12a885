"""One process: what is saved comes back exactly, and whatever happens to a checkpoint, an older good one is found."""

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash
from save_points import COMMIT_POINTS, STAGING_POINTS, WRITER_POINTS
from tiny_run import Run, same, steps
from waiting import until
from worker_variable import set_settings

from slurmft.checkpoint import Catalog, CheckpointManager
from slurmft.checkpoint.image_file import Claim, image_file, index_file, is_claimed
from slurmft.checkpoint.write_requests import ONCE_VARIABLE, VARIABLE
from slurmft.errors import CheckpointError, DataError, DirectoryInUse, Fenced, UsageError
from slurmft.policy.reruns import RerunSettings
from slurmft.system.files import write_json
from slurmft.worker.data import ByteCorpus, WindowLoader
from slurmft.worker.rerun import RerunStateMachine
from slurmft.worker.rerun_data import RerunDataIterator


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def three(tmp_path: Path, run: Run) -> CheckpointManager:
    """Checkpoints of steps 1, 2 and 3."""
    checkpoints = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        run.train(1)
        checkpoints.save(run.model, run.optimizer, step=step, metrics={"loss": step}, **run.parts)
    return checkpoints


def newest(checkpoints: CheckpointManager) -> Path:
    return Catalog(checkpoints.directory).committed()[0].path


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path):
    whole = Run()
    whole.train(20)
    first = Run()
    first.train(7)
    CheckpointManager(tmp_path).save(first.model, first.optimizer, step=7, metrics={}, **first.parts)
    second = Run(seed=99)
    second.train(3)
    loaded = CheckpointManager(tmp_path).load_latest(second.model, second.optimizer, **second.parts)
    second.train(20 - loaded.step)
    assert same(whole.weights(), second.weights())


def test_saving_does_not_disturb_training(tmp_path):
    plain, saving = Run(), None
    plain.train(6)
    saving = Run()
    for step in range(6):
        saving.train(1)
        CheckpointManager(tmp_path).save(saving.model, saving.optimizer, step=step + 1, **saving.parts)
    assert same(plain.weights(), saving.weights())


def test_an_empty_or_absent_directory_is_a_fresh_start(tmp_path, run):
    for folder in (tmp_path, tmp_path / "absent"):
        loaded = CheckpointManager(folder).load_latest(run.model, run.optimizer)
        assert (loaded.found, loaded.step, loaded.path, loaded.skipped) == (False, 0, None, ())
        assert not CheckpointManager(folder).load_best(run.model, run.optimizer).found


def test_what_load_returns(tmp_path, run):
    checkpoints = CheckpointManager(tmp_path)
    path = checkpoints.save(
        run.model, run.optimizer, step=4, metrics={"loss": torch.tensor(0.5)}, extra={"ema": torch.ones(2), "name": "x"}
    )
    loaded = checkpoints.load_latest(run.model, run.optimizer)
    assert (loaded.step, loaded.path, loaded.metrics, loaded.world_size) == (4, path, {"loss": 0.5}, 1)
    assert loaded.extra["name"] == "x" and torch.equal(loaded.extra["ema"], torch.ones(2))


def test_a_gradient_scaler_comes_back(tmp_path, run):
    class Scaler:
        def __init__(self, scale):
            self.scale = scale

        def state_dict(self):
            return {"scale": self.scale}

        def load_state_dict(self, state_dict):
            self.scale = state_dict["scale"]

    CheckpointManager(tmp_path).save(run.model, run.optimizer, step=1, scaler=Scaler(1024.0))
    fresh = Scaler(1.0)
    CheckpointManager(tmp_path).load_latest(run.model, run.optimizer, scaler=fresh)
    assert fresh.scale == 1024.0


# ---- damage ----------------------------------------------------------------------------------------------------------


IMAGE, INDEX = image_file(0), index_file(0)


def truncate(folder: Path) -> None:
    with (folder / IMAGE).open("r+b") as stream:
        stream.truncate(100)


def flip(name: str):
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return damage


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def marker(text: str):
    return lambda folder: (folder / "manifest.json").write_text(text)


def edit_marker(**changes):
    def damage(folder: Path) -> None:
        value = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(value | changes))

    return damage


def trusted_garbage(folder: Path) -> None:
    """Right size and hash, wrong content: written so by a sick host."""
    garbage = b"not an index" * 10
    (folder / INDEX).write_bytes(garbage)
    record = {"bytes": len(garbage), "xxh3": xxhash.xxh3_128_hexdigest(garbage)}
    edit_files(folder, lambda files: files | {INDEX: record})


def trusted_garbage_object(folder: Path) -> None:
    """An object that no torch.load takes, with right digests all the way up."""
    image, index = bytearray((folder / IMAGE).read_bytes()), json.loads((folder / INDEX).read_text())
    for item in index["items"]:
        if item["kind"] == "object" and item["key"].startswith("slurmft.rank"):
            image[item["data_offset"] : item["data_offset"] + 8] = b"garbage!"
            item["digest"] = xxhash.xxh3_128_hexdigest(image[item["offset"] : item["offset"] + item["length"]])
    (folder / IMAGE).write_bytes(image)
    text = json.dumps(index).encode()
    (folder / INDEX).write_bytes(text)
    record = {"bytes": len(text), "xxh3": xxhash.xxh3_128_hexdigest(text)}
    edit_files(folder, lambda files: files | {INDEX: record})


def edit_files(folder: Path, change) -> None:
    value = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(value | {"files": change(value["files"])}))


def index_of_another(folder: Path) -> None:
    """The files of an older checkpoint of the same size, under a marker that fits them."""
    older = folder.parent / "step-00000002.g0.c2"
    for name in (IMAGE, INDEX):
        shutil.copy(older / name, folder / name)
    records = json.loads((older / "manifest.json").read_text())["files"]
    edit_files(folder, lambda _files: records)


DAMAGES = [
    pytest.param(truncate, f"{IMAGE} has the wrong size", id="truncated"),
    pytest.param(flip(IMAGE), f"{IMAGE} has the wrong checksum", id="flipped-bit"),
    pytest.param(flip(INDEX), f"{INDEX} has the wrong checksum", id="flipped-bit-of-index"),
    pytest.param(remove(IMAGE), f"{IMAGE} is missing", id="no-image"),
    pytest.param(remove(INDEX), f"{INDEX} is missing", id="no-index"),
    pytest.param(trusted_garbage, f"{INDEX} cannot be read", id="garbage-with-a-right-hash"),
    pytest.param(trusted_garbage_object, f"{IMAGE} cannot be read", id="garbage-object-with-a-right-hash"),
    pytest.param(index_of_another, f"{INDEX} cannot be read", id="files-of-another-checkpoint"),
    pytest.param(marker("{"), "manifest.json cannot be read", id="marker-cut-off"),
    pytest.param(edit_marker(world_size=0), "manifest.json cannot be read", id="marker-of-no-rank"),
    pytest.param(edit_marker(files={}), f"{INDEX} is missing", id="marker-lists-nothing"),
    pytest.param(edit_marker(format=99), "manifest.json was written by a newer slurmft", id="newer-format"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_newest_checkpoint_is_skipped_with_its_reason(three, damage, reason, caplog):
    damaged = newest(three)
    damage(damaged)
    fresh = Run(seed=3)
    loaded = CheckpointManager(three.directory).load_latest(fresh.model, fresh.optimizer, **fresh.parts)
    assert loaded.step == 2
    [(path, why)] = loaded.skipped
    assert path == damaged and reason in why
    assert str(damaged) in caplog.text and reason in caplog.text


def test_nothing_usable_is_an_error_that_names_each_and_changes_nothing(three):
    paths = [entry.path for entry in Catalog(three.directory).committed()]
    for path, damage in zip(paths, [truncate, flip(INDEX), marker("{")], strict=True):
        damage(path)
    fresh = Run(seed=3)
    before = fresh.weights()
    with pytest.raises(CheckpointError) as caught:
        three.load_latest(fresh.model, fresh.optimizer, **fresh.parts)
    assert all(str(path) in str(caught.value) for path in paths)
    assert same(before, fresh.weights()) and fresh.loader.position == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 2)),
            "2.weight is [1, 16]",
        ),
        (torch.nn.Linear(8, 16), "it lacks bias, weight"),
        (torch.nn.Sequential(torch.nn.Linear(8, 16)), "this model has no 2.bias, 2.weight"),
    ],
    ids=["shape", "missing", "unknown"],
)
def test_a_model_that_does_not_fit_is_an_error_and_stays_whole(three, model, message):
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        three.load_latest(model, torch.optim.AdamW(model.parameters()))
    assert message in str(caught.value)
    assert same(before, list(model.parameters()))


def test_an_optimizer_that_does_not_fit_is_an_error(three, run):
    with pytest.raises(CheckpointError, match=r"optimizer group 0 has no 0\.bias, 2\.bias, 2\.weight here"):
        three.load_latest(run.model, torch.optim.AdamW(list(run.model.parameters())[:1]))


def test_other_data_is_refused_before_the_model_is_touched(three):
    fresh = Run(seed=3)
    before = fresh.weights()
    other = WindowLoader(ByteCorpus(torch.zeros(99, dtype=torch.uint8), "zeros"), 8, 4, seed=5)
    with pytest.raises(DataError, match="zeros"):
        three.load_latest(fresh.model, fresh.optimizer, scheduler=fresh.scheduler, loader=other)
    assert same(before, fresh.weights())


def test_the_state_of_another_kind_of_loader_is_refused_before_the_model_is_touched(tmp_path, run):
    machine = RerunStateMachine(RerunSettings(), data=RerunDataIterator(run.loader))
    CheckpointManager(tmp_path).save(run.model, run.optimizer, step=1, loader=machine)
    fresh = Run()
    before = fresh.weights()
    with pytest.raises(CheckpointError, match="the loader cannot take up"):
        CheckpointManager(tmp_path).load_latest(fresh.model, fresh.optimizer, loader=fresh.loader)
    assert same(before, fresh.weights())


PARTS = {
    "scheduler": lambda run: run.scheduler,
    "scaler": lambda _run: torch.amp.GradScaler("cpu"),
    "loader": lambda run: run.loader,
}


@pytest.mark.parametrize("name", PARTS)
def test_an_object_without_a_state_in_the_checkpoint_is_an_error_unless_asked_for(tmp_path, run, caplog, name):
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(
        run.model,
        run.optimizer,
        step=1,
        metrics={"loss": 1},
        **{other: PARTS[other](run) for other in PARTS if other != name},
    )
    fresh = Run(seed=9)
    given = {each: make(fresh) for each, make in PARTS.items()}
    before = fresh.weights()
    for load in (checkpoints.load_latest, checkpoints.load_best):
        with pytest.raises(CheckpointError, match=f"it has no state of the {name}") as caught:
            load(fresh.model, fresh.optimizer, **given)
        assert f"allow_missing=['{name}']" in caught.value.hint
    assert same(before, fresh.weights())
    assert checkpoints.load_latest(fresh.model, fresh.optimizer, **given, allow_missing=[name]).step == 1
    assert f"holds no {name} state" in caplog.text


def test_only_known_objects_may_be_missing(three, run):
    with pytest.raises(UsageError, match="allow_missing names 'loaders'"):
        three.load_latest(run.model, run.optimizer, allow_missing=["loaders"])


def test_a_state_that_nothing_was_passed_for_is_a_warning(tmp_path, run, caplog):
    CheckpointManager(tmp_path).save(run.model, run.optimizer, step=1, loader=run.loader)
    CheckpointManager(tmp_path).load_latest(run.model, run.optimizer)
    assert "no loader was passed" in caplog.text


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(100))


@pytest.mark.parametrize(
    ("data", "given", "said"),
    [
        pytest.param(Numbers(), {}, 1, id="a stream"),
        pytest.param(Numbers(), {"extra": {"at": 1}}, 0, id="a stream whose place the script saves"),
        pytest.param(range(100), {}, 0, id="numbered samples"),
    ],
)
def test_a_stream_that_no_checkpoint_covers_is_said_once(tmp_path, run, caplog, data, given, said):
    reading = iter(torch.utils.data.DataLoader(data))
    next(reading)
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(run.model, run.optimizer, step=step, **given)
    assert caplog.text.count("reads a stream (Numbers) that no checkpoint covers") == said
    del reading


class BufferShuffledExamplesIterable:
    """As a stream of Hugging Face's datasets has one at some place of its chain."""


@pytest.mark.parametrize(("source", "said"), [(BufferShuffledExamplesIterable, 1), (object, 0)])
def test_a_stream_that_shuffles_in_a_buffer_is_said_once(tmp_path, run, caplog, source, said):
    data = Numbers()
    data._ex_iterable = SimpleNamespace(ex_iterables=[object(), SimpleNamespace(ex_iterable=source())])
    loader = SimpleNamespace(dataset=data, state_dict=lambda: {"at": 1}, load_state_dict=lambda state: None)
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(run.model, run.optimizer, step=step, loader=loader)
    assert caplog.text.count("shuffles in a buffer") == said


class Precise(torch.optim.Optimizer):
    """Moments of more precision than the weights, a counter, and both in a list and in a dict as well."""

    def __init__(self, weights) -> None:
        super().__init__(weights, {"lr": 0.1})

    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state["moment"] = torch.zeros_like(weight, dtype=torch.float32)
                state["count"] = torch.zeros((), dtype=torch.int64)
                state["parts"] = [torch.zeros(3, dtype=torch.float64), {"deep": torch.zeros(2, dtype=torch.int32)}]
            state["moment"].mul_(0.9).add_(weight.grad.float())
            state["count"] += 2**30 + 1
            state["parts"][0] += 1 / 3
            state["parts"][1]["deep"] += 2**24 + 1
            weight.data.add_(state["moment"].to(weight.dtype), alpha=-0.1)


def trained_in(dtype: torch.dtype, optimizer=Precise, steps: int = 2):
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4).to(dtype)
    made = optimizer(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 4, dtype=dtype)).sum().backward()
        made.step()
    return model, made


def flat(value) -> list[torch.Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if values is None else [leaf for one in values for leaf in flat(one)]


@pytest.mark.parametrize("optimizer", [Precise, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_optimizers_state_keeps_its_types(tmp_path, optimizer, dtype):
    model, made = trained_in(dtype, optimizer)
    CheckpointManager(tmp_path).save(model, made, step=2)
    for trained in (0, 1):
        other, loaded = trained_in(dtype, optimizer, trained)
        CheckpointManager(tmp_path).load_latest(other, loaded)
        for weight, same_weight in zip(model.parameters(), other.parameters(), strict=True):
            there, here = flat(dict(made.state[weight])), flat(dict(loaded.state[same_weight]))
            assert [one.dtype for one in here] == [one.dtype for one in there]
            assert same(here, there)


@pytest.mark.parametrize(
    ("optimizer", "types"),
    [(Precise, {"moment": torch.float16, "count": torch.int64}),
     (torch.optim.AdamW, {"exp_avg": torch.float16, "step": torch.float32})],
)  # fmt: skip
def test_weights_of_another_type_are_an_error_unless_asked_for(tmp_path, optimizer, types):
    """Moments are cast with the weights, and counters are not, whose numbers that type could not hold."""
    model, made = trained_in(torch.bfloat16, optimizer)
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(model, made, step=2)
    other, fresh = trained_in(torch.float16, optimizer, steps=0)
    before = [weight.detach().clone() for weight in other.parameters()]
    with pytest.raises(CheckpointError, match="bfloat16 there and float16 here") as caught:
        checkpoints.load_latest(other, fresh)
    assert "allow_cast=True" in caught.value.hint and same(before, list(other.parameters()))
    assert checkpoints.load_latest(other, fresh, allow_cast=True).step == 2
    assert same([weight.to(torch.float16) for weight in model.parameters()], list(other.parameters()))
    there, here = made.state[model.weight], fresh.state[other.weight]
    assert {name: here[name].dtype for name in types} == types
    assert all(torch.equal(here[name], there[name].to(types[name])) for name in types)


# ---- transactions ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fault(monkeypatch, tmp_path):
    """Sets the fault that the next writer, or this process, meets once."""

    def set_fault(value: str) -> None:
        monkeypatch.setenv(VARIABLE, value)
        monkeypatch.setenv(ONCE_VARIABLE, str(tmp_path.with_name(f"{tmp_path.name}-hit")))

    return set_fault


def left(folder: Path) -> list[str]:
    """Everything that takes room in the checkpoint directory and is no part of a committed checkpoint."""
    committed, found = {entry.path for entry in Catalog(folder).committed()}, []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the writer cleans up meanwhile
            if path.is_file() and path.parent not in committed and path.stat().st_size > 1000:
                found.append(str(path.relative_to(folder)))
    return sorted(found)


IO_FAULTS = ["folder made", "image begun", "image half written", "image written", "image synced", "before marker"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("point", IO_FAULTS)
def test_an_error_of_the_disk_fails_the_save_and_leaves_the_older_ones(tmp_path, run, fault, point, number, eventually):
    fault(f"{point}={number}")
    Path(os.environ[ONCE_VARIABLE]).touch()
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(run.model, run.optimizer, step=1)
    Path(os.environ[ONCE_VARIABLE]).unlink()
    with pytest.raises(CheckpointError, match=f"rank 0: {os.strerror(number)}") as caught:
        checkpoints.save(run.model, run.optimizer, step=2)
    assert caught.value.errno == number
    assert steps(tmp_path) == [1]
    eventually(lambda: left(tmp_path) == [])
    checkpoints.save(run.model, run.optimizer, step=3)
    assert steps(tmp_path) == [3, 1]
    eventually(lambda: len(list(tmp_path.iterdir())) == 2)


@pytest.mark.parametrize("point", [*WRITER_POINTS, *COMMIT_POINTS])
def test_a_writer_that_is_killed_at_any_point_costs_no_save(tmp_path, run, fault, point, eventually):
    fault(f"{point}=kill")
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(run.model, run.optimizer, step=1, async_save=False)
    eventually(Path(os.environ[ONCE_VARIABLE]).exists)  # a writer gets there, maybe after its save has returned
    checkpoints.save(run.model, run.optimizer, step=2, async_save=False)
    assert steps(tmp_path) == [2, 1]
    assert CheckpointManager(tmp_path).load_latest(run.model, run.optimizer).skipped == ()


def test_writers_that_die_again_and_again_fail_the_save(tmp_path, run, monkeypatch):
    monkeypatch.setenv(VARIABLE, "image half written=kill")
    with pytest.raises(CheckpointError, match="killed by SIGKILL"):
        CheckpointManager(tmp_path).save(run.model, run.optimizer, step=1, async_save=False)
    assert steps(tmp_path) == []


@pytest.mark.parametrize("point", STAGING_POINTS)
def test_an_error_while_copying_fails_the_save_on_return(tmp_path, run, fault, point):
    fault(f"{point}={errno.ENOMEM}")
    checkpoints = CheckpointManager(tmp_path)
    with pytest.raises((CheckpointError, OSError), match=os.strerror(errno.ENOMEM)):
        checkpoints.save(run.model, run.optimizer, step=1)
    checkpoints.save(run.model, run.optimizer, step=2)
    assert steps(tmp_path)[0] == 2


def test_a_full_filesystem_fails_the_save(tmp_path, run, eventually):
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("this machine forbids mounting a tmpfs")
    try:
        checkpoints = CheckpointManager(tmp_path)
        checkpoints.save(run.model, run.optimizer, step=1)
        model = torch.nn.Linear(300, 300)
        with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)) as caught:
            checkpoints.save(model, torch.optim.SGD(model.parameters()), step=2)
        assert caught.value.errno == errno.ENOSPC
        assert steps(tmp_path) == [1]
        eventually(lambda: left(tmp_path) == [])
        assert checkpoints.load_latest(run.model, run.optimizer).step == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_read_only_place_fails_the_save(tmp_path, run):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        CheckpointManager(tmp_path / "file" / "checkpoints").save(run.model, run.optimizer, step=1)


def test_values_that_weights_only_would_refuse_are_refused_when_saving(three, run):
    for value in (object(), lambda: 0, ValueError("x")):
        with pytest.raises(CheckpointError):
            three.save(run.model, run.optimizer, step=4, extra={"value": value})
    assert steps(three.directory) == [3, 2, 1]
    assert len(list(three.directory.iterdir())) == 3


@pytest.mark.parametrize(
    "bad", [{"step": -1}, {"step": 10**15}, {"step": 1.5}, {"step": 4, "metrics": {"loss": "low"}}]
)
def test_bad_arguments_commit_nothing(three, run, bad):
    with pytest.raises(CheckpointError):
        three.save(run.model, run.optimizer, **bad)
    assert steps(three.directory) == [3, 2, 1]
    assert len(list(three.directory.iterdir())) == 3


def left_over(directory: Path, name: str, age_s: float = 0.0) -> Path:
    """What a save that was cut off has left."""
    folder = directory / name
    shutil.copytree(Catalog(directory).committed()[0].path, folder)
    (folder / "manifest.json").unlink()
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_loading_removes_nothing_and_trusts_no_left_over(three, run):
    old = left_over(three.directory, "step-00000009.g0.c9", age_s=10**6)
    before = sorted(three.directory.rglob("*"))
    assert CheckpointManager(three.directory).load_latest(run.model, run.optimizer).step == 3
    assert CheckpointManager(three.directory).load_best(run.model, run.optimizer).step == 1
    assert sorted(three.directory.rglob("*")) == before and old.exists()


def test_a_save_in_flight_survives_a_load_of_the_same_manager(tmp_path, run, monkeypatch):
    set_settings(monkeypatch, checkpoint={"bandwidth": 1000})  # it takes until a caller waits for it
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(run.model, run.optimizer, step=1, metrics={"loss": 1}, async_save=False, **run.parts)
    folder = checkpoints.save(run.model, run.optimizer, step=2, metrics={"loss": 2}, async_save=True, **run.parts)
    until(folder.exists, 20)
    best = Run(seed=9)
    assert checkpoints.load_best(best.model, best.optimizer, **best.parts).step == 1
    checkpoints.wait()
    assert steps(tmp_path) == [2, 1]


def test_a_step_that_is_saved_again_after_a_load_is_told_again(three, run, listener):
    """A run that goes back to an earlier state and on from there, in one process."""
    assert three.load_best(run.model, run.optimizer, **run.parts).step == 1
    for step in (2, 3):
        run.train(1)
        three.save(run.model, run.optimizer, step=step, metrics={"loss": step}, **run.parts)
        assert listener.saved == [*range(2, step + 1)]


def test_left_overs_go_at_the_first_save_where_no_save_can_live(three, run, eventually):
    old = left_over(three.directory, "step-00000008.g0.c8", age_s=10**6)
    young = left_over(three.directory, "step-00000009.g0.c9")
    three.close()
    again = CheckpointManager(three.directory)
    again.load_latest(run.model, run.optimizer)
    assert old.exists() and young.exists()
    again.save(run.model, run.optimizer, step=4, async_save=False)
    assert not old.exists()
    assert steps(three.directory)[0] == 4
    eventually(lambda: not young.exists())  # a later commit is durable


def test_the_first_save_of_an_attempt_leaves_newer_and_claimed_saves_alone(three, run, monkeypatch):
    names = {"older": "step-00000007.g3.c7", "its own": "step-00000008.g7.c8", "newer": "step-00000009.g8.c900"}
    folders = {which: left_over(three.directory, name, age_s=10**6) for which, name in names.items()}
    claimed = left_over(three.directory, "step-00000007.g4.c7", age_s=10**6)
    three.close()
    monkeypatch.setenv("SLURMFT_GENERATION", "7")
    held = Claim(claimed)
    again = CheckpointManager(three.directory)
    again.save(run.model, run.optimizer, step=4, async_save=True)
    assert {which for which, folder in folders.items() if folder.exists()} == {"its own", "newer"}
    assert claimed.exists()
    again.wait()
    again.close()
    held.release()
    CheckpointManager(three.directory).save(run.model, run.optimizer, step=5)
    assert not claimed.exists() and folders["newer"].exists()


def test_a_save_that_waits_for_its_commit_is_claimed_and_a_committed_one_is_not(tmp_path, run, fault, eventually):
    fault("receipts complete=stop")
    checkpoints = CheckpointManager(tmp_path)
    folder = checkpoints.save(run.model, run.optimizer, step=1, async_save=True)
    eventually((folder / INDEX).exists)
    assert is_claimed(folder)
    pid = checkpoints._snapshots._writer.pid
    eventually(lambda: " T " in Path(f"/proc/{pid}/stat").read_text())
    os.kill(pid, signal.SIGCONT)
    checkpoints.wait()
    assert not is_claimed(folder) and not list(folder.glob(".*.tmp"))


def test_a_second_manager_of_the_process_may_read_and_not_save(tmp_path, run):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    first, second = CheckpointManager(tmp_path / "a"), CheckpointManager(tmp_path / "link")
    first.save(run.model, run.optimizer, step=1)
    assert second.load_latest(run.model, run.optimizer).step == 1
    with pytest.raises(DirectoryInUse, match="second checkpoint manager") as caught:
        second.save(run.model, run.optimizer, step=2)
    assert "close()" in caught.value.hint and isinstance(caught.value, UsageError)
    CheckpointManager(tmp_path / "b").save(run.model, run.optimizer, step=2)
    first.save(run.model, run.optimizer, step=3)
    first.close()
    second.save(run.model, run.optimizer, step=4)
    assert steps(tmp_path / "a")[:3] == [4, 3, 1]


def test_a_fenced_attempt_commits_nothing(three, run, monkeypatch, tmp_path_factory):
    run_folder = tmp_path_factory.mktemp("run")
    (run_folder / "owner.json").write_text('{"format": 1, "generation": 8, "job": "77"}')
    monkeypatch.setenv("SLURMFT_RUN_FOLDER", str(run_folder))
    monkeypatch.setenv("SLURMFT_GENERATION", "7")
    three.close()
    with pytest.raises(Fenced):
        CheckpointManager(three.directory).save(run.model, run.optimizer, step=4)
    assert steps(three.directory) == [3, 2, 1]
    assert len(list(three.directory.iterdir())) == 3


def test_an_attempt_fenced_while_it_writes_commits_nothing(three, run, monkeypatch, tmp_path_factory):
    run_folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("SLURMFT_RUN_FOLDER", str(run_folder))
    monkeypatch.setenv("SLURMFT_GENERATION", "7")
    set_settings(monkeypatch, checkpoint={"bandwidth": 1000})  # it takes until a caller waits for it
    three.close()
    checkpoints = CheckpointManager(three.directory)
    checkpoints.save(run.model, run.optimizer, step=4, async_save=False)
    before = steps(three.directory)
    folder = checkpoints.save(run.model, run.optimizer, step=5, async_save=True)
    write_json(run_folder / "owner.json", {"generation": 8, "job": "77"})
    with pytest.raises(Fenced):
        checkpoints.wait()
    assert steps(three.directory) == before and not (folder / "manifest.json").exists()
    with pytest.raises(Fenced):
        checkpoints.save(run.model, run.optimizer, step=6)


def test_the_marker_tells_who_wrote_it(tmp_path, run, monkeypatch):
    monkeypatch.setenv("SLURMFT_GENERATION", "7")
    monkeypatch.setenv("SLURMFT_ATTEMPT", "1234.1.2")
    path = CheckpointManager(tmp_path).save(run.model, run.optimizer, step=5, metrics={"loss": math.inf})
    assert path.name == "step-00000005.g7.c1"
    value = json.loads((path / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert (value["generation"], value["attempt"], value["world_size"]) == (7, "1234.1.2", 1)
    assert value["files"].keys() == {".metadata", IMAGE, INDEX}
    assert {name: record["bytes"] for name, record in value["files"].items()} == {
        name: (path / name).stat().st_size for name in value["files"]
    }
    assert Catalog(tmp_path).committed()[0].metrics == {"loss": math.inf}


def test_the_newest_commit_of_a_step_wins_and_replaces_the_older(three, run, monkeypatch, eventually):
    monkeypatch.setenv("SLURMFT_GENERATION", "2")
    first = three.save(run.model, run.optimizer, step=2, metrics={"loss": 9}, extra={"who": "second"})
    loaded = three.load_latest(run.model, run.optimizer)
    assert (loaded.path, loaded.extra) == (first, {"who": "second"})
    eventually(lambda: steps(three.directory) == [2, 3, 1])


def test_a_failed_save_of_a_committed_step_keeps_the_committed_one(three, run):
    with pytest.raises(CheckpointError):
        three.save(run.model, run.optimizer, step=3, extra={"value": object()})
    assert three.load_latest(run.model, run.optimizer).step == 3


def test_odd_directory_names(tmp_path, run):
    folder = tmp_path / "a b'c\"d\ne" / "$(x)"
    CheckpointManager(folder).save(run.model, run.optimizer, step=1)
    assert CheckpointManager(str(folder)).load_latest(run.model, run.optimizer).step == 1


def test_strangers_in_the_directory_are_left_alone(three, run, eventually):
    for name in ("step-00000003.g0.c3.bak", "step-3.g0.c3", "step-00000007", "notes"):
        (three.directory / name).mkdir()
    (three.directory / "step-00000008.g0.c8").write_text("a file")
    three.save(run.model, run.optimizer, step=4)
    assert three.load_latest(run.model, run.optimizer).step == 4
    eventually(lambda: len(list(three.directory.iterdir())) == 5 + 4)  # three newest, and step 1, which is the best


@pytest.mark.parametrize("bad", [{"keep_last_n": 0}, {"best_mode": "median"}])
def test_settings_that_make_no_sense_are_refused(tmp_path, bad):
    with pytest.raises(UsageError):
        CheckpointManager(tmp_path, **bad)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda model, optimizer: (model, (optimizer, optimizer)), "the optimizer is a tuple"),
        (lambda model, optimizer: ([model], optimizer), "the model is a list"),
    ],
)
def test_several_models_or_optimizers_are_refused_at_the_load(tmp_path, given, said):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=said) as caught:
        CheckpointManager(tmp_path).load_latest(*given(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert "several" in (caught.value.hint or "")


# ---- retention: the newest, the best, never the damaged in place of the good -----------------------------------------


def test_the_last_n_and_the_best_are_kept(tmp_path, run, eventually):
    checkpoints = CheckpointManager(tmp_path, keep_last_n=2)
    for step, loss in enumerate([5, 1, math.nan, -math.inf, 3, 4, 2]):
        checkpoints.save(run.model, run.optimizer, step=step, metrics={"loss": loss})
    eventually(lambda: steps(tmp_path) == [6, 5, 1])
    assert checkpoints.load_best(run.model, run.optimizer).step == 1


def test_best_may_mean_highest_and_may_be_missing(tmp_path, run, eventually):
    checkpoints = CheckpointManager(tmp_path, keep_last_n=1, best_metric="accuracy", best_mode="max")
    for step, metrics in enumerate([{"accuracy": 0.2}, {"accuracy": 0.7}, {}, {"accuracy": 0.1}]):
        checkpoints.save(run.model, run.optimizer, step=step, metrics=metrics)
    eventually(lambda: steps(tmp_path) == [3, 2, 1])  # whatever is asked for, the newest two stay
    assert checkpoints.load_best(run.model, run.optimizer).step == 1
    assert CheckpointManager(tmp_path, save_best=False).load_latest(run.model, run.optimizer).step == 3
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* has a finite metric 'loss'"):
        CheckpointManager(tmp_path).load_best(run.model, run.optimizer)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_without_save_best_only_the_last_n_stay(tmp_path, run, eventually, number):
    checkpoints = CheckpointManager(tmp_path, keep_last_n=number, save_best=False)
    for step in range(7):
        checkpoints.save(run.model, run.optimizer, step=step, metrics={"loss": step})
    checkpoints.close()
    eventually(lambda: steps(tmp_path) == [*range(6, 6 - number, -1)])


def test_a_damaged_best_gives_way_to_the_second_best(three, run):
    truncate(Catalog(three.directory).committed()[-1].path)
    loaded = three.load_best(run.model, run.optimizer)
    assert loaded.step == 2 and len(loaded.skipped) == 1


def test_going_back_never_removes_the_good_for_the_damaged(tmp_path, run, eventually):
    checkpoints = CheckpointManager(tmp_path, keep_last_n=2, save_best=False)
    for step in (100, 200):
        checkpoints.save(run.model, run.optimizer, step=step)
    truncate(newest(checkpoints))
    assert checkpoints.load_latest(run.model, run.optimizer).step == 100
    checkpoints.save(run.model, run.optimizer, step=150)
    eventually(lambda: steps(tmp_path) == [150, 200, 100])  # the damaged 200 is not one of the two
    assert checkpoints.load_latest(run.model, run.optimizer).step == 150
    checkpoints.save(run.model, run.optimizer, step=180)
    eventually(lambda: steps(tmp_path) == [180, 150])


def test_an_unreadable_marker_goes_when_it_is_older_than_all_kept_but_never_a_newer_format(three, run, eventually):
    newer, garbage, _ = [entry.path for entry in reversed(Catalog(three.directory).committed())]
    value = json.loads((newer / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps(value | {"format": 99}))
    (garbage / "manifest.json").write_text("{")
    for step in range(4, 8):
        three.save(run.model, run.optimizer, step=step)
    eventually(lambda: not garbage.exists())
    assert newer.exists()
