"""Copies between nodes, attacked: by strangers who connect, by a man in the middle, and by 400 mutated streams."""

import contextlib
import hashlib
import hmac
import itertools
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_snapshots import KEY, stage
from waiting import slowness, until

from slurmft.checkpoint.image_file import holdings_in
from slurmft.checkpoint.replicas import PIECE_BYTES, BadCopy, Peer, Wire, send_copy
from slurmft.policy.checkpoints import Tier
from slurmft.storage.checkpoint_names import KEY_FILE, PEERS, announcement
from slurmft.system.files import NONCE_BYTES, TAG_BYTES, PieceTags, derived_key, write_json

SIZE = 3 * PIECE_BYTES + 12_345
MAX_GROWTH_BYTES = 100 << 20
KEEPER = """
import sys
from slurmft.checkpoint import replicas as wire
nonce, wire.SILENCE_S, wire.HANDSHAKE_S = sys.argv.pop(), 1.0, 1.0
if nonce:
    wire.new_nonce = lambda: bytes.fromhex(nonce)
sys.exit(wire.main(sys.argv[1:]))
"""


class Node:
    """A keeper as the agent starts it, in a process of its own."""

    def __init__(self, root: Path, nonce: str = "") -> None:
        self.memory = root / "node"
        (self.memory / PEERS).mkdir(parents=True)
        (self.memory / KEY_FILE).write_bytes(KEY)
        self.log = root / "keeper.log"
        self.peer = Peer(place=0, announcement=announcement(root, 0))
        with socket.create_server(("127.0.0.1", 0)) as listener, self.log.open("wb") as log:
            self.port: int = listener.getsockname()[1]
            number = listener.fileno()
            argv = [sys.executable, "-c", KEEPER, str(self.memory), str(number), nonce]
            self.process = subprocess.Popen(argv, pass_fds=[number], stdin=subprocess.DEVNULL, stderr=log)
        self.announce(self.port)

    def announce(self, port: int) -> None:
        write_json(self.peer.announcement, {"hosts": ["127.0.0.1"], "port": port}, durable=False)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def held(self) -> list[int]:
        return [one.index.identity.step for one in holdings_in(self.memory / PEERS, Tier.PEER)]

    def peak_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def new_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(nonce: str = "") -> Node:
        nodes.append(Node(tmp_path, nonce))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def send(paths: tuple[Path, Path], node: Node, key: Path, **options) -> str:
    return send_copy(*paths, node.peer, key, **{"limit_s": 20.0, **options})


# Strangers


def test_idle_connections_of_strangers_do_not_keep_copies_away(tmp_path, node, key):
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(node.connect())
        for step in (40, 50):
            assert send(stage(tmp_path / "mine", identity=(step, 3, step)), node, key) == ""
        assert sorted(node.held()) == [40, 50]
        until(lambda: node.threads() < 40)
    log = node.log.read_text()
    assert "Traceback" not in log
    assert log.count("refused a connection") <= 11


def test_a_copy_under_way_is_not_closed_for_strangers(tmp_path, node, key):
    paths, problems = stage(tmp_path / "mine", size=4 << 20), []
    sending = threading.Thread(target=lambda: problems.append(send(paths, node, key, bytes_per_s=2 << 20)))
    sending.start()
    until((node.memory / PEERS / "shard-0.a.image").exists)
    with contextlib.ExitStack() as stack:
        while sending.is_alive():
            stack.enter_context(node.connect())
            sending.join(0.01)
    assert problems == [""]
    assert node.held() == [40]


def test_a_connection_that_proves_nothing_is_closed_in_time(node):
    with node.connect() as stranger:
        began = time.monotonic()
        while stranger.recv(4096):
            stranger.sendall(b"x")  # a drip does not prolong it
        assert time.monotonic() - began < 5 * slowness()


# A man in the middle


