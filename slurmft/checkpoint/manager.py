"""Saving and resuming a training run, on one process or on many.

A save begins with one exchange of integers between all ranks, and then each rank copies its part into shared memory;
the training loop pays for nothing else. Each rank's writer process makes its part durable, and rank 0's commits the
checkpoint once all parts are. Any failure before that leaves the older checkpoints as they were.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import operator
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, SupportsFloat, cast

import torch

from slurmft.checkpoint.agreement import (
    OWN_STATE,
    SAVED_ONCE,
    Guard,
    LeadExtra,
    Row,
    Turn,
    failure,
    refuse_unlike,
    two_are_under_way,
)
from slurmft.checkpoint.catalog import Catalog, Entry, Pruner, own_generation, remove_left_overs
from slurmft.checkpoint.image_file import read_index
from slurmft.checkpoint.just_in_time import JustInTime
from slurmft.checkpoint.loading import LoadedCheckpoint, Loading, ReadsAsMapping, prepare
from slurmft.checkpoint.memory_sources import forget_others, same_state
from slurmft.checkpoint.notes import Extra, note_sender
from slurmft.checkpoint.reading import Source, Stored
from slurmft.checkpoint.snapshots import LaidOut, Snapshots
from slurmft.checkpoint.state import (
    FACTS,
    FlatState,
    Stateful,
    Tolerance,
    Trainee,
    as_plain,
    capture,
    for_save,
    is_plain,
    number_of,
    original,
)
from slurmft.checkpoint.step_copies import LOOKS, StepCopies
from slurmft.checkpoint.write_requests import BestMode, order_of, reached
from slurmft.errors import CheckpointError, DirectoryInUse, UsageError
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.checkpoint_names import (
    MAX_STEP,
    STAGING,
    Identity,
    check_fence,
    memory_folder_of,
    ranks_of_this_node,
)
from slurmft.trainer import savers
from slurmft.trainer.savers import SAVERS, Loaded, SaveOutcome, Team, weakly

# --- Checkpoints by their name, also of any plain state of a program that has no model ---

_ID = "checkpoint_id: "
"""Beginning of the metric that an id which is no number is kept as: markers hold metrics, and can be read cheaply."""

_STATE = "plain state"


def named(entry: Entry) -> str:
    """The id that ``save_checkpoint`` was given, where it was no number; else empty."""
    return next((name.removeprefix(_ID) for name in entry.metrics if name.startswith(_ID)), "")


def _numbered(checkpoint_id: object) -> tuple[int | None, str]:
    """(step, "") or (None, name)."""
    if isinstance(checkpoint_id, str):
        if checkpoint_id.isascii() and checkpoint_id.isdecimal() and int(checkpoint_id) <= MAX_STEP:
            return int(checkpoint_id), ""
        if checkpoint_id.strip() and checkpoint_id.isprintable() and len(checkpoint_id) <= 200:
            return None, checkpoint_id
    elif not isinstance(checkpoint_id, bool):
        try:
            step = operator.index(checkpoint_id)  # type: ignore[arg-type]
        except TypeError:
            step = -1
        if 0 <= step <= MAX_STEP:
            return step, ""
    raise UsageError(f"checkpoint_id is {checkpoint_id!r:.60}", hint="a step number from 0 on, or a name of one line")


def _nothing() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that stand for none: both must be there in a checkpoint."""
    model = torch.nn.ParameterDict({"none": torch.zeros(())})
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


# --- Saving and resuming a training run, on one process or on many ---

log = logging.getLogger(__name__)

GivenExtra = Mapping[str, Any] | Extra | None

ROOM_S = 60.0
"""How long a save that must not be skipped waits for one of its two places."""

LOOK_S = 0.05
COMPARISONS = 2


