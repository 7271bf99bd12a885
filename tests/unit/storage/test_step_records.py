"""digests.json: which checkpoints replicas agreed on, and which are in doubt."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from another_user import OTHER, as_user, needs_root, sticky_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.errors import NewerFormat
from slurmft.storage.checkpoint_names import (
    DIGESTS,
    KEPT,
    QUARANTINE,
    DigestRecord,
    Doubt,
    Quarantine,
    note_doubt,
    note_verified,
    read_digests,
    read_quarantine,
    write_quarantine,
)
from slurmft.storage.history import append_lines, curves, cut_back
from slurmft.system.files import UnsafeFile


def test_a_doubt_covers_later_steps_of_its_generation_and_older_ones(tmp_path: Path) -> None:
    note_doubt(tmp_path, Doubt(generation=4, after_step=30, reason="rank 1 differs"))
    record = read_digests(tmp_path)
    covered = {
        (step, generation) for step in (29, 30, 31) for generation in (3, 4, 5) if record.doubt(step, generation)
    }
    assert covered == {(31, 3), (31, 4)}
    assert read_quarantine(tmp_path / "step-00000030.g4.c3") is None
    mark = read_quarantine(tmp_path / "step-00000031.g4.c4")
    assert mark is not None
    assert (mark.reason, mark.from_scratch) == ("rank 1 differs", True)


def test_an_older_doubt_that_a_newer_one_does_not_cover_stays(tmp_path: Path) -> None:
    note_doubt(tmp_path, Doubt(generation=1, after_step=10))
    note_doubt(tmp_path, Doubt(generation=2, after_step=30))
    record = read_digests(tmp_path)
    assert record.doubt(20, 1) is not None
    assert record.doubt(20, 2) is None
    note_doubt(tmp_path, Doubt(generation=3, after_step=5))
    assert len(read_digests(tmp_path).doubts) == 1


def test_so_many_verified_steps_are_kept_and_a_doubt_beats_them(tmp_path: Path) -> None:
    for step in range(KEPT + 5):
        note_verified(tmp_path, step, 1)
    record = read_digests(tmp_path)
    assert len(record.verified) == KEPT
    assert record.is_verified(KEPT + 4, 1)
    note_doubt(tmp_path, Doubt(generation=1, after_step=KEPT))
    record = read_digests(tmp_path)
    assert record.is_verified(KEPT, 1)
    assert not record.is_verified(KEPT + 4, 1)


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"format": 1, "doubts": [{}]}', '{"format": 1, "verified": [[1, "x"]]}',
     '{"format": 1, "doubts": [{"generation": -1, "after_step": 1}]}', '{"format": 1, "verified": [["\\udcff", 1]]}',
     '{"format": 1, "\\udcff": 1}'],
)  # fmt: skip
def test_a_damaged_record_marks_nothing_and_is_replaced(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DIGESTS).write_text(text)
    assert read_digests(tmp_path) == DigestRecord()
    assert f"{DIGESTS} " in caplog.text and "says nothing" in caplog.text
    assert read_quarantine(tmp_path / "step-00000031.g4.c4") is None
    note_verified(tmp_path, 31, 4)
    assert read_digests(tmp_path).is_verified(31, 4)


def test_a_record_of_a_newer_version_marks_nothing_and_is_kept(tmp_path: Path) -> None:
    (tmp_path / DIGESTS).write_text(text := '{"format": 2, "doubts": [{"generation": 9, "after_step": 0}]}')
    assert read_quarantine(tmp_path / "step-00000031.g4.c4") is None
    with pytest.raises(NewerFormat):
        note_verified(tmp_path, 31, 4)
    assert (tmp_path / DIGESTS).read_text() == text


def _plants(folder: Path) -> dict[str, Callable[[], object]]:
    """What another user may put under a name in a folder that a group shares."""
    doubt = json.dumps({"format": 1, "doubts": [{"generation": 10**9, "after_step": 0}], "reason": "planted"})
    return {
        "a byte": lambda: folder.write_text("x"),
        "a doubt of everything": lambda: folder.write_text(doubt),
        "a fifo": lambda: os.mkfifo(folder),
        "a folder": folder.mkdir,
        "a link to the victim's own": lambda: folder.symlink_to(folder.parent.parent / "other.json"),
        "a link to nothing": lambda: folder.symlink_to("nothing"),
        "a link to itself": lambda: folder.symlink_to(folder.name),
    }


@needs_root
@pytest.mark.parametrize("name", [DIGESTS, f"step-00000031.g4.c4/{QUARANTINE}"])
@pytest.mark.parametrize("plant", _plants(Path("x")))
def test_what_another_user_plants_says_nothing(plant: str, name: str) -> None:
    with sticky_folder() as above:
        doubt = Doubt(generation=10**9, after_step=0, reason="of another folder")
        note_doubt(above, doubt)
        (above / DIGESTS).rename(above / "other.json")
        (directory := above / "checkpoints").mkdir()
        (checkpoint := directory / "step-00000031.g4.c4").mkdir()
        for folder in (directory, checkpoint):
            folder.chmod(0o1777)
        as_user(OTHER, _plants(directory / name)[plant])
        assert read_quarantine(checkpoint) is None
        assert read_digests(directory).doubts == ()


def test_what_we_note_is_ours_alone_to_change(tmp_path: Path) -> None:
    (checkpoint := tmp_path / "step-00000031.g4.c4").mkdir()
    for folder in (tmp_path, checkpoint):
        folder.chmod(0o2770)
    note_verified(tmp_path, 31, 4)
    write_quarantine(checkpoint, Quarantine(reason="why"))
    for path in (tmp_path / DIGESTS, checkpoint / QUARANTINE):
        assert path.stat().st_mode & 0o777 == 0o640


# --- ``metrics.jsonl`` after a cut: whole lines of earlier steps, and nothing else ---


def lines_of(*steps: int, width: int = 0) -> list[str]:
    return [json.dumps({"loss": 0.5, "note": "x" * width, "step": step}) for step in steps]


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 300)), st.integers(0, 301), st.sampled_from([0, 1000, 20_000]), st.integers(0, 60))
def test_lines_of_earlier_steps_stay_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, steps: set[int], start: int, width: int, torn: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    append_lines(path, lines_of(*sorted(steps), width=width))
    whole = path.read_bytes()
    with path.open("ab") as stream:
        stream.write(lines_of(299)[0].encode()[:torn])
    cut_back(path, start)
    assert steps_in(path) == [step for step in sorted(steps) if step < start]
    assert whole.startswith(path.read_bytes())


def test_nothing_happens_without_a_file_or_without_need(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    cut_back(path, 5)
    assert not path.exists()
    append_lines(path, lines_of(1, 2, 3))
    os.utime(path, ns=(1, 1))
    cut_back(path, 4)
    assert path.stat().st_mtime_ns == 1


def test_damage_at_the_end_is_removed_and_before_a_good_line_is_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_lines(path, ["not json", *lines_of(1), '{"step": "x"}', "[]", "\0" * 100])
    cut_back(path, 10)
    assert path.read_text().splitlines() == ["not json", *lines_of(1)]


def test_only_the_end_of_a_large_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    append_lines(path, lines_of(*range(100_000)))
    read, pread = list[int](), os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    cut_back(path, 99_000)
    assert sum(read) < 200_000 < path.stat().st_size
    assert steps_in(path)[-1] == 98_999


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    append_lines(target, lines_of(1))
    (tmp_path / "metrics.jsonl").symlink_to(target)
    for work in (lambda path: cut_back(path, 0), lambda path: append_lines(path, ["x"])):
        with pytest.raises((UnsafeFile, OSError)):
            work(tmp_path / "metrics.jsonl")
    assert steps_in(target) == [1]


def test_a_curve_has_the_first_and_the_newest_step_and_few_between(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert curves(path) == {}
    append_lines(path, [json.dumps({"loss": 1000.0 - step, "lr": 0.1, "step": step}) for step in range(50_000)])
    with path.open("ab") as stream:
        stream.write(b'{"loss": 7, "st')  # torn
    found = curves(path, points=100)
    steps = [step for step, _ in found["loss"]]
    assert list(found) == ["loss", "lr"] and steps[0] == 0 and steps[-1] == 49_999 and 90 <= len(steps) <= 102
    assert all(value == 1000.0 - step for step, value in found["loss"]) and sorted(set(steps)) == steps


def test_what_is_no_number_is_in_no_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = ["[]", '"step"', "\0" * 10, '{"step": 1, "loss": NaN}', '{"step": 2, "loss": "x", "at": 9}', '{"step": true}',
           '{"step": 3, "loss": 1e999}', '{"step": 4, "loss": 0.5}', '{"step": 3, "loss": 9}']  # fmt: skip
    append_lines(path, odd)
    assert curves(path) == {"loss": [(4, 0.5)]}
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert curves(path) == {}
