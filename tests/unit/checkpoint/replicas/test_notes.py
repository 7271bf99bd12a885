"""Notes of each step on their way to another node, and back to the rank that they are of: real keepers and sockets."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from made_snapshots import KEY
from waiting import until

from slurmft.checkpoint.notes import LeadRecord, NoteSender, OwnNotes, RankRecord, gather, read_record
from slurmft.checkpoint.replicas import BadCopy, Keeper, NoteFile, Peer, Wire, connected, read_note
from slurmft.storage.checkpoint_names import GENERATION_FILE, KEY_FILE, PEERS, Identity, announcement
from slurmft.system.files import write_json
from slurmft.trainer import savers
from slurmft.trainer.savers import SAVERS


class Node:
    """A memory folder with a keeper in a thread of this process."""

    def __init__(self, root: Path) -> None:
        self.memory = root / "node"
        self.memory.mkdir()
        (self.memory / KEY_FILE).write_bytes(KEY)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=Keeper(self.memory, self.listener).serve, daemon=True)
        self.thread.start()
        self.peer = Peer(place=0, announcement=announcement(root, 0))
        where = {"hosts": ["127.0.0.1"], "port": self.listener.getsockname()[1]}
        write_json(self.peer.announcement, where, durable=False)

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.memory / PEERS).iterdir())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path)
    yield one
    one.listener.shutdown(socket.SHUT_RDWR)
    one.listener.close()
    one.thread.join(5)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / KEY_FILE
    path.write_bytes(KEY)
    return path


def peer_has(node: Node, step: int, generation: int = 1, name: str = "rank-3") -> bytes | None:
    return read_note(node.memory / PEERS / f"{name}.record", step, generation)


def test_notes_lie_with_the_peer_a_moment_later_and_the_newest_of_them_stay(tmp_path: Path, node: Node, key: Path):
    file, sender = NoteFile(tmp_path / "rank-3.record", 1, 4096), NoteSender([node.peer], key)
    for step in range(1, 10):
        sender.offer("rank-3", step, file, b"state after %d" % step)
        until(lambda step=step: peer_has(node, step) == b"state after %d" % step)
    assert peer_has(node, 1) is None and peer_has(node, 4) is not None and peer_has(node, 9, generation=2) is None


def test_the_newest_note_does_not_wait_for_the_answer_to_the_one_before(tmp_path: Path, key: Path):
    """Else it is late with a peer that is busy, and the step is lost with this node; unanswered ones are sent again."""
    listener, where = socket.create_server(("127.0.0.1", 0)), announcement(tmp_path, 0)
    write_json(where, {"hosts": ["127.0.0.1"], "port": listener.getsockname()[1]}, durable=False)
    listener.settimeout(20)
    sender = NoteSender([Peer(place=0, announcement=where)], key)
    for answers in (0, 2):
        if not answers:
            sender.offer("rank-3", 7, NoteFile(tmp_path / "rank-3.record", 1, 4096), b"state after 7")
        with Wire(listener.accept()[0], KEY, is_keeper=True, deadline=time.monotonic() + 20) as wire:
            for step in (7, 8):
                assert wire.receive()["note"] == step
                assert wire.receive_blob(13) == b"state after %d" % step
                if step == 7 and not answers:
                    sender.offer("rank-3", 8, NoteFile(tmp_path / "again", 1, 4096), b"state after 8")
            for _ in range(answers):
                wire.send({"answer": "kept"})
    listener.close()


def test_notes_of_an_attempt_that_is_over_are_refused(tmp_path: Path, node: Node, key: Path, caplog):
    """A node that was cut off goes on for a while."""
    (node.memory / GENERATION_FILE).write_text("2")
    old, new = NoteFile(tmp_path / "old", 1, 4096), NoteFile(tmp_path / "new", 2, 4096)
    sender = NoteSender([node.peer], key)
    sender.offer("rank-3", 7, new, b"of the new attempt")
    until(lambda: peer_has(node, 7, 2))
    sender.offer("rank-3", 8, old, b"of the old one")
    until(lambda: "generation 1 is over" in caplog.text)
    assert peer_has(node, 8, 1) is None and peer_has(node, 7, 2) == b"of the new attempt"


@pytest.mark.parametrize(
    "change", [{"name": "../../copies.key"}, {"name": "rank-3/x"}, {"note": -1}, {"bytes": 1 << 30}, {"capacity": "8"}]
)
def test_what_is_no_note_ends_the_connection_and_leaves_nothing(tmp_path, node: Node, key: Path, change):
    with connected(node.peer, key, limit_s=10) as wire:
        wire.send({"note": 1, "name": "rank-3", "generation": 1, "capacity": 4096, "bytes": 4} | change)
        wire.send_blob(b"data")
        with pytest.raises((BadCopy, OSError)):
            wire.receive()
    assert node.files() == []


def test_a_stranger_cannot_leave_a_note(tmp_path: Path, node: Node):
    wrong = tmp_path / "wrong.key"
    wrong.write_bytes(b"0" * 64)
    with connected(node.peer, wrong, limit_s=10) as wire:
        wire.send({"note": 1, "name": "rank-3", "generation": 1, "capacity": 4096, "bytes": 4})
        with pytest.raises((BadCopy, OSError)):
            wire.receive()
    assert node.files() == []


class Ranks:
    """The ranks of a run in threads of this process: each sees all rows."""

    def __init__(self, count: int) -> None:
        self.count, self._barrier = count, threading.Barrier(count, timeout=20)
        self.rows: list[object] = [None] * count

    def all(self, rank: int, row: object) -> list[object]:
        self.rows[rank] = row
        self._barrier.wait()
        rows = list(self.rows)
        self._barrier.wait()
        return rows


class Team:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.world_size = ranks, rank, ranks.count

    def exchange(self, row):
        return self._ranks.all(self.rank, list(row))

    exchange_with_nonces = savers.Team.exchange_with_nonces

    def bytes_from(self, source, payload, length):
        found = self._ranks.all(self.rank, payload)[source]
        assert len(found) == length
        return found


def gathered(memories: list[Path], step: int, change=lambda payload: payload) -> dict[int, OwnNotes]:
    """By four ranks on two nodes; what travels is changed on the way."""
    ranks, found = Ranks(4), dict[int, OwnNotes]()

    def load(rank: int) -> None:
        team = Team(ranks, rank)
        team.bytes_from = lambda *row: change(Team.bytes_from(team, *row))
        found[rank] = gather(team, memories[rank // 2], Identity(step, 5, 3), is_node_lead=rank % 2 == 0)

    threads = [threading.Thread(target=load, args=(rank,)) for rank in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


@pytest.fixture
def memories(tmp_path: Path) -> list[Path]:
    """Of four ranks on two nodes the second one was lost: its ranks are on a spare, which knows nothing."""
    both = [tmp_path / "first", tmp_path / "spare"]
    for memory in both:
        (memory / PEERS).mkdir(parents=True)
        (memory / KEY_FILE).write_bytes(KEY)
    for rank in (0, 1):
        RankRecord(both[0], rank, 5).note(40, {"rank": rank})
    for rank in (2, 3):
        RankRecord(both[0] / PEERS, rank, 5).note(40, {"rank": rank})
    RankRecord(both[1], 2, 5).note(39, {"rank": "of another step"})
    LeadRecord(both[0], 5, lambda: {"seen": 40}, {"mean": torch.ones(3)}).note(40)
    return both


def test_a_rank_on_another_node_gets_its_notes_from_the_peer_of_the_lost_one(memories):
    found = gathered(memories, 40)
    assert [found[rank].of(SAVERS.loads).own["loader"]["rank"] for rank in range(4)] == [0, 1, 2, 3]
    assert all(found[rank].lead.extra == {"seen": 40} for rank in range(4))
    assert all(found[rank].of(SAVERS.loads + 1).own is None for rank in range(4)), "a note from before another load"
    assert read_record(memories[1], 2, 40, 5) is None


@pytest.mark.parametrize("problem", ["changed on the way", "another key", "no key"])
def test_what_comes_without_the_tag_of_the_run_is_no_note(memories, problem):
    if problem == "another key":
        (memories[1] / KEY_FILE).write_bytes(b"0" * 64)
    elif problem == "no key":
        (memories[1] / KEY_FILE).unlink()
    found = gathered(memories, 40, (lambda payload: payload[::-1]) if problem == "changed on the way" else bytes)
    assert [found[rank].own is None for rank in range(4)] == [False, False, True, True]
    assert found[0].lead is not None and found[2].lead is None
