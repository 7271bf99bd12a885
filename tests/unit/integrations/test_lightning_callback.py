"""When a Trainer gets slurmft's callback, and what is refused; what a save between two epochs says."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from slurmft.errors import UsageError
from slurmft.integrations import lightning
from slurmft.integrations.lightning import begin_a_new_epoch
from slurmft.ipc.pages import PAGE_VARIABLE


class Callback:
    """As much of Lightning's class as the adapter knows of it."""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of the oldest version that is taken."""
    package, callbacks = ModuleType("fake_lightning"), ModuleType("fake_lightning.callbacks")
    package.__version__ = "2.5.0.post0"
    callbacks.Callback = Callback
    for module in (package, callbacks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package.__name__


@pytest.fixture
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAGE_VARIABLE, "/nowhere/page")
    monkeypatch.setenv("WORLD_SIZE", "4")


def test_outside_of_a_run_there_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(PAGE_VARIABLE, raising=False)
    lightning._say_idle.cache_clear()
    with caplog.at_level("INFO"):
        assert lightning.lightning_callbacks() == lightning.pytorch_lightning_callbacks() == []
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "this is not a run of slurmft (slurmft submit)"
    ], "said once"


@pytest.mark.usefixtures("in_a_run")
def test_in_a_run_there_is_one(package: str) -> None:
    (callback,) = lightning._callbacks(package)
    assert isinstance(callback, Callback)
    assert type(callback).__name__ == "SlurmftCallback"


@pytest.mark.usefixtures("in_a_run")
@pytest.mark.parametrize("version", ["2.4.0", "1.9.5", "3.0.0"])
def test_another_version_is_refused(package: str, version: str) -> None:
    sys.modules[package].__version__ = version
    with pytest.raises(UsageError, match=rf"from 2\.5 on and below 3\.0; this is {version}"):
        lightning._callbacks(package)


def test_the_versions_that_are_installed_and_constrained_are_those_that_are_supported() -> None:
    root = Path(__file__).parents[3]
    (given,) = re.findall(r"^\s+lightning>=(\d+)\.(\d+),<(\d+)$", (root / "setup.cfg").read_text(), re.MULTILINE)
    (newest,) = re.findall(r"^lightning==(\d+)\.(\d+)", (root / "constraints.txt").read_text(), re.MULTILINE)
    *lowest, below = map(int, given)
    assert (tuple(lowest), (below, 0)) == (lightning.MINIMUM, lightning.BELOW)
    assert lightning.MINIMUM <= tuple(map(int, newest)) < lightning.BELOW


@pytest.mark.usefixtures("in_a_run")
def test_two_callbacks_are_refused(package: str) -> None:
    both = [*lightning._callbacks(package), *lightning._callbacks(package)]
    with pytest.raises(UsageError, match="two callbacks of slurmft"):
        both[0].setup(SimpleNamespace(callbacks=both, world_size=4), None, "fit")


@pytest.mark.usefixtures("in_a_run")
def test_a_trainer_of_other_ranks_is_refused(package: str) -> None:
    own = lightning._callbacks(package)
    with pytest.raises(UsageError, match="the run has 4 workers, and this Trainer 1"):
        own[0].setup(SimpleNamespace(callbacks=own, world_size=1), None, "fit")


@pytest.mark.usefixtures("in_a_run")
def test_nothing_happens_in_a_validation_alone(package: str) -> None:
    (own,) = lightning._callbacks(package)
    trainer = SimpleNamespace(callbacks=[own], world_size=1)
    own.setup(trainer, None, "validate")
    own.on_validation_start(trainer, None)
    own.on_validation_end(trainer, None)
    own.teardown(trainer, None, "validate")


def test_a_save_between_epochs_has_no_batch_of_the_next_one() -> None:
    progress = {"total": {"ready": 16, "completed": 16}, "current": {"ready": 8, "completed": 8}, "is_last_batch": True}
    steps = {"optimizer": {"step": {"total": {"ready": 16}, "current": {"ready": 8}}}}
    loop = {
        "state_dict": {"combined_loader": [{"at": 8}]},
        "epoch_progress": {"total": {"ready": 2}, "current": {"ready": 2}},
        "epoch_loop.batch_progress": progress,
        "epoch_loop.automatic_optimization.optim_progress": steps,
        "epoch_loop.val_loop.batch_progress": {"total": {"ready": 4}, "current": {"ready": 4}},
    }
    begin_a_new_epoch(loop)
    assert progress == {
        "total": {"ready": 16, "completed": 16}, "current": {"ready": 0, "completed": 0}, "is_last_batch": False,
    }  # fmt: skip
    assert steps == {"optimizer": {"step": {"total": {"ready": 16}, "current": {"ready": 0}}}}
    assert loop["epoch_progress"] == {"total": {"ready": 2}, "current": {"ready": 2}}
    assert loop["epoch_loop.val_loop.batch_progress"]["current"] == {"ready": 4}
    assert loop["state_dict"] == {}
