"""What users of Lightning's own requeueing reported, with real Lightning and its SLURMEnvironment, in a run of slurmft.

One rank. The script trains twice, with the same seed: a first process does so undisturbed, and then gets TERM in the
middle of a step, where the agent's part of a stop is played. A second one goes on. A ``scontrol`` that takes notes is
first on the PATH.
"""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurmft.integrations.folders import MarkedFolders
from slurmft.ipc.pages import Page
from slurmft.policy.verdict import EXIT_TEMPORARY

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="pip install lightning"),
]

LOWEST = "2.5.0"
STOP_AT, EPOCHS, BATCHES = 6, 3, 4

SCRIPT = """
    import hashlib, json, os, signal, sys, warnings
    from pathlib import Path

    warnings.filterwarnings("ignore")
    page = os.environ.pop("PAGE_OF_THE_TEST")
    import lightning.pytorch as L
    import torch
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from torch.utils.data import DataLoader, TensorDataset
    from slurmft.integrations.lightning import Process
    from slurmft.integrations.lightning import SlurmftCheckpointIO
    from slurmft.ipc.pages import Slot, StopAction
    from slurmft.policy.stop import tick_of

    root, stop_at, epochs, batches = Path(sys.argv[1]), *map(int, sys.argv[2:])
    facts = {"version": L.__version__, "steps": []}
    own = [SlurmftCheckpointIO()] if os.environ["PLUGIN_OF_THE_TEST"] else []

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))

        def training_step(self, batch):
            if Process.current.fits == 2:
                facts["steps"].append([self.current_epoch, self.global_step])
                if self.global_step == stop_at - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                    facts["files in the step"] = list({path.name for path in root.rglob("*.ckpt")} - {"trainer.ckpt"})
                    page = Process.current.session._page
                    page[Slot.ACTION] = StopAction.SAVE_AND_STOP
                    page[Slot.COMMITTED] = page[Slot.PROPOSED] = tick_of(Process.current.steps + stop_at)
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    def new_trainer():
        return L.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                         enable_model_summary=False, enable_checkpointing=False, default_root_dir=root,
                         plugins=[SLURMEnvironment(auto_requeue=True), *own], log_every_n_steps=2)

    def train():
        L.seed_everything(1)
        data = DataLoader(TensorDataset(torch.randn(2 * batches, 4)), batch_size=2, shuffle=True)
        model, trainer = Net(), new_trainer()
        trainer.fit(model, data)
        facts["loss"] = Process.current.session._page.metric()
        facts["epochs"], facts["global_step"] = trainer.current_epoch, trainer.global_step
        facts["callbacks"] = [type(one).__name__ for one in trainer.callbacks]
        return hashlib.sha256(str([value.tolist() for value in model.state_dict().values()]).encode()).hexdigest()

    try:
        facts["callbacks outside"] = [type(one).__name__ for one in new_trainer().callbacks]
        os.environ["SLURMFT_PAGE"] = page
        facts["undisturbed"] = train()
        facts["disturbed"] = train()
    finally:
        print("facts " + json.dumps(facts), flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    first: dict[str, Any]
    second: dict[str, Any]
    exit_codes: tuple[int, int]
    scontrol: str
    root: Path


def play(folder: Path, path: str = "", *, plugin: str = "") -> Outcome:
    """Train, stop and resume; ``path`` goes before all others of Python, ``plugin`` is empty for Lightning's own."""
    (folder / "bin").mkdir()
    notes, program = folder / "scontrol.txt", folder / "bin" / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {notes}\n')
    program.chmod(0o755)
    settings = {"checkpoint": {"interval": "steps", "interval_steps": 1000}}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")} | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURMFT_WORKER": json.dumps(settings), "PYTHONPATH": path,
        "PLUGIN_OF_THE_TEST": plugin,
        "SLURMFT_CHECKPOINT_DIR": str(folder / "saves"), "PAGE_OF_THE_TEST": str(folder / "page"),
        "SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1",
    }  # fmt: skip
    facts, codes = [], []
    for stop_at in (STOP_AT, 0):
        (folder / "page").unlink(missing_ok=True)
        Page.create(folder / "page", rank=0, generation=1).close()
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), *map(str, (stop_at, EPOCHS, BATCHES))]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
        told = [line[6:] for line in ended.stdout.splitlines() if line.startswith("facts ")]
        assert told, ended.stderr[-3000:]
        facts.append(json.loads(told[0]))
        codes.append(ended.returncode)
    calls = notes.read_text() if notes.exists() else ""
    return Outcome(facts[0], facts[1], (codes[0], codes[1]), calls, folder)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    yield play(tmp_path_factory.mktemp("issues"))


