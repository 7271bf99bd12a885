"""digests.json: which checkpoints replicas agreed on, and which are in doubt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from another_user import OTHER, as_user, needs_root, sticky_folder

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
