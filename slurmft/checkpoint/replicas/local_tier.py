"""Copies of a node's own shards on its local disk, for a restart on the same node. No torch.

    <local_directory>/slurmft-<user id>/<lineage>/shard-<shard>.<a|b>.image and .json     the newest two

A lineage is one checkpoint directory's history, by a number that is drawn once and lies in it: a run that was begun
anew under an old name does not find copies of the old one on some node. Nothing here is durable, or has to be.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from pathlib import Path
from tempfile import mkdtemp

from slurmft.checkpoint.format.shard_index import read_index
from slurmft.checkpoint.replicas.slots import Incoming, Mismatch, remove_stale
from slurmft.checkpoint.replicas.wire import CHUNK_BYTES
from slurmft.errors import StorageError
from slurmft.system.files import read_json
from slurmft.system.opening import UnsafeFile, opened, write_bytes
from slurmft.system.private_folder import check_private, own_folders, prefix

LINEAGE_FILE = "lineage.json"
_LINEAGE = re.compile(r"[0-9a-f]{32}")

log = logging.getLogger(__name__)


def local_folder(local_directory: Path, checkpoint_dir: Path) -> Path:
    """This lineage's folder on the local disk, private; made where it does not exist.

    Raises:
        OSError: it cannot be made.
        StorageError: the lineage cannot be read.
    """
    folder = _own_folder(local_directory) / lineage_of(checkpoint_dir)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    return folder


def _own_folder(local_directory: Path) -> Path:
    """This user's folder; under a random name where another user has taken the usual one."""
    mine, other_name = local_directory / f"slurmft-{os.geteuid()}", prefix("slurmft-local")
    try:
        mine.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(mine)
    except (FileExistsError, UnsafeFile) as error:
        log.warning("%s is not a folder of yours alone: %s", mine, error.strerror)
        if not own_folders(local_directory, other_name):
            mkdtemp(dir=local_directory, prefix=other_name)
        return own_folders(local_directory, other_name)[0]
    return mine


def lineage_of(checkpoint_dir: Path) -> str:
    """The number of this directory's history; drawn by the first rank that asks, of all that may ask at once.

    Raises:
        OSError, StorageError: it can be neither read nor written.
    """
    path = checkpoint_dir / LINEAGE_FILE
    if (value := read_json(path)) is None:
        checkpoint_dir.mkdir(parents=True, exist_ok=True)
        draft = checkpoint_dir / f".{LINEAGE_FILE}.{secrets.token_hex(8)}.tmp"
        try:
            write_bytes(draft, f'{{"format": 1, "lineage": "{secrets.token_hex(16)}"}}\n'.encode())
            os.link(draft, path)  # unlike a rename it never replaces what another rank drew
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
        value = read_json(path)
    lineage = (value or {}).get("lineage")
    if not isinstance(lineage, str) or not _LINEAGE.fullmatch(lineage):
        raise StorageError(f"{path} is damaged", hint="remove it; copies on local disks are forgotten then")
    return lineage


def keep_local(index_path: Path, image_path: Path, folder: Path, *, stop: threading.Event | None = None) -> str:
    """Copy a staged shard, hashed already, to the local disk; why it is not there, else empty. Never raises."""
    try:
        with opened(image_path) as image:
            index = read_index(index_path)
            if index is None or not index.is_hashed:
                return "a newer snapshot is being staged"
            buffer = memoryview(bytearray(CHUNK_BYTES))
            with Incoming(folder, index) as incoming:
                left = index.size_bytes
                while left:
                    if stop is not None and stop.is_set():
                        return "given up"
                    if not (count := os.readv(image, [buffer[: min(left, CHUNK_BYTES)]])):
                        return "a newer snapshot is being staged"
                    incoming.write(buffer[:count])
                    left -= count
                incoming.finish()
        remove_stale(folder)
    except Mismatch:
        return "a newer snapshot is being staged"  # its bytes are in the image already
    except (OSError, StorageError) as error:
        return str(error)
    return ""