def check_20542(outcome: Outcome) -> None:
    """TERM was passed by, nothing was saved, and the job was not requeued."""
    assert outcome.exit_codes == (EXIT_TEMPORARY, 0), "the code with which the run goes on in the queue"
    saved = [save.place.step for save in MarkedFolders(outcome.root / "saves" / "lightning" / "fit-2", 9).complete()]
    assert STOP_AT in saved


def check_21406(outcome: Outcome) -> None:
    """A handler saved in the middle of a step, and now and then never came back."""
    assert outcome.first["files in the step"] == []
    assert not list(outcome.root.rglob("hpc_ckpt*"))
    assert len(outcome.first["steps"]) == STOP_AT, "the step was finished first, and no other one begun"


def check_15022(outcome: Outcome) -> None:
    """A script in a job array requeued all of it. Requeueing is the supervisor's, with the id of its own job."""
    assert outcome.scontrol == ""


def check_4265(outcome: Outcome) -> None:
    """The requeued training began anew, or trained more epochs than were asked for."""
    assert outcome.second["steps"][0] == [STOP_AT // BATCHES, STOP_AT]
    assert (outcome.second["epochs"], outcome.second["global_step"]) == (EPOCHS, EPOCHS * BATCHES)
    assert len(outcome.first["steps"]) + len(outcome.second["steps"]) == EPOCHS * BATCHES
    assert outcome.second["disturbed"] == outcome.second["undisturbed"] == outcome.first["undisturbed"]


CHECKS = (check_20542, check_21406, check_15022, check_4265)


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.replace("check_", "lightning#"))
def test_what_users_reported_does_not_happen(outcome: Outcome, check) -> None:
    check(outcome)


def test_outside_of_a_run_lightning_is_alone(outcome: Outcome) -> None:
    assert "SlurmftCallback" not in outcome.first["callbacks outside"]
    assert "SlurmftCallback" in outcome.second["callbacks"]
    assert outcome.second["loss"] > 0, "and is shown, although the callback is out of the list between two reports"


@pytest.mark.long
def test_with_slurmfts_checkpoint_plugin_a_run_resumes_as_well(tmp_path: Path) -> None:
    outcome = play(tmp_path, plugin="yes")
    check_20542(outcome)
    check_4265(outcome)
    files = list((tmp_path / "saves" / "lightning" / "fit-2").rglob("trainer.ckpt"))
    assert files
    assert all(b"slurmft sha256" in path.read_bytes()[-100:] for path in files)


@pytest.mark.soak
def test_the_lowest_version_does_all_of_it(tmp_path: Path) -> None:
    """The newest one is that of ``constraints.txt``, with which the tests above run."""
    target = tmp_path / "lowest"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*install, f"lightning=={LOWEST}"], check=True, timeout=300)
    (tmp_path / "run").mkdir()
    (tmp_path / "plugin").mkdir()
    for outcome in (play(tmp_path / "run", str(target)), play(tmp_path / "plugin", str(target), plugin="yes")):
        assert outcome.first["version"].startswith(LOWEST)
        for check in CHECKS:
            check(outcome)
