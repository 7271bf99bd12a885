"""Where a Lightning training is in its data: which batches of the epoch are done, and the draws that ordered them.

Lightning counts the batches of an unfinished epoch when it resumes, but reads them from the first one again, and saves
no generator. Here the epoch begins as it did: with the same random numbers, and the batches that are done are read and
left out. Loaders with ``state_dict`` (torchdata's StatefulDataLoader) go to their place by themselves.
"""

from __future__ import annotations

import logging
from typing import Any

from slurmft.trainer import rng, stateful_loader

log = logging.getLogger(__name__)


class EpochData:
    """The data of one call of ``Trainer.fit``, on this rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: dict[str, Any] = {}
        self._epoch_rng: rng.RandomState | None = None
        self._is_first = True

    def state(self, *, between_epochs: bool) -> dict[str, Any]:
        """To save: batches of the epoch that are done, generators before it, and states of loaders that have one."""
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        stateful_loader.mend()
        loaders = [] if between_epochs else self._trainer.fit_loop._combined_loader._state_dicts()
        return {"batches": 0 if between_epochs else batches, "epoch_rng": self._epoch_rng, "loaders": loaders}

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state`` returned, with ``rng`` added; nothing where it is empty."""
        self._saved = saved

    def restore_randomness(self) -> None:
        """Before an epoch: a training that was saved between two epochs has its generators again."""
        if self._saved and not self._saved["batches"]:
            rng.restore(self._saved["rng"])
            self._saved = {}

    def begin_epoch(self, original: Any, data_fetcher: Any) -> None:
        """In place of the epoch loop's ``on_run_start``: the iterator is made with known random numbers.

        The first one of a process was made earlier, before loaders knew the epoch they shuffle for.
        """
        saved, self._saved = self._saved, {}
        is_first, self._is_first = self._is_first, False
        if saved:
            rng.restore(saved["epoch_rng"])
        self._epoch_rng = rng.capture()
        if is_first:
            stateful_loader.mend()
            data_fetcher.combined_loader._load_state_dicts(loaders := saved.get("loaders", []))
            iter(data_fetcher)
            if saved and not loaders:
                self._skip(data_fetcher, saved["batches"])
        if saved:
            rng.restore(saved["rng"])
        original(data_fetcher)

    def _skip(self, data_fetcher: Any, batches: int) -> None:
        if batches and self._trainer.is_global_zero:
            log.info("reading the first %d batches of the epoch again, to go on behind them", batches)
        for _ in range(batches):
            next(data_fetcher)
        data_fetcher.fetched = 0  # Lightning adds those that are done


def begin_a_new_epoch(loop: dict[str, Any]) -> None:
    """In the state of a fit loop between two epochs: no batch of the next one is done.

    Lightning leaves the counters of the old epoch there, and with ``max_steps`` would go on behind its last batch.
    """
    loop.get("state_dict", {}).pop("combined_loader", None)
    for key, progress in loop.items():
        if key.startswith("epoch_loop.") and not key.startswith("epoch_loop.val_loop."):
            _zero_current(progress)


def _zero_current(progress: dict[str, Any]) -> None:
    for key, value in progress.items():
        if key == "current":
            value.update(dict.fromkeys(value, 0))
        elif key == "is_last_batch":
            progress[key] = False
        elif isinstance(value, dict) and key != "total":
            _zero_current(value)
