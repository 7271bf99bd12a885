"""``metrics.jsonl`` after a cut: whole lines of earlier steps, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.storage.history import append_lines, curves, cut_back
from slurmft.system.files import UnsafeFile


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
