"""Names in the memory folder that an agent keeps for its node's snapshots: agent, keeper, writers and ranks share them.

<agent's private folder in shared memory>/memory/     SLURMFT_MEMORY_DIR; outlives the workers, goes with the agent
    copies.key      with which nodes prove to each other that their copies are the run's
    generation      of the newest attempt that this agent has started workers of
    peers/          copies of other nodes' shards
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from slurmft.system.opening import read_bytes

MEMORY_VARIABLE = "SLURMFT_MEMORY_DIR"
KEY_FILE, GENERATION_FILE, PEERS = "copies.key", "generation", "peers"


def own_memory_folder() -> Path | None:
    """The one of this worker's node; None where no agent keeps one."""
    return Path(told) if (told := os.environ.get(MEMORY_VARIABLE)) else None


def is_the_runs(directory: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether checkpoints there are those of the run, and not of something else that a worker saves beside them."""
    told = environment.get("SLURMFT_CHECKPOINT_DIR")
    return not told or os.path.realpath(told) == os.path.realpath(directory)


def memory_folder_of(directory: Path) -> Path | None:
    """Where snapshots of checkpoints in ``directory`` outlive their worker; None where they do not.

    Snapshots are identified by step, generation and commit: those of two directories must not lie in one folder.
    """
    return own_memory_folder() if is_the_runs(directory) else None


def ranks_of_this_node() -> range:
    """The ranks of the workers beside this one, and its own."""
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def copies_key(secret: bytes) -> bytes:
    """The key for copies, from the secret of the control channel: neither can be computed from the copies' key."""
    return hmac.new(secret, b"slurmft copies", hashlib.sha256).hexdigest().encode()


def read_copies_key(memory: Path) -> bytes:
    """As the node's agent has left it.

    Raises:
        OSError: there is none; a run of one node has none.
    """
    return read_bytes(memory / KEY_FILE, limit_bytes=4096)


def announcement(attempt_folder: Path, place: int) -> Path:
    """The file in which the agent of the ``place``-th node of an attempt says where its keeper listens."""
    return attempt_folder / f"keeper-{place}.json"


def read_generation(memory: Path) -> int:
    """Of the newest attempt that began on this node; 0 where that is unknown."""
    try:
        return max(0, int(read_bytes(memory / GENERATION_FILE, limit_bytes=4096)))
    except (OSError, ValueError):
        return 0
