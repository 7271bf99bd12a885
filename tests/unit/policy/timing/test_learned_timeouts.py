"""Limits from durations: a floor, a ceiling, outliers that fade, and a file that survives whatever is done to it."""

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.errors import NewerFormat
from slurmft.policy.hangs import CEILING_S, FLOOR_S, MAX_SAMPLES, MIN_SAMPLES, learned_s, merged
from slurmft.storage import history


@pytest.mark.parametrize(
    ("samples_s", "expected_s"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([1.0] * (MIN_SAMPLES - 1), None, id="too few"),
        pytest.param([0.001] * 100, FLOOR_S, id="fast steps do not make a limit of milliseconds"),
        pytest.param([20.0] * 100, 100.0, id="factor times what is usual"),
        pytest.param([1e6] * 100, CEILING_S, id="not without end"),
        pytest.param([math.nan, math.inf, -1.0] * 50, None, id="no numbers of seconds"),
    ],
)
def test_a_limit_is_learned(samples_s: list[float], expected_s: float | None):
    assert learned_s(samples_s, 5.0) == expected_s


def test_an_outlier_counts_while_it_is_new_and_fades():
    usual, outlier = [1.0] * 60, [30.0]
    just_then = learned_s(usual + outlier, 5.0)
    assert just_then == 45.0  # another one like it would be no hang
    limits = [learned_s(usual + outlier + [1.0] * after, 5.0) for after in range(0, 200, 10)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] == FLOOR_S


def test_what_happens_regularly_is_no_outlier():
    samples_s = ([2.0] * 9 + [60.0]) * 20
    assert learned_s(samples_s, 5.0) == 300.0


durations = st.lists(st.floats(min_value=0, max_value=1e5), min_size=MIN_SAMPLES, max_size=3 * MAX_SAMPLES)


@given(samples_s=durations, factor=st.floats(min_value=1.5, max_value=1000))
def test_the_newest_duration_is_never_above_the_limit(samples_s: list[float], factor: float):
    found = learned_s(samples_s, factor)
    assert found is not None
    assert FLOOR_S <= found <= CEILING_S
    assert found >= min(CEILING_S, samples_s[-1])


def test_the_limit_of_the_setup_is_only_raised():
    """First steps have it, too, and one that compiles takes longer than any setup before."""
    assert merged({"setup": 1800.0}, frozenset(), {"setup": [1.0] * 20}, 5.0) == {"setup": 1800.0}
    assert merged({"setup": 1800.0}, frozenset(), {"setup": [600.0] * 20}, 5.0) == {"setup": 3000.0}


def test_a_configured_value_is_the_least_and_a_default_is_not():
    configured = {"setup": 1800.0, "step": 180.0, "usual": 500.0, "checkpointing": 0.0, "evaluation": 1800.0}
    samples = {"setup": [20.0] * 20, "step": [20.0] * 20, "checkpointing": [20.0] * 20,
               "usual": [20.0] * 20, "mine": [40.0] * 20,
               "evaluation": [1.0] * 3}  # fmt: skip
    found = merged(configured, frozenset({"step", "checkpointing"}), samples, 5.0)
    assert found == {
        "setup": 1800.0,
        "step": 180.0,
        "usual": 100.0,
        "checkpointing": 0.0,
        "evaluation": 1800.0,
        "mine": 200.0,
    }


# The file


def test_what_is_written_is_read_by_the_same_workload_only(tmp_path):
    history.write_ft_state(tmp_path, "a", {"step": [1.0, 2.0], "odd 'name\"\u00fc": [3.0]})
    history.write_ft_state(tmp_path, "b", {"step": [9.0]})
    assert history.read_ft_state(tmp_path, "a") == {"step": [1.0, 2.0], "odd 'name\"\u00fc": [3.0]}
    assert history.read_ft_state(tmp_path, "b") == {"step": [9.0]}
    assert history.read_ft_state(tmp_path, "c") == {}
    assert json.loads((tmp_path / "ft_state.json").read_text())["format"] == 1


def test_the_file_stays_small(tmp_path):
    last = history.MAX_WORKLOADS
    for number in range(last + 1):
        names = range(history.MAX_SECTIONS + 3 if number == last else 3)
        samples = {f"section {each}": [1.0] * 1000 for each in names}
        history.write_ft_state(tmp_path, f"workload {number}", samples)
    assert (tmp_path / "ft_state.json").stat().st_size < history.FT_STATE_MAX_BYTES
    assert history.read_ft_state(tmp_path, "workload 0") == {}
    newest = history.read_ft_state(tmp_path, f"workload {last}")
    assert (len(newest), len(newest["section 0"])) == (history.MAX_SECTIONS, history.MAX_SAMPLES)


@of_each(content=[
        b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"format": 1}', b'{"format": 1, "workloads": {}}',
        b'{"format": 1, "workloads": [["a"]]}', b'{"format": 1, "workloads": [["a", {"step": [NaN]}]]}',
        b'{"format": 1, "workloads": [["a", {"step": [true]}]]}', b'{"format": 1, "workloads": [["a", {"step": 5}]]}',
        b'{"format": 1, "workloads": [["a", {"step": [-1]}]]}',
        b'{"format": 1, "workloads": [["a", {"step": [1e999]}]]}',
        b"[" * 100_000,
    ])  # fmt: skip
def test_a_damaged_file_is_nothing_and_is_replaced(tmp_path, content: bytes):
    (tmp_path / "ft_state.json").write_bytes(content)
    assert history.read_ft_state(tmp_path, "a") == {}
    history.write_ft_state(tmp_path, "a", {"step": [1.0]})
    assert history.read_ft_state(tmp_path, "a") == {"step": [1.0]}


def test_a_file_of_a_newer_version_is_not_read_and_not_written_over(tmp_path):
    text = '{"format": 2, "workloads": "of another kind"}'
    (tmp_path / "ft_state.json").write_text(text)
    assert history.read_ft_state(tmp_path, "a") == {}
    with pytest.raises(NewerFormat):
        history.write_ft_state(tmp_path, "a", {"step": [1.0]})
    assert (tmp_path / "ft_state.json").read_text() == text


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "ft_state.json").write_text(" " * (history.FT_STATE_MAX_BYTES + 1))
    assert history.read_ft_state(tmp_path, "a") == {}


def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path):
    code = (
        "import sys; from pathlib import Path; from slurmft.storage.history import write_ft_state\n"
        "number = 0\n"
        "while True:\n"
        "    number += 1\n"
        "    write_ft_state(Path(sys.argv[1]), 'a', {'step': [float(number)] * 200})\n"
        "    print(number, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        writer.kill()
    found = history.read_ft_state(tmp_path, "a")["step"]
    assert (len(found), len(set(found))) == (200, 1)


def test_a_folder_that_cannot_be_written_is_an_oserror(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        history.write_ft_state(tmp_path / "nowhere", "a", {})
