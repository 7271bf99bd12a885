"""Copies of shards between nodes: real keepers, real sockets, and everything that can go wrong on the way."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_snapshots import KEY, flip_byte, stage
from waiting import slowness, until
from worker_variable import worker_variable

from slurmft.checkpoint import replicas as keeper_module
from slurmft.checkpoint.image_file import holdings_in
from slurmft.checkpoint.replicas import MAX_LINE_BYTES, BadCopy, Keeper, Peer, Wire, find_peers, key_file, send_copy
from slurmft.policy.checkpoints import Tier
from slurmft.storage.checkpoint_names import GENERATION_FILE, KEY_FILE, PEERS, Identity, announcement
from slurmft.system.files import write_json


class Node:
    """A memory folder with a keeper in a thread of this process."""

    def __init__(self, root: Path, place: int) -> None:
        self.memory = root / f"node {place}"
        self.memory.mkdir(parents=True)
        (self.memory / KEY_FILE).write_bytes(KEY)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.keeper = Keeper(self.memory, self.listener)
        self.thread = threading.Thread(target=self.keeper.serve, daemon=True)
        self.thread.start()
        self.peer = Peer(place=place, announcement=announcement(root, place))
        self.announce(self.port)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def announce(self, port: int, hosts: tuple[str, ...] = ("127.0.0.1",)) -> None:
        write_json(self.peer.announcement, {"hosts": list(hosts), "port": port}, durable=False)

    def held(self) -> dict[tuple[int, int], bytes]:
        """Bytes of all complete copies, by shard and step."""
        return {
            (one.index.shard, one.index.identity.step): one.image.read_bytes()[: one.index.size_bytes]
            for one in holdings_in(self.memory / PEERS, Tier.PEER)
        }

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.memory / PEERS).iterdir())

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(5)


@pytest.fixture
def new_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(root: Path = tmp_path) -> Node:
        nodes.append(Node(root, len(nodes)))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def send(paths: tuple[Path, Path], node: Node, key: Path, **options) -> str:
    return send_copy(*paths, node.peer, key, **{"limit_s": 10.0, **options})


@contextlib.contextmanager
def connected(node: Node, key: bytes = KEY) -> Iterator[Wire]:
    connection = socket.create_connection(("127.0.0.1", node.port), timeout=5)
    with Wire(connection, key, is_keeper=False, deadline=time.monotonic() + 5) as wire:
        yield wire


def test_a_copy_is_the_same_bytes_and_can_be_offered(tmp_path, node, key):
    paths = stage(tmp_path / "mine")
    assert send(paths, node, key) == ""
    assert node.held() == {(0, 40): paths[1].read_bytes()[:3_000_000]}
    assert node.files() == ["shard-0.a.image", "shard-0.a.json"]


def test_several_peers_each_get_one(tmp_path, new_node, key):
    nodes = [new_node(), new_node()]
    paths = stage(tmp_path / "mine")
    assert [send_copy(*paths, node.peer, key) for node in nodes] == ["", ""]
    assert all(node.held() for node in nodes)


def test_an_empty_image_is_a_copy_too(tmp_path, node, key):
    assert send(stage(tmp_path / "mine", size=0), node, key) == ""
    assert node.held() == {(0, 40): b""}


def test_the_newest_two_of_each_shard_stay(tmp_path, node, key):
    for step in (40, 50, 60, 70):
        for shard in (0, 1):
            paths = stage(tmp_path / "mine", shard=shard, identity=(step, 3, step // 10), size=1000 + step)
            assert send(paths, node, key) == ""
    assert sorted(node.held()) == [(0, 60), (0, 70), (1, 60), (1, 70)]
    assert len(node.files()) == 8


def test_shards_that_the_run_has_no_more_are_dropped(tmp_path, node, key):
    for step, shard in ((40, 7), (50, 0), (60, 0)):
        assert send(stage(tmp_path / "mine", shard=shard, shards=8, identity=(step, 3, step), size=10), node, key) == ""
    assert sorted(node.held()) == [(0, 50), (0, 60)]


def test_a_shorter_one_replaces_a_longer_one(tmp_path, node, key):
    for step, size in ((40, 5000), (50, 6000), (60, 100)):
        assert send(stage(tmp_path / "mine", identity=(step, 3, step), size=size), node, key) == ""
    assert {step: len(data) for (_, step), data in node.held().items()} == {50: 6000, 60: 100}
    assert (node.memory / PEERS / "shard-0.a.image").stat().st_size == 100


def test_a_second_try_is_content_with_the_first(tmp_path, node, key):
    paths = stage(tmp_path / "mine")
    assert [send(paths, node, key), send(paths, node, key)] == ["", ""]
    assert node.files() == ["shard-0.a.image", "shard-0.a.json"]


def test_an_older_one_is_refused(tmp_path, node, key):
    assert send(stage(tmp_path / "mine", identity=(50, 3, 5)), node, key) == ""
    assert "a newer one is here: step-00000050.g3.c5" in send(stage(tmp_path / "mine"), node, key)


@pytest.mark.parametrize("source", ["agent", "sender"])
def test_an_older_generation_is_refused(tmp_path, node, key, source):
    if source == "agent":
        (node.memory / GENERATION_FILE).write_text("4")
    else:
        assert send(stage(tmp_path / "new", shard=1, identity=(10, 4, 1)), node, key) == ""
    assert send(stage(tmp_path / "mine"), node, key) == "generation 3 is over: this is generation 4"
    assert (0, 40) not in node.held()


def test_a_flipped_byte_is_noticed_on_arrival(tmp_path, node, key):
    paths = stage(tmp_path / "mine")
    flip_byte(paths[1], 2_000_000)
    assert send(paths, node, key) == "damaged on the way: model.part2 differs from its digest"
    assert node.files() == []


def test_one_without_digests_is_not_sent(tmp_path, node, key):
    assert send(stage(tmp_path / "mine", hashed=False), node, key) == "it has no digests yet"


def test_one_that_is_being_written_over_is_given_up(tmp_path, node, key):
    paths = stage(tmp_path / "mine", size=8 << 20)
    overwriter = threading.Timer(0.1, paths[0].unlink)
    overwriter.start()
    assert send(paths, node, key, bytes_per_s=8 << 20) == "a newer snapshot is being staged"
    assert send(paths, node, key) == "a newer snapshot is being staged"
    assert node.held() == {}


def test_a_stop_is_heard_between_two_pieces(tmp_path, node, key):
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    assert send(stage(tmp_path / "mine", size=8 << 20), node, key, bytes_per_s=1 << 20, stop=stop) == "given up"
    assert time.monotonic() - began < 3 * slowness()


def test_the_bandwidth_is_kept_and_so_is_the_limit(tmp_path, node, key):
    paths = stage(tmp_path / "mine", size=4 << 20)
    began = time.monotonic()
    assert send(paths, node, key, bytes_per_s=10 << 20) == ""
    assert time.monotonic() - began > 0.25
    paths = stage(tmp_path / "mine", size=4 << 20, identity=(50, 3, 5))
    assert "not sent within 0" in send(paths, node, key, bytes_per_s=1 << 20, limit_s=0.3)


def test_two_senders_of_one_shard_do_not_mix(tmp_path, node, key):
    both = [stage(tmp_path / f"mine {step}", identity=(step, 3, step), size=6 << 20) for step in (40, 50)]
    problems: list[str] = []
    threads = [threading.Thread(target=lambda one=one: problems.append(send(one, node, key))) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    held = node.held()
    assert held[0, 50] == both[1][1].read_bytes()[: 6 << 20]
    assert "" in problems
    assert held.get((0, 40), both[0][1].read_bytes()[: 6 << 20]) == both[0][1].read_bytes()[: 6 << 20]


def test_many_senders_at_once_all_get_through(tmp_path, node, key):
    all_paths = [stage(tmp_path / f"mine {shard}", shard=shard, shards=12, size=100_000) for shard in range(12)]
    threads = [threading.Thread(target=send, args=(paths, node, key)) for paths in all_paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(node.held()) == 12


# Strangers, and those who break off


def test_a_wrong_key_changes_nothing(tmp_path, node):
    other = tmp_path / "other key"
    other.write_bytes(b"o" * 64)
    assert send(stage(tmp_path / "mine"), node, other) != ""
    assert node.files() == []


@pytest.mark.parametrize(
    "noise",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b"x" * 32 + b"\xff\xff\xff\xff" + b"y" * 100],
    ids=["silence", "browser", "zeros", "endless line"],
)
def test_noise_closes_its_own_connection_only(tmp_path, node, key, noise, monkeypatch):
    monkeypatch.setattr(keeper_module, "HANDSHAKE_S", 0.3)
    with socket.create_connection(("127.0.0.1", node.port), timeout=5) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(noise)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    assert send(stage(tmp_path / "mine"), node, key) == ""


@pytest.mark.parametrize("length", [0, -1, 1 << 40, 1.5, "12", None, True])
def test_an_index_of_no_length_is_refused(node, length):
    with connected(node) as wire:
        wire.send({"index_bytes": length})
        assert wire.receive() == {"answer": "an index of that length is not taken"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1}', "\0", "[" * 100_000],
                         ids=["empty", "half", "list", "newer", "bare", "null", "deep"])  # fmt: skip
def test_what_is_no_index_is_refused(node, text):
    with connected(node) as wire:
        blob = text.encode() or b" "
        wire.send({"index_bytes": len(blob)})
        wire.send_blob(blob)
        assert wire.receive()["answer"].startswith("not an index")
    assert node.files() == []


def test_a_line_that_was_changed_on_the_way_is_not_believed(node):
    with connected(node) as wire:
        wire._key = b"another one"
        wire.send({"index_bytes": 5})
        with pytest.raises((BadCopy, ConnectionResetError)):
            wire.receive()


def test_a_line_is_bounded(node):
    with connected(node) as wire:
        wire.send({"index_bytes": "x" * MAX_LINE_BYTES})
        with pytest.raises((BadCopy, OSError)):
            wire.receive()


def test_a_stream_that_ends_early_leaves_nothing(tmp_path, node, key):
    paths = stage(tmp_path / "mine", identity=(30, 3, 3))
    assert send(paths, node, key) == ""
    index, image = stage(tmp_path / "mine", identity=(50, 3, 5))
    with connected(node) as wire:
        blob = index.read_bytes()
        wire.send({"index_bytes": len(blob)})
        wire.send_blob(blob)
        assert wire.receive() == {"answer": "send"}
        wire._send_all(image.read_bytes()[:2_000_000])
    until(lambda: len(node.files()) <= 2, 5)
    assert list(node.held()) == [(0, 30)]
    assert node.files() == ["shard-0.a.image", "shard-0.a.json"]


def test_nobody_listens(tmp_path, node, key):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    node.announce(port)
    began = time.monotonic()
    assert "refused" in send(stage(tmp_path / "mine"), node, key, limit_s=0.5)
    assert time.monotonic() - began < 3 * slowness()


def test_a_peer_that_never_announced_itself_costs_the_limit_and_no_more(tmp_path, node, key):
    node.peer.announcement.unlink()
    problem = send(stage(tmp_path / "mine"), node, key, limit_s=0.3)
    assert problem.endswith("node 0 has not said where its keeper listens")
    node.peer.announcement.write_text("{")
    assert "is damaged" in send(stage(tmp_path / "mine"), node, key, limit_s=0.3)


def test_the_second_address_is_tried(tmp_path, node, key):
    node.announce(node.port, hosts=("no such host.invalid", "127.0.0.1"))
    assert send(stage(tmp_path / "mine"), node, key) == ""


def test_a_peer_that_accepts_and_says_nothing_is_given_up(tmp_path, node, key):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node.announce(silent.getsockname()[1])
        began = time.monotonic()
        assert send(stage(tmp_path / "mine"), node, key, limit_s=0.4) in ("timed out", "it took too long")
        assert time.monotonic() - began < 3 * slowness()


def test_a_missing_key_or_image_is_said_and_not_raised(tmp_path, node, key):
    index, image = stage(tmp_path / "mine")
    assert "No such file" in send((index, image), node, tmp_path / "none")
    image.unlink()
    assert "No such file" in send((index, image), node, key)


# Room


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A filesystem in memory of 4 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(path)], check=False,
                      capture_output=True).returncode:  # fmt: skip
        pytest.skip("needs the right to mount")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_what_does_not_fit_is_refused_before_anything_is_dropped(tmp_path, new_node, small_memory, key):
    node = new_node(small_memory)
    assert send(stage(tmp_path / "mine", size=1 << 20), node, key) == ""
    problem = send(stage(tmp_path / "mine", size=5 << 20, identity=(50, 3, 5)), node, key)
    assert problem.startswith("no room: 0.00 GiB are needed")
    assert list(node.held()) == [(0, 40)]


def test_a_full_memory_drops_the_new_one_only(tmp_path, new_node, small_memory, key, monkeypatch):
    monkeypatch.setattr(keeper_module, "fits", lambda *_: "")
    node = new_node(small_memory)
    assert send(stage(tmp_path / "mine", size=2 << 20), node, key) == ""
    assert send(stage(tmp_path / "mine", size=3 << 20, identity=(50, 3, 5)), node, key) != ""
    assert list(node.held()) == [(0, 40)]
    assert node.files() == ["shard-0.a.image", "shard-0.a.json"]


# The process


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Node]]:
    """A keeper as the agent starts it; the node's own thread does not listen."""
    node = Node.__new__(Node)
    node.memory = tmp_path / "node"
    (node.memory / PEERS).mkdir(parents=True)
    (node.memory / KEY_FILE).write_bytes(KEY)
    node.listener = socket.create_server(("127.0.0.1", 0))
    node.peer = Peer(place=0, announcement=announcement(tmp_path, 0))
    node.announce(node.port)
    number = node.listener.fileno()
    argv = [sys.executable, "-P", "-m", "slurmft.checkpoint.replicas", str(node.memory), str(number)]
    with subprocess.Popen(argv, pass_fds=[number], stdin=subprocess.DEVNULL) as started:
        yield started, node
        started.kill()
    node.listener.close()


