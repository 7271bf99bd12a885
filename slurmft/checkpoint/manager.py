"""Saving and resuming a training run, on one process or on many.

A save is a transaction of all ranks: rank 0 begins a folder, every rank writes, all learn whether all could, rank 0
commits by writing the marker, all learn whether it could. Whatever happens before the marker leaves the older
checkpoints as they were. Between these points ranks exchange a few integers and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, SupportsFloat

import torch

from slurmft.checkpoint.agreement import Guard, failure, record_from_row, record_to_row
from slurmft.checkpoint.catalog import (
    SHARED,
    Catalog,
    Entry,
    FileRecord,
    rank_file,
    write_marker,
)
from slurmft.checkpoint.folders import begin_folder, prune, remove_folder, remove_left_overs
from slurmft.checkpoint.loading import LoadedCheckpoint, load_first_usable
from slurmft.checkpoint.payload import write_payload
from slurmft.checkpoint.retention import by_merit
from slurmft.checkpoint.state import Stateful, Trainee, refuse_sharded
from slurmft.checkpoint.team import Team
from slurmft.checkpoint.write_requests import BestMode, Keep
from slurmft.errors import CheckpointError, UsageError
from slurmft.storage.checkpoint_names import MANIFEST, MAX_STEP, Identity
from slurmft.storage.fence import check_fence
from slurmft.storage.files import fsync_folder

log = logging.getLogger(__name__)

ATTEMPT_VARIABLE = "SLURMFT_ATTEMPT"


class CheckpointManager:
    """The checkpoints of one training run.

    Every method is a collective when torch.distributed is initialised: all ranks call it with the same arguments.
    Replicated (DDP) models; model, optimizer, scheduler and scaler are written once, by rank 0. The directory lies on
    a filesystem that every rank sees.

    Args:
        keep_last_n: checkpoints of this many steps are kept (at least 1).
        save_best: keep the one with the best ``best_metric`` as well, however old.
        best_metric: a key of ``metrics``; checkpoints without it, or where it is not finite, are never best.

    Raises:
        UsageError: an argument makes no sense.
    """

    def __init__(
        self,
        checkpoint_dir: Path | str,
        keep_last_n: int = 3,
        save_best: bool = True,
        best_metric: str = "loss",
        best_mode: BestMode = "min",
    ) -> None:
        if keep_last_n < 1:
            raise UsageError(f"keep_last_n is {keep_last_n}; at least 1 checkpoint must be kept")
        if best_mode not in ("min", "max"):
            raise UsageError(f"best_mode is {best_mode!r}; it is 'min' or 'max'")
        self.directory = Path(checkpoint_dir)
        self.keep_last_n = keep_last_n
        self.save_best = save_best
        self.best_metric = best_metric
        self.best_mode: BestMode = best_mode
        self._distrusted: set[Path] = set()

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        step: int,
        metrics: Mapping[str, SupportsFloat] | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Commit a checkpoint of ``step`` and return its folder; then remove what is no longer to be kept.

        On return the checkpoint is durable and every rank knows it. Random number generators are saved and not
        disturbed. ``extra`` (rank 0's) takes plain values and tensors.

        Raises:
            CheckpointError: nothing was committed, older checkpoints are untouched; raised by all ranks alike, with
                the ranks that failed and why.
            Fenced: a newer attempt owns the run; nothing was committed.
            UsageError: the model is sharded over ranks.
        """
        refuse_sharded(model)
        started_s = time.monotonic()
        team = Team()
        trainee = Trainee(model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
        identity = self._begin(team, step)
        folder = self.directory / identity.folder_name
        files = self._write(team, folder, trainee, extra, agrees=identity.step == step)
        self._commit(team, identity, files, metrics or {})
        if team.is_lead:
            size_mib = sum(record.size_bytes for record in files.values()) / 2**20
            seconds = time.monotonic() - started_s
            log.info("committed %s: step %d, %.1f MiB, %.2f s", folder, step, size_mib, seconds)
            self._prune()
        return folder

    def load_latest(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
    ) -> LoadedCheckpoint:
        """Resume from the newest checkpoint that every rank can verify; what is skipped is logged and returned.

        Nothing is loaded into the objects before every rank has read and verified its part. With the same world size,
        training goes on bit for bit. With another one, the loader goes on at the global position, and ranks that have
        no random state in the checkpoint keep theirs, with a warning.

        Raises:
            CheckpointError: checkpoints exist and none is usable (each is named with its reason), or an intact one
                does not fit the model or optimizer.
        """
        trainee = Trainee(model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
        return self._load(trainee, self._newest_first)

    def load_best(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
    ) -> LoadedCheckpoint:
        """As ``load_latest``, in order of ``best_metric`` instead of age.

        Raises:
            CheckpointError: as ``load_latest``; also when checkpoints exist and none has a finite ``best_metric``.
        """
        trainee = Trainee(model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
        return self._load(trainee, self._best_first)

    def _begin(self, team: Team, step: int) -> Identity:
        guard, row = Guard(), [0, 0, 0]
        if team.is_lead:
            with guard:
                if not 0 <= operator.index(step) <= MAX_STEP:
                    raise UsageError(f"step is {step}; it counts completed steps")
                check_fence()
                remove_left_overs(self.directory, is_saving=True)
                identity = begin_folder(self.directory, step)
                row = [identity.step, identity.generation, identity.commit]
        code, *row = team.from_lead([guard.code, *row])
        if code:
            raise failure(f"step {step} was not saved to {self.directory}", [code], team, guard)
        return Identity(*row)

    def _write(
        self, team: Team, folder: Path, trainee: Trainee, extra: Mapping[str, Any] | None, *, agrees: bool
    ) -> dict[str, FileRecord]:
        guard, own, files = Guard(), FileRecord(0, "0" * 64), {}
        with guard:
            if not agrees:
                raise UsageError(f"rank {team.rank} saves another step than rank 0 does ({folder.name})")
            with contextlib.suppress(FileExistsError):
                # On a network filesystem this rank may still remember that the folder did not exist.
                os.mkdir(folder)  # noqa: PTH102 - pathlib's exist_ok looks at that same stale memory
            own = write_payload(folder / rank_file(team.rank), trainee.rank_payload())
            if team.is_lead:
                files[SHARED] = write_payload(folder / SHARED, trainee.shared_payload(extra))
        rows = team.exchange([guard.code, *record_to_row(own)])
        codes = [row[0] for row in rows]
        if any(codes):
            if team.is_lead:
                remove_folder(folder)
            raise failure(f"{folder} was not written", codes, team, guard)
        return files | {rank_file(rank): record_from_row(row[1:]) for rank, row in enumerate(rows)}

    def _commit(
        self, team: Team, identity: Identity, files: Mapping[str, FileRecord], metrics: Mapping[str, SupportsFloat]
    ) -> None:
        guard, folder = Guard(), self.directory / identity.folder_name
        if team.is_lead:
            with guard:
                entry = Entry(
                    step=identity.step,
                    path=folder,
                    metrics={str(name): float(value) for name, value in metrics.items()},
                    committed_at=datetime.now(UTC),
                    generation=identity.generation,
                    commit=identity.commit,
                    attempt=os.environ.get(ATTEMPT_VARIABLE, ""),
                    world_size=team.world_size,
                    files=files,
                )
                fsync_folder(folder)
                check_fence()
                write_marker(entry)
                fsync_folder(self.directory)
            if guard.error is not None:
                remove_folder(folder)
        (code,) = team.from_lead([guard.code])
        if code:
            raise failure(f"{folder} was not committed", [code], team, guard)

    def _prune(self) -> None:
        keep = Keep(
            keep_last_n=self.keep_last_n,
            best_metric=self.best_metric if self.save_best else "",
            best_mode=self.best_mode,
            distrusted=tuple(path.name for path in self._distrusted),
        )
        with Guard() as guard:
            prune(self.directory, keep)
        if guard.error is not None:
            log.warning("old checkpoints in %s were not removed: %s", self.directory, guard.error)

    def _load(self, trainee: Trainee, candidates: Callable[[], list[Identity]]) -> LoadedCheckpoint:
        loaded = load_first_usable(self.directory, trainee, candidates)
        self._distrusted |= {path for path, _ in loaded.skipped}
        return loaded

    def _newest_first(self) -> list[Identity]:
        catalog = Catalog(self.directory)
        return [one for one in catalog.identities() if (self.directory / one.folder_name / MANIFEST).exists()]

    def _best_first(self) -> list[Identity]:
        committed = Catalog(self.directory).committed()
        ordered = by_merit(committed, self.best_metric, self.best_mode)
        if committed and not ordered:
            raise CheckpointError(
                f"no checkpoint in {self.directory} has a finite metric {self.best_metric!r}",
                hint="pass metrics= to save(), or use load_latest",
            )
        return [Identity(entry.step, entry.generation, entry.commit) for entry in ordered]
