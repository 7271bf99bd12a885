"""The agent's side of copies: its keeper, from attempt to attempt, and what it tells the other nodes."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_snapshots import stage

from slurmft.agent import agent as agent_keeper
from slurmft.agent.agent import Keeping
from slurmft.checkpoint.image_file import holdings_in
from slurmft.checkpoint.replicas import Peer, send_copy
from slurmft.policy.checkpoints import Tier
from slurmft.storage.checkpoint_names import GENERATION_FILE, KEY_FILE, announcement, copies_key, read_generation
from slurmft.system.files import read_json


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory of it's node"
    path.mkdir()
    return path


@pytest.fixture
def keeping(memory: Path) -> Iterator[Keeping]:
    keeping = Keeping(memory, copies=1)
    yield keeping
    keeping.close()


def begin(keeping: Keeping, folder: Path, **changes: Any) -> dict[str, Any]:
    """Begin an attempt; returns the announcement once it is there."""
    folder.mkdir(exist_ok=True)
    facts = {"generation": 3, "place": 1, "nodes": 2, "hosts": ["127.0.0.1"], "secret": b"secret", **changes}
    keeping.begin(folder, **facts)
    deadline = time.monotonic() + 10
    while (where := read_json(announcement(folder, facts["place"]))) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return where


def copy_to(folder: Path, memory: Path, tmp_path: Path, **staged: Any) -> str:
    peer = Peer(place=1, announcement=announcement(folder, 1))
    return send_copy(*stage(tmp_path / "mine", **staged), peer, memory / KEY_FILE, limit_s=10)


def test_the_keeper_outlives_attempts_and_refuses_older_ones(tmp_path, keeping, memory):
    first = begin(keeping, tmp_path / "7.0.0")
    assert copy_to(tmp_path / "7.0.0", memory, tmp_path) == ""
    pid = keeping.pid
    assert begin(keeping, tmp_path / "7.0.1", generation=4) == first
    assert keeping.pid == pid
    assert "generation 3 is over" in copy_to(tmp_path / "7.0.1", memory, tmp_path, identity=(50, 3, 5))
    assert [one.name for one in holdings_in(memory / "peers", Tier.PEER)] == [(40, 3, 4)]


def test_one_that_dies_is_followed_by_another_at_the_same_address(tmp_path, keeping, memory):
    begin(keeping, tmp_path / "7.0.0")
    assert copy_to(tmp_path / "7.0.0", memory, tmp_path) == ""
    assert keeping.pid is not None
    os.kill(keeping.pid, signal.SIGKILL)
    before, deadline = keeping.pid, time.monotonic() + 10
    while keeping.pid == before and time.monotonic() < deadline:
        keeping.look_after()
    assert copy_to(tmp_path / "7.0.0", memory, tmp_path, identity=(50, 3, 5)) == ""
    assert len(holdings_in(memory / "peers", Tier.PEER)) == 2


@pytest.mark.parametrize(("copies", "nodes"), [(0, 4), (1, 1)], ids=["no copies", "one node"])
def test_a_run_without_copies_has_no_keeper(tmp_path, memory, copies, nodes):
    keeping = Keeping(memory, copies=copies)
    keeping.begin(tmp_path, generation=3, place=0, nodes=nodes, hosts=["127.0.0.1"], secret=b"secret")
    assert keeping.pid is None
    key = [KEY_FILE] if nodes > 1 else []  # shards travel between nodes at a restart all the same
    assert sorted(path.name for path in memory.iterdir()) == [*key, GENERATION_FILE]
    keeping.close()


@pytest.mark.parametrize("known", [True, False], ids=["later attempt", "first attempt"])
def test_on_a_full_filesystem_no_copy_of_an_older_attempt_is_taken(tmp_path, keeping, memory, monkeypatch, known):
    def full(path, *_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    begin(keeping, tmp_path / "7.0.0", generation=9)
    assert copy_to(tmp_path / "7.0.0", memory, tmp_path, identity=(40, 9, 4)) == ""
    monkeypatch.setattr(agent_keeper, "replace_atomically", full)
    if not known:
        (memory / GENERATION_FILE).unlink()
    keeping.begin(tmp_path, generation=10, place=1, nodes=2, hosts=["127.0.0.1"], secret=b"secret")
    problem = copy_to(tmp_path / "7.0.0", memory, tmp_path, identity=(50, 9, 5))
    assert ("generation 9 is over" if known else "Connection refused") in problem
    assert (read_generation(memory) == 10) == (keeping.pid is not None) == known


def test_a_folder_that_is_gone_keeps_nothing_from_starting(tmp_path, keeping, memory, caplog):
    memory.rmdir()
    keeping.begin(tmp_path, generation=3, place=0, nodes=2, hosts=["127.0.0.1"], secret=b"secret")
    assert "no copies of other nodes' snapshots are taken" in caplog.text


def test_the_key_is_private_and_is_not_the_secret(tmp_path, keeping, memory):
    begin(keeping, tmp_path / "7.0.0")
    assert (memory / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert (memory / KEY_FILE).read_bytes() == copies_key(b"secret")
    assert b"secret" not in copies_key(b"secret")
    arguments = Path(f"/proc/{keeping.pid}/cmdline").read_bytes()
    assert copies_key(b"secret") not in arguments