def test_the_process_takes_copies_and_is_light(tmp_path, process, key):
    started, node = process
    assert send(stage(tmp_path / "mine"), node, key) == ""
    assert list(node.held()) == [(0, 40)]
    modules = Path(f"/proc/{started.pid}/maps").read_text()
    assert "libtorch" not in modules
    assert "pydantic" not in modules
    started.send_signal(signal.SIGTERM)
    assert send(stage(tmp_path / "mine", identity=(50, 3, 5)), node, key) == ""


def test_killed_in_the_middle_it_leaves_nothing_that_could_be_believed(tmp_path, process, key):
    started, node = process
    assert send(stage(tmp_path / "mine"), node, key) == ""

    def kill_in_the_middle() -> None:
        until(lambda: "shard-0.b.image" in node.files())
        started.kill()

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    paths = stage(tmp_path / "mine", size=8 << 20, identity=(50, 3, 5))
    assert send(paths, node, key, bytes_per_s=1 << 20, limit_s=20) != ""
    killer.join()
    assert list(node.held()) == [(0, 40)]
    assert "shard-0.b.image" in node.files()
    Keeper(node.memory, node.listener)
    assert node.files() == ["shard-0.a.image", "shard-0.a.json"]


# Who sends to whom


def test_peers_follow_from_the_place_in_the_run(tmp_path):
    environment = {
        **worker_variable(checkpoint={"peer_copies": 1}), "GROUP_WORLD_SIZE": "4", "GROUP_RANK": "2",
        "SLURMFT_RUN_FOLDER": str(tmp_path), "SLURMFT_ATTEMPT": "7.0.1", "SLURMFT_MEMORY_DIR": str(tmp_path),
    }  # fmt: skip
    assert find_peers(environment) == [Peer(place=3, announcement=tmp_path / "attempts/7.0.1/keeper-3.json")]
    assert key_file(environment) == tmp_path / KEY_FILE
    for changed in (worker_variable(checkpoint={"peer_copies": 0}), {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},
                    {"GROUP_RANK": "9"}, {"GROUP_RANK": "x"}, {"SLURMFT_WORKER": ""}):  # fmt: skip
        assert find_peers(environment | changed) == []
    assert find_peers({}) == []
    assert key_file({}) is None


