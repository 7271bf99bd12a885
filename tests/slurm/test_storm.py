"""What the storms of random faults let pass, and what not. No lab."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from slurm.storm import WAITS, Gap, Kind
from slurm.test_random_faults import KEPT, lost
from slurmft.checkpoint.catalog import Entry
from slurmft.storage.checkpoint_names import Identity

KINDS = {"rank": Kind(1, lambda _: None, takes_s=5), "stopped": Kind(1, lambda _: None, takes_s=50)}


@pytest.mark.parametrize(
    ("waits", "kinds", "found"),
    [
        ({"RUNNING": WAITS["RUNNING"] + 4}, ["rank"], []),
        ({"RUNNING": WAITS["RUNNING"] + 6}, ["rank"], ["RUNNING"]),
        ({"RUNNING": WAITS["RUNNING"] + 50}, ["rank", "stopped"], []),
        ({"RUNNING starting": 24}, [], []),
        ({"RUNNING starting": 26}, [], ["RUNNING starting"]),
        ({"RUNNING starting": 74}, ["stopped"], []),
        ({"PENDING BeginTime": 122}, ["rank"], []),
        ({"PENDING BeginTime": 130}, ["rank"], ["PENDING BeginTime"]),
        ({"PENDING JobHeldUser": 60}, ["rank"], ["PENDING JobHeldUser"]),
        ({"while suspended": 600}, ["rank"], []),
        ({"a state of a newer Slurm": 1}, ["rank"], ["a state of a newer Slurm"]),
    ],
)
def test_a_wait_above_its_limit_is_found(waits: dict[str, float], kinds: list[str], found: list[str]) -> None:
    assert list(Gap(sum(waits.values()), waits, kinds).unexplained(KINDS)) == found


def test_a_start_may_take_longer_on_a_busy_machine() -> None:
    waits = {"RUNNING starting": 60.0}
    assert list(Gap(60, waits, [], load=3.0).unexplained(KINDS)) == ["RUNNING starting"]
    assert list(Gap(60, waits, [], load=6.0).unexplained(KINDS)) == []


def entries(*commits: int) -> dict[Path, Entry]:
    """A checkpoint every five steps."""
    paths = {commit: Path(Identity(5 * commit, 1, commit).folder_name) for commit in commits}
    return {
        path: Entry(step=5 * commit, path=path, metrics={}, committed_at=datetime.now(UTC), generation=1, commit=commit,
                    attempt="", world_size=4, files={})
        for commit, path in paths.items()
    }  # fmt: skip


def test_a_checkpoint_that_retention_keeps_and_is_gone_is_lost() -> None:
    everything = entries(1, 2, 3, 4, 5)
    newest = dict(list(everything.items())[-KEPT:])
    assert lost(everything, newest) == []
    assert lost(entries(1, 2, 3), entries(2, 3, 4)) == []
    [told] = lost(entries(1, 2, 3), entries(1, 2))
    assert "c3" in told
    assert len(lost(entries(1, 2, 3), {})) == KEPT
