"""digests.json: which checkpoints replicas agreed on, and which are in doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmft.errors import StorageError
from slurmft.storage.checkpoint_names import read_quarantine
from slurmft.storage.digest_record import DIGESTS, KEPT, Doubt, note_doubt, note_verified, read_digests


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


@pytest.mark.parametrize("text", ["[]", "{", '{"format": 1, "doubts": [{}]}', '{"format": 1, "verified": [[1, "x"]]}'])
def test_a_damaged_record_is_an_error_and_counts_as_a_mark(tmp_path: Path, text: str) -> None:
    (tmp_path / DIGESTS).write_text(text)
    with pytest.raises(StorageError, match=DIGESTS):
        read_digests(tmp_path)
    assert read_quarantine(tmp_path / "step-00000031.g4.c4") is not None