def test_lines_are_json_and_nothing_else(node):
    with connected(node) as wire:
        wire._send_all((4).to_bytes(4, "big"))
        wire.send_blob(b"\x80\x04N.")  # a pickle
        with pytest.raises((BadCopy, OSError)):
            wire.receive()
    assert json.dumps(node.files()) == "[]"
    assert os.listdir(node.memory / PEERS) == []


def test_what_the_sender_still_needs_is_not_written_over(node, tmp_path, key):
    """Step 2 did not arrive whole on some other node, so step 1 is what a restart could need."""
    for step in (1, 2, 3, 4):
        staged = stage(tmp_path / "mine", f"shard-0.{step}", identity=(step, 3, step), size=1000)
        assert not send_copy(*staged, node.peer, key, keep=Identity(1, 3, 1))
    assert sorted(node.held()) == [(0, 1), (0, 4)]
    staged = stage(tmp_path / "mine", "shard-0.5", identity=(5, 3, 5), size=1000)
    assert not send_copy(*staged, node.peer, key, keep=Identity(4, 3, 4))
    assert sorted(node.held()) == [(0, 4), (0, 5)]


def test_what_is_needed_stays_beside_newer_ones_of_other_shards(node, tmp_path, key):
    for step in (1, 2, 3):
        for shard in (0, 1):
            if (step, shard) == (1, 1):
                continue
            name = f"shard-{shard}.{step}"
            staged = stage(tmp_path / "mine", name, shard=shard, identity=(step, 3, step), size=1000)
            assert not send_copy(*staged, node.peer, key, keep=Identity(1, 3, 1))
    assert (0, 1) in node.held()


