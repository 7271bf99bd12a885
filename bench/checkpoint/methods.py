"""The ways to save, each as its documentation has it. `save` is what the training loop waits for."""

from __future__ import annotations

import inspect
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state import State
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from slurmft import CheckpointManager


class Method:
    """One way to save; files go below ``folder``."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state, self.folder = state, folder
        self.source = "disk"
        """Where the newest load read from, in words."""

        self._committed_at: float | None = None

    def path(self, number: int) -> Path:
        return self.folder / f"save-{number:04d}"

    def save(self, number: int) -> None:
        raise NotImplementedError

    def committed_at(self) -> float | None:
        """When the newest save was durable, on the monotonic clock; None while it is not. Called between steps."""
        return self._committed_at

    def load(self, state: State) -> None:
        """The newest save, into ``state``."""
        raise NotImplementedError

    def forget(self, number: int) -> None:
        """Remove an old save, outside of what is timed."""
        path = self.path(number)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def close(self) -> None:
        pass

    def newest(self) -> Path:
        return max(self.folder.glob("save-*"))


class Slurmft(Method):
    OPTIONS: dict[str, Any] = {}  # noqa: RUF012 - constants of the class
    KEEP = 2

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self.manager = CheckpointManager(folder, keep_last_n=self.KEEP, save_best=False)
        known = inspect.signature(self.manager.save).parameters
        self.options = {name: value for name, value in self.OPTIONS.items() if name in known}
        self.step = 0

    def save(self, number: int) -> None:
        self.step = number + 1
        self.manager.save(self.state.model, self.state.optimizer, step=self.step, **self.options)

    def committed_at(self) -> float | None:
        """The marker is renamed into place when all is durable; a rename sets the time of the change."""
        for marker in self.folder.glob(f"step-{self.step:08d}*/manifest.json"):
            return time.monotonic() - (time.time() - marker.stat().st_ctime)
        return None

    def load(self, state: State) -> None:
        """From memory where the snapshot lies there still, else from disk."""
        loaded = CheckpointManager(self.folder, keep_last_n=self.KEEP).load_latest(state.model, state.optimizer)
        self.source = loaded.source

    def forget(self, number: int) -> None:
        """It prunes by itself."""

    def close(self) -> None:
        if hasattr(self.manager, "close"):
            self.manager.close()


class SlurmftWaiting(Slurmft):
    OPTIONS = {"async_save": False}  # noqa: RUF012


class SlurmftKeepingAll(Slurmft):
    KEEP = 1_000_000


class TorchSave(Method):
    def save(self, number: int) -> None:
        write_with_torch(self.contents(), self.path(number))
        self._committed_at = time.monotonic()

    def contents(self) -> dict[str, Any]:
        return {"model": self.state.model.state_dict(), "optimizer": self.state.optimizer.state_dict()}

    def load(self, state: State) -> None:
        loaded = torch.load(self.newest(), weights_only=True)
        state.model.load_state_dict(loaded["model"])
        state.optimizer.load_state_dict(loaded["optimizer"])


class CloneAndThread(TorchSave):
    """What many write by hand."""

    def save(self, number: int) -> None:
        self._committed_at = None
        copied = _cloned(self.contents())

        def write() -> None:
            write_with_torch(copied, self.path(number))
            self._committed_at = time.monotonic()

        threading.Thread(target=write).start()


class DcpSave(Method):
    def contents(self, state: State) -> dict[str, Any]:
        model, optimizer = get_state_dict(state.model, state.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, number: int) -> None:
        dcp.save(self.contents(self.state), checkpoint_id=self.path(number))
        self._committed_at = time.monotonic()

    def load(self, state: State) -> None:
        contents = self.contents(state)
        dcp.load(contents, checkpoint_id=self.newest())
        set_state_dict(
            state.model, state.optimizer, model_state_dict=contents["model"], optim_state_dict=contents["optimizer"]
        )


class DcpAsync(DcpSave):
    """``async_save`` as it comes: a thread, and a new stager for each save."""

    KIND = AsyncCheckpointerType.THREAD
    STAGING: StagingOptions | None = None

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self.stager = DefaultStager(self.STAGING) if self.STAGING else None
        self.future: Future[Any] | None = None

    def save(self, number: int) -> None:
        self._committed_at = None
        self.future = dcp.async_save(
            self.contents(self.state), checkpoint_id=self.path(number), async_checkpointer_type=self.KIND,
            async_stager=self.stager,
        )  # fmt: skip
        self.future.add_done_callback(self._done)

    def _done(self, _: object) -> None:
        self._committed_at = time.monotonic()

    def committed_at(self) -> float | None:
        if self.future is not None and self.future.done():
            self.future.result()
        return self._committed_at

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class DcpAsyncShared(DcpAsync):
    """One stager for all saves: from the second one on it copies into memory that it has."""

    STAGING = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )


class DcpProcess(DcpAsync):
    KIND = AsyncCheckpointerType.PROCESS


class DcpProcessShared(DcpAsyncShared):
    KIND = AsyncCheckpointerType.PROCESS


def write_with_torch(contents: dict[str, Any], path: Path) -> None:
    """``torch.save`` so that it survives a power cut."""
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as stream:
        torch.save(contents, stream)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(each) for key, each in value.items()}
    return [_cloned(each) for each in value] if isinstance(value, list) else value


def join_alone() -> None:
    """A process group of one rank: DCP's process and NVRx ask for one, so all have it."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def _nvrx(state: State, folder: Path) -> Method:
    from nvrx import Nvrx

    return Nvrx(state, folder)


def _raw_write(state: State, folder: Path) -> Method:
    from raw_write import RawWrite

    return RawWrite(state, folder)


def _raw_write_and_hash(state: State, folder: Path) -> Method:
    from raw_write import RawWriteAndHash

    return RawWriteAndHash(state, folder)


SLURMFT, WAITING = "slurmft", "slurmft, async_save=False"
RAW = "floor: copy, then a polite process writes it raw"
RAW_HASHED = "floor: the same, and hashes it beside the write"
FLOORS = (RAW, RAW_HASHED)
AS_IT_COMES = "DCP async_save as it comes (thread)"
METHODS: dict[str, Callable[[State, Path], Method]] = {
    RAW: _raw_write,
    RAW_HASHED: _raw_write_and_hash,
    SLURMFT: Slurmft,
    WAITING: SlurmftWaiting,
    "torch.save + fsync": TorchSave,
    "clone, then a thread with torch.save + fsync": CloneAndThread,
    "DCP save": DcpSave,
    AS_IT_COMES: DcpAsync,
    "DCP async_save, process": DcpProcess,
    "DCP async_save, thread, shared-memory stager kept": DcpAsyncShared,
    "DCP async_save, process, shared-memory stager kept": DcpProcessShared,
    "nvidia-resiliency-ext 0.4.1, FileSystemWriterAsync": _nvrx,
}