class CheckpointManager:
    """The checkpoints of one training run.

    Every method is a collective when torch.distributed is initialised: all ranks call it with the same arguments.
    Replicated (DDP) and sharded (FSDP2) models; each rank writes its share. The directory lies on a filesystem that
    every rank sees. Other values come from the run's section ``checkpoint``, or its defaults.

    Args:
        keep_last_n: checkpoints of this many steps are kept (at least 1).
        save_best: keep the one with the best ``best_metric`` as well, however old.
        best_metric: a key of ``metrics``; checkpoints without it, or where it is not finite, are never best.
        keep_every: keep the first at or after every multiple of so many steps; 0: none for that reason.
        async_save: train on while a checkpoint is written.
        extra: the ``extra`` of saves that are given none; see ``save``.

    Raises:
        UsageError: an argument makes no sense.
    """

    def __init__(
        self,
        checkpoint_dir: Path | str,
        keep_last_n: int | None = None,
        save_best: bool | None = None,
        best_metric: str | None = None,
        best_mode: BestMode | None = None,
        *,
        keep_every: int | None = None,
        async_save: bool | None = None,
        extra: Extra | None = None,
    ) -> None:
        given = {
            "keep_last_n": keep_last_n, "save_best": save_best, "best_metric": best_metric, "best_mode": best_mode,
            "keep_every": keep_every, "async_save": async_save,
        }  # fmt: skip
        self.settings = WorkerSettings.from_environment(os.environ).checkpoint.changed(given)
        if self.settings.keep_last_n < 1:
            raise UsageError(f"keep_last_n is {keep_last_n}; at least 1 checkpoint must be kept")
        if self.settings.best_mode not in ("min", "max"):
            raise UsageError(f"best_mode is {best_mode!r}; it is 'min' or 'max'")
        self.directory = Path(checkpoint_dir)
        savers.mend()
        self._extra = extra
        self._distrusted: set[Path] = set()
        self._compared: set[int] = set()
        self._turn = Turn()
        self._snapshots = Snapshots(
            self.settings, memory=memory_folder_of(self.directory), spill=self.directory / STAGING,
            on_committed=weakly(self._on_committed), on_failed=weakly(self._on_failed),
        )  # fmt: skip
        self._rescue: JustInTime | None = None
        self._steps = StepCopies(self.settings.peer_interval, self._snapshots, self._turn, self.directory)
        self._is_saving, self._left_out, self._has_looked = False, 0, False
        SAVERS.join(self)
        self._finalizer = weakref.finalize(self, self._snapshots.close)  # at the end of the process at the latest

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
        extra: GivenExtra = None,
        async_save: bool | None = None,
    ) -> Path | None:
        """Save ``step`` and return the folder of the checkpoint; then prune old ones.

        With ``async_save`` this returns as soon as the state is copied, and ``wait`` returns when it is durable; else
        it is on return, and every rank knows it. Random number generators are saved and not disturbed. ``extra`` (rank
        0's) takes plain values and tensors, or a function that returns them: rank 0 calls that one now and at the end
        of every step from now on, so that a failure loses none (``checkpoint.just_in_time``).

        At most two saves are under way. Where the session saves, as it is time to, this one takes the place of a save
        that waits for the disk; None: both are being written already (``checkpoint.when_busy``). A stop takes the place
        of the newer one at once, any other save waits, for half a minute at most before it does so.

        Raises:
            CheckpointError: nothing was saved, older checkpoints are untouched; raised by all ranks alike, with the
                ranks that failed and why.
            DirectoryInUse: another manager of this process saves in this directory.
            Fenced: a newer attempt owns the run; nothing was committed.
            UsageError: the caller is a signal handler. Where the session saves for that signal at the end of the step,
                this only says so, and returns None.
        """
        if SAVERS.is_left_to_the_session():
            return None
        trainee = Trainee(model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
        SAVERS.trains(model, optimizer)
        team, extra = Team(), self._extra if extra is None else extra
        if not self._has_looked and team.is_lead:
            self._has_looked = True
            if loader is None and extra is None and (name := savers.stream_read_now()):
                log.warning(
                    "the training reads a stream (%s) that no checkpoint covers: after a restart it begins anew, "
                    "unless the script finds its place; pass loader= to save() and load_latest()",
                    name,
                )
            if savers.shuffles_in_a_buffer(getattr(loader, "dataset", None)):
                log.warning(
                    "the loader's data set shuffles in a buffer that is not in its state: a restart leaves out what is "
                    "there, and goes on with other samples than an undisturbed run; shuffle without a buffer, as "
                    "Dataset.shuffle() before to_iterable_dataset() does"
                )
        is_async = self.settings.async_save if async_save is None else async_save
        urgent = SAVERS.is_urgent or not is_async
        may_skip = SAVERS.is_periodic and not urgent and self.settings.when_busy == "skip"
        self._turn.extra = LeadExtra.of(extra)
        now = functools.partial(for_save, trainee, extra, metrics or {}, rank=team.rank, world_size=team.world_size)
        prepared = self._agree(team, now, step, urgent=urgent, may_skip=may_skip)
        if prepared is None:
            SAVERS.outcome = SaveOutcome.SKIPPED
            return None
        self._compare(team, prepared.flat, step)
        identity = Identity(step, own_generation(), self._turn.commit)
        folder = self.directory / identity.folder_name
        self._arm(trainee, extra, step=step, safe=step)  # first: a rank that dies in the copy must not lose the step
        self._stage(team, prepared, identity, urgent=urgent)
        SAVERS.outcome = SaveOutcome.STAGED
        if not is_async:
            self.wait()
        return folder

    def wait(self) -> None:
        """Return when the newest save is durable; at once where there is none.

        Raises:
            CheckpointError: it failed, for a reason that may pass (it is given up; save again) or will not.
            Fenced: a newer attempt owns the run.
        """
        if (identity := self._turn.awaited) is None:
            return
        team = Team()
        self._snapshots.hurry()
        while True:
            standing = self._snapshots.standing(identity)
            rows = team.exchange(self._turn.progress_row(team, standing))
            if any(row[1] for row in rows):
                break
            if rows[0][0]:
                self._turn.has_ended()
                self._note_committed(identity.step, rows[0][2] / 1e9)
                if self._rescue is not None:
                    self._rescue.saved(identity.step)
                self._snapshots.settled(identity)
                self._forget_others(identity.commit)
                return
            self._snapshots.sleep(identity, LOOK_S)
        self._turn.has_ended()
        self._snapshots.give_up(identity)
        guard = Guard()
        with guard:
            self._snapshots.raise_failure(identity)
        what = f"{self.directory / identity.folder_name} was not committed"
        raise failure(what, [row[1] for row in rows], team, guard)

    def close(self) -> None:
        """Let the writer finish, and release the memory; not a collective, and not needed at the end of a process."""
        SAVERS.leave(self)
        if self._rescue is not None:
            self._rescue.disarm("the manager is closed")
        self._steps.disarm("the manager is closed")
        self._finalizer()

    def load_latest(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        allow_missing: Collection[str] = (),
        allow_cast: bool = False,
    ) -> LoadedCheckpoint:
        """Resume from the newest state that every rank can verify: from memory where it is whole there, else from disk.

        Skipped checkpoints are logged and returned. Nothing is loaded into the objects before every rank has read and
        verified its part. With the same world size, training goes on bit for bit. With another one, the loader goes on
        at the position that all ranks share, and ranks that have no random state in the checkpoint keep theirs, with a
        warning. The optimizer's state keeps the types that it was saved with. Saves of this process into the directory
        are waited for first; one that fails is logged, and not found.

        Args:
            allow_missing: which of "scheduler", "scaler" and "loader" may begin anew where the checkpoint has no state
                for them, or (the loader) where one that shares no position meets another number of ranks.
            allow_cast: take weights of another dtype than the model's.

        Raises:
            Fenced: a newer attempt owns the run.
            CheckpointError: checkpoints exist and none is usable (each is named with its reason), or an intact one
                does not fit the objects.
        """
        self._settle()
        trainee = Trainee(model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
        SAVERS.trains(model, optimizer)
        loading = Loading(self.directory, trainee, Tolerance.of(allow_missing, allow_cast=allow_cast))
        loaded = self._loaded(loading, loading.newest())
        if loaded.found and not loaded.is_durable and not self._is_guest and not loaded.is_of_this_attempt:
            with SAVERS.before_step(loaded.step):
                again = self.save(
                    model, optimizer, step=loaded.step, metrics=loaded.metrics, scheduler=scheduler, scaler=scaler,
                    loader=loader, extra=loaded.extra, async_save=True,
                )  # fmt: skip
            if loaded.path is not None and again is not None:
                same_state(self.directory, loaded.path.name, again.name)
        if loaded.found:
            self._arm_loaded(trainee, loaded)
        return loaded

    def load_best(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        allow_missing: Collection[str] = (),
        allow_cast: bool = False,
    ) -> LoadedCheckpoint:
        """As ``load_latest``, in order of ``best_metric`` instead of age, and from disk.

        Raises:
            CheckpointError: as ``load_latest``; also when checkpoints exist and none has a finite ``best_metric``.
        """
        self._settle()
        trainee = Trainee(model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
        SAVERS.trains(model, optimizer)
        loading = Loading(self.directory, trainee, Tolerance.of(allow_missing, allow_cast=allow_cast))
        return self._loaded(loading, loading.best(self.settings.best_metric, self.settings.best_mode))

    def next_step(self) -> int | None:
        """The step of the state that ``load_latest`` tries first; None where there is none. Nothing is read or changed.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        self._settle()
        return Loading(self.directory, Trainee(*_nothing())).next_step()

    # By a name, or of a program that has no model

    def save_checkpoint(self, state: Any, checkpoint_id: int | str) -> Path | None:
        """Save any plain state, such as a dict of numbers, texts, lists and tensors; rank 0's where there are several.

        The id is a step number, or any other name, whose step is then the one after the newest. Saved like a model:
        committed last, verified when it is loaded, pruned by ``keep_last_n``. It is durable on return: of saves that
        overlap, a newer one may take the place of an older one, and each id is to be found again.

        Raises:
            CheckpointError: nothing was saved, older checkpoints are untouched.
            UsageError: the id is neither a number of a step nor a name, or this is a signal handler (see ``save``).
        """
        if SAVERS.is_left_to_the_session():
            return None
        step, name = _numbered(checkpoint_id)
        metrics = {f"{_ID}{name}": 0.0} if name else {}
        if step is None:
            step = self._newest_step() + 1
        return self.save(*_nothing(), step=step, metrics=metrics, extra={_STATE: as_plain(state)}, async_save=False)

    def load_checkpoint(self, checkpoint_id: int | str | None = None) -> Any:
        """The state that ``save_checkpoint`` was given under this id, or the newest one; None where there is none.

        Raises:
            CheckpointError: it exists and cannot be used, or holds a model (``load_latest`` loads those).
            UsageError: the id is neither a number of a step nor a name.
        """
        if checkpoint_id is None:
            loaded = self.load_latest(*_nothing())
        else:
            step, name = _numbered(checkpoint_id)
            loaded = self._load_chosen(
                Trainee(*_nothing()),
                lambda entry: entry.step == step if step is not None else f"{_ID}{name}" in entry.metrics,
            )
        if not loaded.found:
            return None
        if _STATE not in loaded.extra:
            raise CheckpointError(f"{loaded.path} was not saved by save_checkpoint(state, id)",
                                  hint="load_latest(model, optimizer) loads the checkpoint of a model")  # fmt: skip
        return original(loaded.extra[_STATE])

    def cleanup_old_checkpoints(self, keep_last: int | None = None) -> int:
        """Remove all but the newest ``keep_last`` (``keep_last_n`` when empty), the best one, those of ``keep_every``,
        and always the newest two good ones. Returns how many are gone.

        Every save does so by itself; this is for a lower number. Saves under way are waited for.

        Raises:
            CheckpointError: a save under way failed, or the folder cannot be read.
            UsageError: ``keep_last`` is not positive.
        """
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise UsageError(f"keep_last is {keep_last!r:.60}; at least 1 checkpoint must be kept")
        self.wait()
        team, guard, gone = Team(), Guard(), 0
        if team.is_lead:
            with guard:
                keep = order_of(self.settings, {}, self._distrusted)
                before = len(Catalog(self.directory).committed())
                Pruner(self.directory).prune(replace(keep, keep_last_n=keep_last or keep.keep_last_n))
                gone = before - len(Catalog(self.directory).committed())
        code, gone = team.from_lead([guard.code, gone])
        if code:
            raise failure(f"old checkpoints in {self.directory} were not removed", [code], team, guard)
        return gone

    def get_latest_checkpoint_id(self) -> int | str | None:
        """The id of the newest checkpoint, for ``load_checkpoint``: its step, or its name; None where there is none.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        if (step := self._newest_step()) < 0:
            return None
        entry = next((each for each in Catalog(self.directory).committed() if each.step == step), None)
        return (named(entry) if entry else "") or step

    def load_from(
        self,
        path: Path | str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        allow_missing: Collection[str] = (),
        allow_cast: bool = False,
    ) -> LoadedCheckpoint:
        """As ``load_latest``, the checkpoint in the folder ``path``, from disk. It may be another run's.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it does not fit the objects.
        """
        if not isinstance(path, str | Path) or not str(path):
            raise UsageError(f"checkpoint_path is {path!r:.60}; it is the folder of a checkpoint")
        folder = Path(path)
        trainee = Trainee(model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
        tolerance = Tolerance.of(allow_missing, allow_cast=allow_cast)
        loaded = self._load_chosen(trainee, lambda entry: entry.path.name == folder.name, folder.parent, tolerance)
        if loaded.found:
            return loaded
        if folder.is_file():
            raise CheckpointError(f"{folder} is a file, and checkpoints of slurmft are folders",
                                  hint="load it once with torch.load, then save it here")  # fmt: skip
        raise CheckpointError(f"there is no checkpoint {folder}", hint=f"slurmft checkpoint list {folder.parent}")

    def _load_chosen(
        self, trainee: Trainee, chosen: Any, directory: Path | None = None, tolerance: Tolerance | None = None
    ) -> LoadedCheckpoint:
        self._settle()
        place = directory or self.directory
        loading = Loading(place, trainee, tolerance or Tolerance.of((), allow_cast=False))
        loaded = loading.chosen(chosen)
        return self._loaded(loading, loaded) if os.path.realpath(place) == os.path.realpath(self.directory) else loaded

    def _newest_step(self) -> int:
        """Of all checkpoints, also of one that is still being written; the same on all ranks."""
        self._settle()
        return Loading(self.directory, Trainee(*_nothing())).newest_step()

    # Called by the session (trainer.savers)

    def at_boundary(self, step: int) -> None:
        """``step`` steps are complete."""
        if self._rescue is not None and not SAVERS.gradients.are_waiting:  # the weights are the last boundary's
            self._rescue.at_boundary(step)
        self._steps.at_boundary(step)

    def rescue(self) -> None:
        """A rank has failed: keep the last complete step where that is possible."""
        if self._rescue is not None:
            self._rescue.rescue()

    # Saving

    def _agree(
        self, team: Team, captured: Callable[[], FlatState], step: int, *, urgent: bool, may_skip: bool
    ) -> LaidOut | None:
        """The state, ready to be copied on every rank; None when it is not to be copied now.

        Raises:
            CheckpointError: on some rank it is not ready; alike on all ranks.
        """
        guard, prepared = Guard(), None
        with guard:
            if not 0 <= operator.index(step) <= MAX_STEP:
                raise UsageError(f"step is {step}; it counts completed steps")
            if not self._is_saving:
                self._begin(team)
            prepared = self._snapshots.prepare(captured(), rank=team.rank, world_size=team.world_size)
        deadline_s = time.monotonic() + ROOM_S
        what = f"step {step} was not saved to {self.directory}"
        given_up, looks = None, LOOKS
        while True:
            # an older one that waits is worth less than this, at the latest when it has taken that long
            must_go_first = urgent or time.monotonic() > deadline_s - ROOM_S / 2
            rows = self._turn.exchange(team, self._own_row(guard, step, prepared), must_go_first=must_go_first)
            if any(row[Row.CODE] for row in rows):
                raise failure(what, [row[Row.CODE] for row in rows], team, guard)
            assert prepared is not None, "no rank has failed"
            refuse_unlike(team, rows, prepared.layout, what)
            self._note_committed(rows[0][Row.COMMITTED_STEP], rows[0][Row.COMMITTED_NS] / 1e9)
            if rows[0][Row.COMMITTED_STEP]:
                self._snapshots.leave_spill()
            if not any(row[Row.IS_BUSY] for row in rows):
                return prepared
            if given_up is not None:
                looks -= 1
            elif may_skip or rows[0][Row.MUST_GO_FIRST]:
                given_up = self._turn.gives_way(rows)
                if given_up is not None:
                    self._snapshots.give_up(given_up)
                    self._tell_left_out(team, given_up.step, f"step {step} takes its place")
            may_look = looks > 0 if given_up is not None else not two_are_under_way(rows) and self._steps.give_way()
            if may_skip and not may_look:
                self._tell_left_out(team, step, "two earlier saves are still being written")
                return None
            self._snapshots.sleep(given_up, LOOK_S)
            with guard:
                prepared = replace(prepared, place=self._snapshots.free("disk"))
                if prepared.place is None and time.monotonic() > deadline_s:
                    raise TimeoutError(
                        errno.ETIMEDOUT, f"two earlier saves are still being written after {ROOM_S:.0f} s"
                    )

    def _own_row(self, guard: Guard, step: int, prepared: LaidOut | None) -> dict[Row, int]:
        if guard.error is not None or prepared is None:
            return {Row.CODE: guard.code}
        older, waiting = self._snapshots.under_way
        return {
            Row.STEP: step,
            Row.FINGERPRINT: prepared.layout.fingerprint,
            Row.IS_BUSY: prepared.place is None,
            Row.OLDER: older,
            Row.WAITING: waiting,
        }

    def _tell_left_out(self, team: Team, step: int, reason: str) -> None:
        """The first one, and then each time that their number has doubled: it may be so at every step."""
        self._left_out += 1
        if team.is_lead and self._left_out.bit_count() == 1:
            log.warning("step %d is not saved: %s (%d so far); saves take longer than the interval", step, reason,
                        self._left_out)  # fmt: skip

    def _compare(self, team: Team, flat: FlatState, step: int) -> None:
        """At two steps of a manager; at the first one, state that will differ may be zero still.

        Raises:
            UsageError: a tensor that is saved once, as all ranks have it alike, is another one on some rank.
        """
        if team.world_size == 1 or step in self._compared or len(self._compared) == COMPARISONS:
            return
        self._compared.add(step)
        shared = {key: one for key, one in flat.tensors.items() if key not in flat.of_lead and is_plain(one)}
        numbers = [number_of(one) for one in shared.values()]
        least = team.least([*numbers, *(-one for one in numbers)])
        unequal = [key for at, key in enumerate(shared) if least[at] != -least[len(shared) + at]]
        if unequal:
            more = f" and {len(unequal) - 1} more differ" if unequal[1:] else " differs"
            raise UsageError(
                f"step {step} was not saved to {self.directory}: {unequal[0]}{more} from rank to rank, {SAVED_ONCE}",
                hint=OWN_STATE,
            )

    def _begin(self, team: Team) -> None:
        """Before the first save: check the directory's owner; on rank 0, clean up, and find the newest number.

        Raises:
            DirectoryInUse: another manager of this process saves there.
            Fenced: a newer attempt owns the run.
        """
        if self._is_guest:
            raise DirectoryInUse(f"a second checkpoint manager of this process cannot save in {self.directory}",
                                 hint="use one manager for each directory, or close() the first one")  # fmt: skip
        if team.is_lead:
            check_fence()
            remove_left_overs(self.directory)
            self._turn.begin(Catalog(self.directory).newest_commit())
        self._is_saving = True
        for one in self._of_this_directory():
            if one is not self and one._rescue is not None:
                one._rescue.disarm("another manager saves in this directory")
            if one is not self:
                one._steps.disarm("another manager saves in this directory")

    @property
    def _is_guest(self) -> bool:
        """Whether another manager of this process saves here."""
        return any(one._is_saving for one in self._of_this_directory() if one is not self)

    def _of_this_directory(self) -> list[CheckpointManager]:
        """The managers of this directory in this process, in the same order on all ranks."""
        managers = [one for one in SAVERS.savers if isinstance(one, CheckpointManager)]
        return [one for one in managers if os.path.realpath(one.directory) == os.path.realpath(self.directory)]

    def _stage(self, team: Team, prepared: LaidOut, identity: Identity, *, urgent: bool) -> None:
        """Copy, and hand over to the writer. All ranks get errors of it at the next save or ``wait``."""
        self._turn.begins(identity)
        reached("announced")
        try:
            with self._rescue.staging() if self._rescue is not None else contextlib.nullcontext():
                metrics = prepared.flat.objects[FACTS]["metrics"] if team.is_lead else {}
                order = order_of(self.settings, metrics, self._distrusted) if team.is_lead else None
                folder = self.directory / identity.folder_name
                self._snapshots.stage(prepared, identity, folder, order=order, urgent=urgent)
        except Exception as error:
            log.exception("step %d was not copied", identity.step)
            self._snapshots.failed_here(identity, error)

    def _on_committed(self, identity: Identity, seconds: float) -> None:
        log.info("saved step %d in %.2f s: %s", identity.step, seconds, self.directory / identity.folder_name)
        self._turn.committed_here(identity.step, seconds)
        self._note_committed(identity.step, seconds)

    def _on_failed(self, step: int, number: int, text: str) -> None:
        failures = self._turn.failed_here()
        loud = log.critical if failures >= self.settings.max_failed_saves else log.warning
        loud("step %d is not saved yet (failure %d in a row): %s; training goes on", step, failures, text)
        if SAVERS.listener is not None:
            SAVERS.listener.on_save_failed(step, number)

    def _note_committed(self, step: int, seconds: float) -> None:
        """Tell the session, once for each; 0 is not a step."""
        if self._turn.is_news(step) and SAVERS.listener is not None:
            SAVERS.listener.on_saved(step, seconds)

    def _forget_others(self, commit: int) -> None:
        """Give back the memory of ranks that have left this node: this commit is durable."""
        memory, ranks = memory_folder_of(self.directory), ranks_of_this_node()
        if memory is not None and int(os.environ.get("RANK", "0")) == ranks.start:
            forget_others(memory, ranks, older_than=commit)

    def _arm(self, trainee: Trainee, extra: GivenExtra, *, step: int | None = None, safe: int) -> None:
        """Be ready to keep ``trainee``'s last complete step, where the node's memory outlives this process; a
        collective. ``safe`` steps are saved, or were loaded."""
        memory = memory_folder_of(self.directory)
        if SAVERS.listener is None or self._is_guest:
            memory = None
        known, reason = self._turn.extra.to_note(extra)
        if self.settings.just_in_time and memory is not None:
            self._rescue = self._rescue or JustInTime(memory, weakly(self._keep), note_sender())
            self._rescue.arm(trainee, reason=reason, step=step, extra=known)
            self._steps.beside = self._rescue.staging
        self._steps.arm(trainee, known, reason, step=safe, can=memory is not None)

    def _arm_loaded(self, trainee: Trainee, loaded: LoadedCheckpoint) -> None:
        """A collective. ``extra`` is asked from the next boundary on: the trainer has not seen what was loaded yet."""
        self._turn.extra = LeadExtra(Team().from_lead([LeadExtra.of(extra := self._extra or loaded.extra)])[0])
        if self._rescue is not None and self._turn.extra is LeadExtra.FUNCTION:
            self._rescue.loaded()
        self._arm(trainee, extra, safe=loaded.step)

    def _keep(self, step: int, flat: FlatState, check: Callable[[], None]) -> None:
        ahead = 2 if self.settings.peer_interval else 1  # another rank may have begun the copy of a step already
        self._snapshots.keep(flat, Identity(step, own_generation(), self._turn.commit + ahead), check)

    # Loading

    def _settle(self) -> None:
        """Return when no save of this process into the directory is under way: a load would miss it."""
        for one in self._of_this_directory():
            try:
                one.wait()
            except CheckpointError as error:
                log.warning("%s; what is there without it is loaded", error)

    def _loaded(self, loading: Loading, loaded: LoadedCheckpoint) -> LoadedCheckpoint:
        team = Team()
        self._snapshots.take_place(team.rank, team.world_size)
        SAVERS.loads += 1
        if not loaded.found:
            SAVERS.loaded = Loaded(0, loading.trainee.loader, {}, savers.capture())
        if self._rescue is not None:
            self._rescue.loaded()
        in_memory_only = Identity.parse(loaded.path.name) if loaded.path and not loaded.is_durable else None
        self._steps.loaded(in_memory_only)
        self._distrusted |= {path for path, _ in loaded.skipped}
        self._turn.begin_again(loading.newest_commit)
        if SAVERS.listener is not None:
            SAVERS.listener.on_loaded(time.monotonic() - loading.began_s)
        return loaded


# --- warm-up ---


def warm_up(folder: Path) -> None:
    """Run the code of a save and a load once, in a process that waits to become a worker: keep a tiny state below
    ``folder`` and load it; random number generators are as before.

    A fork shares its parent's pages until it touches them, and the interpreter is slow where it comes for the first
    time: both together are half of what the load of a small state takes. An error here concerns no worker.
    """
    before = savers.capture()
    try:
        with tempfile.TemporaryDirectory(prefix="warm-up-", dir=folder) as name:
            _save_and_load(Path(name))
    except Exception as error:  # noqa: BLE001 - what is wrong for the worker, too, it will report itself
        log.debug("no warm-up: %s", error)
    finally:
        savers.restore(before)


def _save_and_load(folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    trainee, settings = Trainee(model, optimizer), WorkerSettings().checkpoint
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731 - three times
    snapshots = Snapshots(settings, memory=folder, spill=folder, on_committed=ignore, on_failed=ignore)
    with contextlib.closing(snapshots):
        snapshots.keep(capture(trainee, None, rank=0), Identity(1, 0, 1), ignore)
        [path] = folder.glob("*.json")
        if (index := read_index(path)) is None:
            return
        with contextlib.closing(Stored({0: Source(image=path.with_suffix(".image"), index=index)}, own=0)) as stored:
            prepare(trainee, stored, rank=0, world_size=1).apply()


# --- The checkpoint manager under the names that many training scripts use already, to ease migration ---

_EPOCH = "epoch"


@dataclass(frozen=True, slots=True)
class TrainingState(ReadsAsMapping):
    """The state at which a script goes on.

    Also a mapping, for scripts that know a loaded file as one: ``state["step"]``, ``state["epoch"]``,
    ``state["metrics"]``, and the keys of ``extra``. It is empty when there is no checkpoint yet, and its epoch is the
    step where a save was given only one number.
    """

    step: int = 0
    """Steps that are complete; 0 when there is no checkpoint yet."""

    epoch: int = 0
    """What ``save_checkpoint(epoch=...)`` was given; 0 where nothing was."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    """The folder; None when there is no checkpoint yet."""

    has_epoch: bool = False
    """Whether the save was given an epoch."""

    def as_mapping(self) -> Mapping[str, Any]:
        """Its keys and values; none when there is no checkpoint yet."""
        if self.path is None:
            return {}
        epoch = self.epoch if self.has_epoch else self.step
        return {**self.extra, "step": self.step, "epoch": epoch, "metrics": self.metrics, "path": self.path}


class DistributedCheckpointManager:
    """``save_checkpoint``, ``load_checkpoint`` and ``cleanup_old_checkpoints`` over a ``CheckpointManager``.

    Every method is called by all ranks, also where scripts used to call it on rank 0 only. Options are those of
    ``CheckpointManager``, which is available as ``manager``.
    """

    def __init__(self, checkpoint_dir: Path | str, keep_last_n: int | None = None, **options: Any) -> None:
        self.manager = CheckpointManager(checkpoint_dir, keep_last_n, **options)

    def save_checkpoint(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        *,
        epoch: int | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """``CheckpointManager.save``; the epoch is kept as well, and is the step where none is given.

        A script that counts epochs alone passes ``save_checkpoint(model, optimizer, epoch, metrics)``.

        An epoch, like ``extra``, is what it was at the last save: saving just in time is off then. It can often be
        computed from the step.

        Raises:
            CheckpointError: nothing was saved, older checkpoints are untouched.
            UsageError: ``extra`` has a key ``epoch``, or there is neither a step nor an epoch, or one is no number.
        """
        for name, number in (("step", step), ("epoch", epoch)):
            if number is not None and (isinstance(number, bool) or not hasattr(number, "__index__")):
                raise UsageError(f"{name} is {number!r:.60}; it is an integer")
        if metrics is not None and not isinstance(metrics, Mapping):
            raise UsageError(f"metrics is {metrics!r:.60}; it is a dict of numbers")
        if step is None and epoch is None:
            raise UsageError("neither a step nor an epoch was given", hint="save_checkpoint(model, optimizer, step)")
        if step is None:
            step = epoch
        assert step is not None
        kept = dict(extra or {})
        if _EPOCH in kept:
            raise UsageError("extra has a key 'epoch'", hint="pass epoch= instead")
        if epoch is not None:
            kept[_EPOCH] = int(epoch)
        return self.manager.save(
            model, optimizer, step=step, metrics=metrics, scheduler=scheduler, scaler=scaler, loader=loader,
            extra=kept or None,
        )  # fmt: skip

    def load_checkpoint(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        checkpoint_path: Path | str | None = None,
        *,
        which: Literal["latest", "best"] = "latest",
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        allow_missing: Collection[str] = (),
        allow_cast: bool = False,
    ) -> TrainingState:
        """Load into the objects and say where to go on: at step 0 when there is no checkpoint yet.

        Args:
            checkpoint_path: the folder of a checkpoint; the newest one's when empty. The words "latest" and "best"
                count as ``which``.

        Raises:
            CheckpointError: checkpoints exist and none is usable, they do not fit the objects, or there is none in
                ``checkpoint_path``.
            UsageError: ``which`` is neither, or ``checkpoint_path`` is no path.
        """
        if checkpoint_path in ("latest", "best"):
            which, checkpoint_path = cast("Literal['latest', 'best']", checkpoint_path), None
        if which not in ("latest", "best"):
            raise UsageError(f"which is {which!r}; it is 'latest' or 'best'")
        load = self.manager.load_latest if which == "latest" else self.manager.load_best
        if checkpoint_path is not None:
            load = functools.partial(self.manager.load_from, checkpoint_path)
        loaded = load(
            model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader, allow_missing=allow_missing,
            allow_cast=allow_cast,
        )  # fmt: skip
        extra = dict(loaded.extra)
        epoch = extra.pop(_EPOCH, None)
        return TrainingState(
            step=loaded.step, epoch=epoch if type(epoch) is int else 0, metrics=loaded.metrics, extra=extra,
            path=loaded.path if loaded.found else None, has_epoch=type(epoch) is int,
        )  # fmt: skip

    def cleanup_old_checkpoints(self, keep_last_n: int | None = None) -> int:
        """``CheckpointManager.cleanup_old_checkpoints``, with the manager's own number when empty."""
        return self.manager.cleanup_old_checkpoints(keep_last_n)

    def wait(self) -> None:
        """``CheckpointManager.wait``: return when everything is durable."""
        self.manager.wait()

    def close(self) -> None:
        """``CheckpointManager.close``."""
        self.manager.close()
