"""The account of what a router keeps of its streams."""

from __future__ import annotations

import pytest

from slurmft.policy.inference.continuation import Form
from slurmft.policy.inference.joined_streams import JoinedStream, Unjoinable
from slurmft.policy.inference.kept_streams import EXPIRES_S, KeptStreams

EVENT = b'data: {"choices": [{"text": "abc", "index": 0}]}\n\n'
BODY = b'{"prompt": "p", "stream": true, "max_tokens": 40, "temperature": 0}'


class World:
    def __init__(self, most_bytes: int) -> None:
        self.now_s = 0.0
        self.kept = KeptStreams(lambda: self.now_s, most_bytes=most_bytes)

    def stream(self) -> JoinedStream:
        return JoinedStream("/v1/completions", BODY, frozenset(Form), kept=self.kept)


def goes_on(stream: JoinedStream) -> bool:
    body, _ = stream.rest()
    return body is not None and body["prompt"].startswith("pabc")


def test_beyond_the_total_a_stream_is_passed_on_and_cannot_be_continued() -> None:
    world = World(5_000)
    first, second = world.stream(), world.stream()
    for _ in range(20):
        assert first.take(EVENT) == EVENT
    assert 0 < world.kept.kept_bytes < 5_000 and len(world.kept) == 1
    for _ in range(100):
        assert second.take(EVENT) == EVENT, "the client gets it whatever is kept"
        assert world.kept.kept_bytes <= 5_000
    assert len(world.kept) == 1, "what the second one kept is given back"
    with pytest.raises(Unjoinable, match="too much for all streams"):
        second.rest()
    assert goes_on(first)
    first.end()
    assert (world.kept.kept_bytes, len(world.kept)) == (0, 0)
    third = world.stream()
    third.take(EVENT)
    assert goes_on(third), "there is room again"


def test_a_stream_is_kept_for_an_hour() -> None:
    world = World(1 << 20)
    old, young = world.stream(), world.stream()
    old.take(EVENT)
    world.now_s = EXPIRES_S
    young.take(EVENT)
    assert len(world.kept) == 2
    world.now_s += 1.0
    young.take(EVENT)
    assert len(world.kept) == 1
    assert old.take(EVENT) == EVENT
    assert len(world.kept) == 1, "it keeps nothing again"
    with pytest.raises(Unjoinable, match="3600 s"):
        old.rest()
    assert goes_on(young)


def test_what_follows_a_seam_counts_as_well_and_a_long_stream_gives_back_what_it_kept() -> None:
    world = World(1 << 30)
    stream = world.stream()
    stream.take(EVENT)
    assert goes_on(stream)
    before = world.kept.kept_bytes
    stream.take(EVENT)
    assert world.kept.kept_bytes > before
    long = b'data: {"choices": [{"text": "' + b"x" * (900 << 10) + b'", "index": 0}]}\n\n'
    for _ in range(5):
        assert stream.take(long)
    assert (world.kept.kept_bytes, len(world.kept)) == (0, 0)
    with pytest.raises(Unjoinable, match="too long"):
        stream.rest()
    stream.end()
    assert world.kept.kept_bytes == 0
