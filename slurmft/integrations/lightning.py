"""Lightning, as ``lightning`` and as ``pytorch_lightning``: scripts need no line of their own.

Both packages ask the entry points below ``callbacks_factory`` for callbacks of every Trainer. In a worker of a run they
get one: it ends each step at a safe point of the session, where all ranks save or stop alike, and lets ``fit`` go on
from the newest complete save. Anywhere else they get none.

``MINIMUM`` and the newest version are tested.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

import torch

from slurmft.errors import UsageError
from slurmft.integrations.lightning_data import begin_a_new_epoch
from slurmft.integrations.lightning_fit import Fit, Process
from slurmft.ipc.pages.heartbeat import PAGE_VARIABLE

MINIMUM, BELOW = (2, 5), (3, 0)

log = logging.getLogger(__name__)


def lightning_callbacks() -> list[Any]:
    """The entry point ``lightning.pytorch.callbacks_factory``."""
    return _callbacks("lightning.pytorch")


def pytorch_lightning_callbacks() -> list[Any]:
    """The entry point ``pytorch_lightning.callbacks_factory``."""
    return _callbacks("pytorch_lightning")


def _callbacks(package: str) -> list[Any]:
    if PAGE_VARIABLE not in os.environ:
        _say_idle()
        return []
    version = importlib.import_module(package).__version__
    if not MINIMUM <= tuple(int(part) for part in version.split(".")[:2]) < BELOW:
        lowest, end = (".".join(map(str, one)) for one in (MINIMUM, BELOW))
        raise UsageError(
            f"slurmft knows {package} from {lowest} on and below {end}; this is {version}",
            hint="install a version of that range, or uninstall slurmft from this environment",
        )
    return [_callback_class(package)()]


@functools.cache
def _say_idle() -> None:
    """Once in a process, and not as a warning: scripts get here because slurmft is installed."""
    log.info("this is not a run of slurmft (slurmft submit): Lightning saves and stops as ever")


@functools.cache
def _callback_class(package: str) -> type[Any]:
    return type("SlurmftCallback", (_Hooks, importlib.import_module(f"{package}.callbacks").Callback), {})


class _Hooks:
    """The methods of the callback; Lightning calls them."""

    _fit: Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if sum(isinstance(one, _Hooks) for one in trainer.callbacks) > 1:
            raise UsageError(
                "this Trainer has two callbacks of slurmft, which would both save",
                hint="remove the one in callbacks=[...]: in a run every Trainer gets one by itself",
            )
        if (world := int(os.environ.get("WORLD_SIZE", "1"))) != trainer.world_size:
            raise UsageError(
                f"the run has {world} workers, and this Trainer {trainer.world_size}",
                hint="give the Trainer devices=<nproc_per_node> and num_nodes=<nodes> of the configuration",
            )
        # Lightning's handlers save and call scontrol inside of a signal, and broadcast there: our session's remembers
        trainer._signal_connector.register_signal_handlers = lambda: None
        if self._fit is not None:
            self._fit.restore_methods()
        self._fit = Fit(trainer, Process.shared(), self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.begin()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._fit is not None and self._fit.saves_between_epochs:
            begin_a_new_epoch(checkpoint["loops"]["fit_loop"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:  # called once in log_every_n_steps: the value waits for the device
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._fit.session.report(loss=loss.item())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.session.start_section("validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.session.end_section("validation")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._fit is not None:
            self._fit.restore_methods()
        if Process.current is not None and not isinstance(exception, SystemExit):
            Process.current.leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._fit is not None and stage == "fit":
            self._fit.end()
            self._fit.restore_methods()
            self._fit = None