class Middle:
    """Between sender and keeper: passes on what comes, after ``change`` has seen each chunk to the keeper."""

    def __init__(self, node: Node, change: Callable[[bytes], bytes] = lambda chunk: chunk) -> None:
        self.sent, self.answered = bytearray(), bytearray()
        self._node, self._change = node, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        node.announce(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                self.sent.clear()
                self.answered.clear()
                theirs = self._node.connect()
                back = threading.Thread(target=self._back, args=(theirs, ours), daemon=True)
                back.start()
                with contextlib.suppress(OSError):
                    while chunk := ours.recv(1 << 16):
                        theirs.sendall(self._change(chunk))
                        self.sent += chunk
                with contextlib.suppress(OSError):
                    theirs.shutdown(socket.SHUT_WR)
                back.join(20)
                ours.close()
                theirs.close()

    def _back(self, theirs: socket.socket, ours: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := theirs.recv(1 << 16):
                self.answered += chunk
                ours.sendall(chunk)
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._node.announce(self._node.port)
        self._thread.join(20)


@contextlib.contextmanager
def between(node: Node, change: Callable[[bytes], bytes] = lambda chunk: chunk) -> Iterator[Middle]:
    middle = Middle(node, change)
    try:
        yield middle
    finally:
        middle.close()


FORGED_DIGESTS = """
from slurmft.checkpoint import replicas as slots
slots.Verifier.feed = slots.Verifier.finish = lambda *_: None
"""


def test_an_image_with_the_right_digests_is_not_believed_when_a_byte_was_changed(tmp_path, key, monkeypatch):
    """xxh3 has no key: who can change the bytes on their way finds others of the same digest in microseconds."""
    monkeypatch.setattr(sys.modules[__name__], "KEEPER", FORGED_DIGESTS + KEEPER)
    node, passed = Node(tmp_path), 0

    def change(chunk: bytes) -> bytes:
        nonlocal passed
        passed += len(chunk)
        return bytes([chunk[0] ^ 1]) + chunk[1:] if 1_000_000 < passed < 1_200_000 else chunk

    try:
        with between(node, change):
            assert send(stage(tmp_path / "mine", size=SIZE), node, key, limit_s=10) != ""
        assert passed > 1_000_000
        until(lambda: "a piece of the image is not authentic" in node.log.read_text())
        assert node.held() == []
        assert send(stage(tmp_path / "mine", size=SIZE), node, key) == ""
    finally:
        node.close()


def test_a_recorded_stream_cannot_be_played_again(tmp_path, node, key):
    with between(node) as middle:
        assert send(stage(tmp_path / "mine"), node, key) == ""
        recorded = bytes(middle.sent)
    for path in (node.memory / PEERS).iterdir():
        path.unlink()
    assert b"kept" not in played(node, recorded)
    assert node.held() == []


def test_what_the_keeper_says_cannot_be_sent_back_to_it(node):
    with node.connect() as reflected:
        reflected.sendall(reflected.recv(NONCE_BYTES))
        line = b'{"index_bytes":5}'
        with contextlib.suppress(OSError):
            reflected.sendall(struct.pack("!I", len(line)) + bytes(TAG_BYTES) + line)
            assert reflected.recv(100) == b""


def test_a_sender_of_version_1_is_a_stranger(node):
    line = b'{"index_bytes":5}'
    with node.connect() as old:
        mine = b"0" * 32
        theirs = old.recv(NONCE_BYTES)
        secret = hmac.new(KEY, b"slurmft copies 1 " + theirs + mine, hashlib.sha256).digest()
        old.sendall(mine + struct.pack("!I", len(line)))
        with contextlib.suppress(OSError):
            old.sendall(hmac.new(secret, b"s0 " + line, hashlib.sha256).digest() + line)
            assert old.recv(100) == b""
    until(lambda: "not authentic" in node.log.read_text())


def test_a_keeper_without_the_key_gets_no_image(tmp_path, node, key):
    with socket.create_server(("127.0.0.1", 0)) as rogue:
        node.announce(rogue.getsockname()[1])
        received = bytearray()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = rogue.accept()
                    with connection, contextlib.suppress(BadCopy, OSError):
                        connection.settimeout(1)
                        wire = Wire(connection, b"o" * 64, is_keeper=True, deadline=time.monotonic() + 2)
                        wire.send({"answer": "send"})
                        while chunk := connection.recv(1 << 20):
                            received.extend(chunk)

        threading.Thread(target=serve, daemon=True).start()
        paths = stage(tmp_path / "mine")
        assert "not authentic" in send(paths, node, key, limit_s=10)
        rogue.shutdown(socket.SHUT_RDWR)
    assert len(received) < 10 * len(paths[0].read_bytes())


# Mutated streams


def played(node: Node, stream: bytes, *, hangs_up: bool = True) -> bytes:
    """What the keeper answers to a stream, until it closes the connection."""
    answers = bytearray()
    with node.connect() as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(stream)
        if hangs_up:
            with contextlib.suppress(OSError):  # the keeper was faster
                stranger.shutdown(socket.SHUT_WR)
        while chunk := stranger.recv(1 << 16):
            answers += chunk
    return bytes(answers)


def pieces_of(stream: bytes, index_bytes: int) -> list[bytes]:
    """A sender's stream, cut where its parts begin."""
    line = struct.unpack("!I", stream[NONCE_BYTES : NONCE_BYTES + 4])[0]
    lengths = [NONCE_BYTES, 4, TAG_BYTES, line, TAG_BYTES, index_bytes]
    left = SIZE
    while left:
        lengths += [min(left, PIECE_BYTES), TAG_BYTES]
        left -= min(left, PIECE_BYTES)
    ends = list(itertools.accumulate(lengths))
    assert ends[-1] == len(stream)
    return [stream[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def mutated(parts: list[bytes], chance: random.Random) -> list[bytes]:
    """The parts with one to three changes; another stream than before, and not one with something behind its end."""
    found = list(parts)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(found))
        part = bytearray(found[place])
        match chance.choice(("flip", "flip", "cut", "end", "repeat", "swap", "drop", "length", "noise", "zeros")):
            case "flip" if part:
                part[chance.randrange(len(part))] ^= 1 << chance.randrange(8)
                found[place] = bytes(part)
            case "cut":
                found[place] = bytes(part[: chance.randrange(len(part) + 1)])
            case "end":
                del found[place + 1 :]
            case "repeat" if place + 1 < len(found):
                found.insert(place, found[place])
            case "swap":
                other = chance.randrange(len(found))
                found[place], found[other] = found[other], found[place]
            case "drop":
                del found[place]
                found = found or [b""]
            case "length":
                number = chance.choice((0, 1, 2**16, 2**31, 2**32 - 1, chance.randrange(2**32)))
                found[min(1, len(found) - 1)] = struct.pack("!I", number)
            case "noise":
                found[place] = chance.randbytes(len(part))
            case "zeros":
                found[place] = bytes(len(part))
    return found


@pytest.mark.timeout(300)
def test_no_mutated_stream_is_taken(tmp_path, new_node, key, monkeypatch):
    """The keeper's nonce is always the same here, so that an unchanged stream is right, and most changes get far."""
    nonce = "11" * NONCE_BYTES
    node = new_node(nonce)
    index, image = stage(tmp_path / "mine", size=SIZE)
    with between(node) as middle:
        assert send((index, image), node, key) == ""
        recorded = bytes(middle.sent)
    for path in (node.memory / PEERS).iterdir():
        path.unlink()
    parts, chance = pieces_of(recorded, len(index.read_bytes())), random.Random(20_000)
    peak, longest_s = node.peak_bytes(), 0.0
    for _ in range(400):
        stream = b"".join(mutated(parts, chance))
        if stream == recorded:
            continue
        began = time.monotonic()
        answers = played(node, stream, hangs_up=chance.random() < 0.95)
        longest_s = max(longest_s, time.monotonic() - began)
        assert b"kept" not in answers
        assert node.held() == []
    assert longest_s < 10
    assert node.process.poll() is None
    assert node.peak_bytes() - peak < MAX_GROWTH_BYTES
    assert "Traceback" not in node.log.read_text()
    until(lambda: not list((node.memory / PEERS).glob("*")))
    assert b"kept" in played(node, recorded), "the unchanged stream is right"
    assert node.held() == [40]


@contextlib.contextmanager
def known(node: Node) -> Iterator[Wire]:
    with node.connect() as connection:
        yield Wire(connection, KEY, is_keeper=False, deadline=time.monotonic() + 10)


@pytest.mark.timeout(120)
def test_lengths_of_a_sender_who_has_the_key_are_bounded_too(tmp_path, node):
    """A client with the key cannot make the keeper take memory for data that it never sends."""
    peak = node.peak_bytes()
    for length in (0, -1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 10**300, 1e18, "5", None, True, [], {}):
        with known(node) as one:
            one.send({"index_bytes": length})
            assert one.receive() == {"answer": "an index of that length is not taken"}
    for size in (2**40, 2**62, 2**63 - 1, 2**63, 2**70):
        blob = (
            f'{{"format": 1, "identity": [1, 1, 1], "shard": 0, "shards": 1, "size_bytes": {size}, "items": [{{'
            f'"key": "a", "kind": "object", "offset": 0, "length": {size}, "data_offset": 0, "data_length": {size}, '
            f'"dtype": "", "shape": [], "starts": [], "sizes": [], "path": [], "digest": "00"}}]}}'
        ).encode()
        with known(node) as one:
            one.send({"index_bytes": len(blob)})
            one.send_blob(blob)
            assert one.receive()["answer"].startswith(("no room: ", "not an index: "))
    assert node.held() == []
    assert node.peak_bytes() - peak < MAX_GROWTH_BYTES
    assert "Traceback" not in node.log.read_text()


# Tags


def test_a_tag_tells_place_length_and_end():
    parts = [b"a" * 10, b"a" * 10, b"b" * 5]

    def tags(size: int, key: bytes = b"key") -> list[bytes]:
        stream = PieceTags(key, size)
        return [stream.next_tag(part) for part in parts]

    right = tags(25)
    assert len(set(right)) == 3
    assert tags(26)[:2] == right[:2]
    assert tags(26)[2] != right[2], "not the last one"
    assert not set(tags(25, b"other")) & set(right)
    stream = PieceTags(b"key", 25)
    assert [stream.is_next(part, tag) for part, tag in zip(parts, right, strict=True)] == [True] * 3
    assert not PieceTags(b"key", 25).is_next(parts[1], right[1])
    assert not PieceTags(b"key", 25).is_next(b"a" * 9, right[0])


def test_keys_differ_by_purpose_and_context_and_by_where_one_part_ends():
    keys = [
        derived_key(b"k", "copies", b"ab", b"c"), derived_key(b"k", "copies", b"a", b"bc"),
        derived_key(b"k", "copies", b"abc"), derived_key(b"k", "supply", b"abc"), derived_key(b"l", "copies", b"abc"),
        derived_key(b"k", "copiesabc"),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
