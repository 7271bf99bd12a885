"""Real text in, exact positions out."""

import os
import time

import pytest
import torch
from of_each import of_each

from slurmft.errors import DataError, UsageError
from slurmft.worker.data import ByteCorpus, WindowLoader


def corpus(size: int = 1000) -> ByteCorpus:
    return ByteCorpus((torch.arange(size) % 251).to(torch.uint8), "numbers")


def content(loaded: ByteCorpus) -> bytes:
    return bytes(loaded.data.tolist())


def take(loader: WindowLoader, batches: int) -> list[torch.Tensor]:
    return [next(loader)[0] for _ in range(batches)]


# ---- corpus ----------------------------------------------------------------------------------------------------------


def test_the_default_is_the_standard_library_and_is_quick():
    started_s = time.process_time()
    first, second = ByteCorpus.load(limit_bytes=1 << 20), ByteCorpus.load(limit_bytes=1 << 20)
    assert time.process_time() - started_s < 5
    assert len(first) == 1 << 20 and first.fingerprint() == second.fingerprint()
    assert content(first).startswith((b'"', b"#", b"r", b"i", b"f"))


def test_a_file_is_itself_up_to_the_limit(tmp_path):
    (tmp_path / "text").write_bytes(b"some text\0 with a zero")
    assert content(ByteCorpus.load(tmp_path / "text")) == b"some text\0 with a zero"
    assert content(ByteCorpus.load(str(tmp_path / "text"), limit_bytes=4)) == b"some"


def test_a_folder_is_its_text_files_in_the_order_of_their_names(tmp_path):
    for name, text in {
        "b": b"2",
        "a/z": b"4",
        "a/b'c d\n": b"3",
        "a.txt": b"1",
        "c.bin": b"\0",
        ".git/x": b"9",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert content(ByteCorpus.load(tmp_path)) == b"1234"
    assert content(ByteCorpus.load(tmp_path, limit_bytes=3)) == b"123"


def test_an_unreadable_file_of_a_folder_is_left_out_by_name(tmp_path, monkeypatch, caplog):
    from slurmft.worker import data

    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    head = data._head

    def refusing(path, limit_bytes):
        if path.name == "a":
            raise PermissionError(13, "Permission denied")
        return head(path, limit_bytes)

    monkeypatch.setattr(data, "_head", refusing)
    assert content(ByteCorpus.load(tmp_path)) == b"2"
    assert str(tmp_path / "a") in caplog.text


@of_each(kind=["absent", "empty file", "empty folder", "binary folder", "pipe", "device"])
def test_input_that_cannot_be_used_is_named(tmp_path, kind):
    path = tmp_path / kind
    if kind == "empty file":
        path.write_bytes(b"")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind != "absent":
        path.mkdir()
        (path / "x").write_bytes(b"\0\1" if kind.startswith("binary") else b"")
    with pytest.raises(DataError) as caught:
        ByteCorpus.load(path)
    assert str(path) in str(caught.value)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    from slurmft.worker import data

    def refusing(path, limit_bytes):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a").write_bytes(b"1")
    monkeypatch.setattr(data, "_head", refusing)
    with pytest.raises(DataError, match="Permission denied"):
        ByteCorpus.load(tmp_path / "a")


def test_a_split_leaves_no_byte_out():
    training, held_out = corpus(1000).split(0.1)
    assert (len(training), len(held_out)) == (900, 100)
    assert content(training) + content(held_out) == content(corpus(1000))
    with pytest.raises(UsageError):
        corpus().split(1.0)


# ---- loader ----------------------------------------------------------------------------------------------------------


def test_targets_follow_their_inputs():
    x, y = next(WindowLoader(corpus(), 8, 4))
    assert x.shape == y.shape == (4, 8) and x.dtype == y.dtype == torch.int64
    assert torch.equal(y, (x + 1) % 251)


def test_an_epoch_visits_every_window_once_in_an_order_of_its_own():
    loader = WindowLoader(corpus(8 * 30 + 1), 8, 10)
    first, second = torch.cat(take(loader, 3))[:, 0], torch.cat(take(loader, 3))[:, 0]
    assert loader.epoch == 2
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted((torch.arange(30) * 8 % 251).tolist())
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_global_batches_do_not_depend_on_the_number_of_ranks(ranks):
    whole = take(WindowLoader(corpus(), 8, 12), 30)
    parts = [take(WindowLoader(corpus(), 8, 12 // ranks, rank=rank, world_size=ranks), 30) for rank in range(ranks)]
    for step in range(30):
        assert torch.equal(whole[step], torch.cat([part[step] for part in parts]))


@pytest.mark.parametrize("batches", [0, 1, 5, 41])
def test_a_position_is_exact_across_epochs_and_world_sizes(batches):
    first = WindowLoader(corpus(), 8, 4, rank=1, world_size=2)
    take(first, batches)
    again = WindowLoader(corpus(), 8, 4, rank=1, world_size=2)
    again.load_state_dict(first.state_dict())
    alone = WindowLoader(corpus(), 8, 8)
    alone.load_state_dict(first.state_dict())
    for _ in range(40):
        expected = next(first)[0]
        assert torch.equal(expected, next(again)[0])
        assert torch.equal(expected, next(alone)[0][4:])


def test_a_batch_larger_than_the_corpus_wraps_around():
    x, _ = next(WindowLoader(corpus(9), 8, 5))
    assert x.tolist() == [list(range(8))] * 5


def test_another_seed_is_another_order_and_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    one, two = take(WindowLoader(corpus(), 8, 8, seed=1), 1)[0], take(WindowLoader(corpus(), 8, 8, seed=2), 1)[0]
    assert not torch.equal(one, two)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "other", [WindowLoader(corpus(999), 8, 4), WindowLoader(corpus(), 4, 4), WindowLoader(corpus(), 8, 4, seed=9)]
)
def test_a_position_in_other_data_is_refused(other):
    with pytest.raises(DataError, match="start a new run"):
        other.load_state_dict(WindowLoader(corpus(), 8, 4).state_dict())


@pytest.mark.parametrize("size", [1, 8])
def test_too_short_a_corpus_is_refused(size):
    with pytest.raises(DataError, match="too short"):
        WindowLoader(corpus(size), 8, 1)


@pytest.mark.parametrize("bad", [{"window": 0}, {"batch_size": 0}, {"rank": 2, "world_size": 2}, {"rank": -1}])
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(UsageError):
        WindowLoader(corpus(), **{"window": 8, "batch_size": 2, **bad})