def test_copies_of_a_run_that_went_back_replace_those_that_it_left(node, tmp_path, key):
    """The attempt before had counted further, and all of that was lost but what lies here."""
    for commit in (50, 51):
        staged = stage(tmp_path / "mine", f"shard-0.{commit}", identity=(commit, 3, commit), size=1000)
        send_copy(*staged, node.peer, key)
    for commit in (5, 6, 7):
        staged = stage(tmp_path / "mine", f"shard-0.{commit}", identity=(commit, 4, commit), size=1000)
        assert not send_copy(*staged, node.peer, key)
    assert sorted(node.held()) == [(0, 6), (0, 7)]


@pytest.mark.parametrize("keep", [[1, 2], "1", [1, 2, "3"], [1, 2, True], {}, 7])
def test_what_is_to_be_kept_has_to_be_a_snapshot(node, tmp_path, keep):
    index, _ = stage(tmp_path / "mine", size=1000)
    blob = index.read_bytes()
    with socket.create_connection(("127.0.0.1", node.port)) as connection:
        wire = Wire(connection, KEY, is_keeper=False, deadline=time.monotonic() + 10)
        wire.send({"index_bytes": len(blob), "keep": keep})
        wire.send_blob(blob)
        assert wire.receive() == {"answer": "what is to be kept is no snapshot"}
    assert node.held() == {}
