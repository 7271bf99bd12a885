"""A committed checkpoint as one file, for programs that know nothing of shards."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from slurmft.checkpoint.catalog import Entry
from slurmft.checkpoint.flat_keys import KeyPath, key_of, unflatten
from slurmft.checkpoint.flat_state import GROUPS, MODEL, OPTIMIZER, STATE
from slurmft.checkpoint.holding import reading
from slurmft.checkpoint.image_file import Damaged, index_file, verified_index
from slurmft.checkpoint.reading import Stored, Target, fresh
from slurmft.errors import CheckpointError, UsageError
from slurmft.system.files import fsync_folder, opened


def export_torch(entry: Entry, out: Path, *, with_optimizer: bool) -> int:
    """One torch.save of ``{"model": ..., "step": ..., "metrics": ...}``, and ``"optimizer"`` by parameter names.

    The whole state is in memory meanwhile. Returns the file's size in bytes.

    Raises:
        CheckpointError: the checkpoint is damaged; there is no file.
        OSError: the file could not be written.
    """
    leaves = _read(entry, with_optimizer=with_optimizer)
    try:
        tree = unflatten(leaves)
    except ValueError as error:
        raise CheckpointError(f"the keys of {entry.path} make no sense: {error}") from error
    value = {MODEL: tree.get(MODEL, {}), "step": entry.step, "metrics": dict(entry.metrics)}
    if with_optimizer:
        optimizer = tree.get(OPTIMIZER, {})
        value[OPTIMIZER] = {**optimizer, STATE: optimizer.get(STATE, {}), GROUPS: optimizer.get(GROUPS, [])}
    with _new_file(out) as path:
        torch.save(value, path)
    return out.stat().st_size


def export_safetensors(entry: Entry, out: Path, *, with_optimizer: bool) -> int:
    """One safetensors file: the model's tensors by their names, the optimizer's with ``optimizer.`` in front.

    Such a file holds tensors only: numbers and texts are kept as JSON in its metadata under ``slurmft``, the rest is
    left out. Returns the file's size in bytes.

    Raises:
        UsageError: safetensors is not installed, or does not take a tensor of this state.
        CheckpointError: the checkpoint is damaged; there is no file.
        OSError: the file could not be written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise UsageError("safetensors is not installed here", hint="pip install safetensors") from error
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    for path, value in _read(entry, with_optimizer=with_optimizer).items():
        name = key_of(path[1:] if path[0] == MODEL else path)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            tensors[name] = value
        elif _is_json(value):
            others[name] = value
    told = {"step": entry.step, "metrics": {key: repr(value) for key, value in entry.metrics.items()}, "values": others}
    with _new_file(out) as path_:
        try:
            save_file(tensors, path_, metadata={"format": "pt", "slurmft": json.dumps(told)})
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise UsageError(f"safetensors cannot hold this state: {error}", hint="--format torch can") from error
    return out.stat().st_size


def _read(entry: Entry, *, with_optimizer: bool) -> dict[KeyPath, Any]:
    """Every value of the model, and of the optimizer, verified."""
    parts = (MODEL, OPTIMIZER) if with_optimizer else (MODEL,)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then its use cannot be shown to others: the newest two stay in any case
            stack.enter_context(reading(entry.path))
        return _values(entry, parts)


def _values(entry: Entry, parts: Collection[str]) -> dict[KeyPath, Any]:
    try:
        stored = Stored.in_folder(
            entry.path,
            [
                verified_index(entry.path / name, entry.files[name].size_bytes, entry.files[name].xxh3)
                for name in map(index_file, range(entry.world_size))
            ],
        )
        targets = {
            key: Target(fresh(tensor.shape, tensor.dtype), (0,) * len(tensor.shape))
            for key, tensor in stored.tensors.items()
            if stored.path(key)[0] in parts
        }
        stored.fill(targets)
        objects = stored.load_objects([key for key in stored.objects if stored.path(key)[0] in parts])
    except (Damaged, KeyError) as error:
        raise CheckpointError(f"{entry.path} cannot be exported: {error}", hint="try an older one") from error
    values: Mapping[str, Any] = {key: target.tensor for key, target in targets.items()} | objects
    return {stored.path(key): value for key, value in values.items()}


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) is not None or value is None)
    except (TypeError, ValueError):
        return False


@contextlib.contextmanager
def _new_file(out: Path) -> Iterator[Path]:
    """A path beside ``out`` that takes its place, durably, when all went well; otherwise nothing is left."""
    descriptor, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name[:100]}.", suffix=".tmp")
    path = Path(name)
    try:
        os.close(descriptor)
        yield path
        with opened(path) as written:
            os.fsync(written)
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)
        path.replace(out)
        fsync_folder(out.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
