"""The callback outside of a run, and what it refuses; what it does in one is shown on the lab."""

import importlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extras import needs

from slurmft.errors import UsageError
from slurmft.integrations import folders
from slurmft.ipc.pages import PAGE_VARIABLE, Page, Slot, State

pytestmark = [needs("transformers"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def huggingface(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("slurmft.integrations.huggingface")
    for name, value in (
        ("_in_charge", None),
        ("_session", None),
        ("_said_idle", False),
        ("_engine", None),
        ("_resumed", None),
    ):
        monkeypatch.setattr(module.SlurmftCallback, name, value)
    trainer = importlib.import_module("transformers").Trainer
    monkeypatch.setattr(trainer, "get_batch_samples", trainer.get_batch_samples)
    return module


def forget_the_training(huggingface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process does."""
    monkeypatch.setattr(huggingface.SlurmftCallback, "_engine", None)
    monkeypatch.setattr(huggingface.SlurmftCallback, "_resumed", None)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    path = tmp_path / "page"
    page = Page.create(path, rank=0, generation=1)
    monkeypatch.setenv(PAGE_VARIABLE, str(path))
    return page


class OneNumber:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {"x": torch.tensor([float(index)]), "labels": torch.tensor([1.0])}


def trainer(folder: Path, *callbacks: Any, data: Any = None, **settings: Any) -> Any:
    import torch

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.line(x) - labels).square().mean()}

    import transformers

    args = transformers.TrainingArguments(
        output_dir=str(folder), save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=2, **({"max_steps": 3} | settings),
    )  # fmt: skip
    return transformers.Trainer(model=Line(), args=args, train_dataset=data or OneNumber(),
                                eval_dataset=OneNumber(), callbacks=list(callbacks))  # fmt: skip


def test_outside_of_a_run_it_says_once_that_it_does_nothing(
    tmp_path: Path, huggingface: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        trainer(tmp_path / name, huggingface.SlurmftCallback(), save_total_limit=1).train()
    assert caplog.text.count("SlurmftCallback does nothing") == 1
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["checkpoint-3"], "and it has done nothing"
    assert huggingface.last_good_checkpoint(tmp_path / "one") == str(tmp_path / "one" / "checkpoint-3")
    assert huggingface.last_good_checkpoint(tmp_path / "none") is None, (
        "transformers#40790: no error at the first start"
    )


def test_two_callbacks_are_refused(tmp_path: Path, huggingface: Any, page: Page) -> None:
    both = trainer(tmp_path / "out", huggingface.SlurmftCallback(), huggingface.SlurmftCallback())
    with pytest.raises(UsageError, match="two SlurmftCallbacks"):
        both.train()


def test_two_trainers_one_after_the_other_are_fine(tmp_path: Path, huggingface: Any, page: Page) -> None:
    for name in ("one", "two"):
        one = trainer(tmp_path / name, huggingface.SlurmftCallback(), save_total_limit=1)
        one.train()
        assert one.args.save_total_limit == 1, "it is given back"
        assert folders.finished_steps(tmp_path / name) == [3]


def streamed() -> Any:
    import torch

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([OneNumber()[index] for index in range(16)])

    return Stream()


@pytest.mark.parametrize("engine", [None, "slurmft"])
@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({}, 3),
        ({"max_steps": 8}, 8),
        ({"max_steps": 11}, 11),
        ({"max_steps": -1, "num_train_epochs": 1.4}, 12),
        ({"gradient_accumulation_steps": 3}, 3),
        ({"save_strategy": "epoch", "eval_strategy": "epoch"}, 3),
        ({"data": streamed}, 3),
    ],
    ids=["epochs", "8 steps", "11 steps", "a part of an epoch", "accumulation", "by epochs", "streamed"],
)
def test_a_training_that_was_over_trains_no_further_step(
    tmp_path: Path, huggingface: Any, page: Page, monkeypatch: pytest.MonkeyPatch,
    engine: Any, settings: dict[str, Any], end: int,
) -> None:  # fmt: skip
    """It failed behind ``train``, such as in a final evaluation."""
    monkeypatch.setenv("SLURMFT_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    weights = []
    for resumes in (False, True, True):
        forget_the_training(huggingface, monkeypatch)
        own = settings | ({"data": settings["data"]()} if "data" in settings else {})
        one = trainer(tmp_path / "out", huggingface.SlurmftCallback(engine), **own)
        folder = huggingface.last_good_checkpoint(tmp_path / "out")
        assert (folder is not None) is resumes
        one.train(resume_from_checkpoint=folder)
        assert one.state.global_step == end == page[Slot.STEP]
        assert page[Slot.STATE] == State.FINISHED
        weights.append({name: value.tolist() for name, value in one.model.state_dict().items()})
    assert weights[0] == weights[1] == weights[2]


def test_a_longer_training_goes_on_where_one_was_over(tmp_path: Path, huggingface: Any, page: Page) -> None:
    for last in (3, 3, 5):
        one = trainer(tmp_path / "out", huggingface.SlurmftCallback(), max_steps=last)
        one.train(resume_from_checkpoint=huggingface.last_good_checkpoint(tmp_path / "out"))
        assert one.state.global_step == last


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"save_only_model": True}, "nothing to resume from"), ({"enable_jit_checkpoint": True}, "two would save")],
)
def test_settings_that_do_not_go_with_it(
    tmp_path: Path, huggingface: Any, page: Page, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        trainer(tmp_path / "out", huggingface.SlurmftCallback(), **settings)


@pytest.mark.parametrize("version", ["4.56.2", "3.5.1", "4.9"])
def test_old_versions_are_refused(huggingface: Any, version: str) -> None:
    with pytest.raises(UsageError, match=f"transformers {version} is not supported.*4.57"):
        huggingface.check_version(version)


@pytest.mark.parametrize("version", ["4.57.0", "5.23.0", "6.0.0.dev0", None])
def test_these_versions_are_tried(huggingface: Any, version: str | None) -> None:
    huggingface.check_version(version or importlib.metadata.version("transformers"))


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('no transformers here')")
    code = "import slurmft, slurmft.integrations\nimport slurmft.integrations.huggingface"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "needs transformers\n  hint: pip install transformers accelerate" in result.stderr


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"ignore_data_skip": True}, "ignore_data_skip=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
    ],
)
def test_settings_that_need_the_trainers_own_files(
    tmp_path: Path, huggingface: Any, page: Page, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=f"{what} needs the Trainer's own files"):
        trainer(tmp_path / "out", huggingface.SlurmftCallback("slurmft"), **settings)


def test_no_other_engine(huggingface: Any) -> None:
    with pytest.raises(UsageError, match="engine='torch'"):
        huggingface.SlurmftCallback("torch")


def test_outside_of_a_run_the_engine_does_nothing(tmp_path: Path, huggingface: Any) -> None:
    trainer(tmp_path / "out", huggingface.SlurmftCallback("slurmft")).train()
    assert huggingface.last_good_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-3")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huggingface: Any, page: Page) -> Path:
    """The folder of a training that has ended at step 3; of a run whose process has one training."""
    monkeypatch.setenv("SLURMFT_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    trainer(tmp_path / "out", huggingface.SlurmftCallback("slurmft")).train()
    forget_the_training(huggingface, monkeypatch)
    return tmp_path / "out"


def test_the_engine_goes_on_from_its_checkpoint(huggingface: Any, engine: Path) -> None:
    again = trainer(engine, huggingface.SlurmftCallback("slurmft"), max_steps=5)
    folder = huggingface.last_good_checkpoint(engine)
    assert folder == str(engine / "slurmft-3")
    again.train(resume_from_checkpoint=folder)
    assert again.state.global_step == 5
    assert sorted(path.name for path in engine.glob("slurmft-*")) == ["slurmft-3", "slurmft-4", "slurmft-5"]
    assert not list(engine.glob("checkpoint-*"))


def test_a_training_that_would_begin_anew_beside_checkpoints_is_refused(huggingface: Any, engine: Path) -> None:
    with pytest.raises(UsageError, match="has checkpoints, and the Trainer begins anew"):
        trainer(engine, huggingface.SlurmftCallback("slurmft")).train()


def test_another_output_folder_is_refused(tmp_path: Path, huggingface: Any, engine: Path) -> None:
    trainer(tmp_path / "other", huggingface.SlurmftCallback("slurmft"))
    with pytest.raises(UsageError, match="the run has a checkpoint of step 3, and there is no"):
        huggingface.last_good_checkpoint(tmp_path / "other")


def test_the_trainer_does_not_find_the_engines_folders(
    huggingface: Any, engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There are no weights in them."""
    trainer(engine, huggingface.SlurmftCallback())
    assert huggingface.last_good_checkpoint(engine) is None
    assert "was trained with engine='slurmft'" in caplog.text
    assert importlib.import_module("transformers.trainer_utils").get_last_checkpoint(str(engine)) is None


def test_one_training_of_a_run_has_the_engine(tmp_path: Path, huggingface: Any, page: Page) -> None:
    trainer(tmp_path / "one", huggingface.SlurmftCallback("slurmft"))
    with pytest.raises(UsageError, match="two trainings of one run"):
        trainer(tmp_path / "two", huggingface.SlurmftCallback("slurmft"))


def test_the_versions_that_are_installed_and_constrained_are_those_that_are_supported() -> None:
    limits = importlib.import_module("slurmft.integrations.huggingface")
    root = Path(__file__).parents[3]
    (lowest,) = re.findall(r"^\s+transformers>=(\d+)\.(\d+)$", (root / "setup.cfg").read_text(), re.MULTILINE)
    (newest,) = re.findall(r"^transformers==(\d+)\.(\d+)", (root / "constraints.txt").read_text(), re.MULTILINE)
    assert (tuple(map(int, lowest)), tuple(map(int, newest))) == (limits.LOWEST, limits.NEWEST)
