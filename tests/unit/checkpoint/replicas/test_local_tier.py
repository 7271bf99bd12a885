"""Copies on a node's local disk: the newest two, of this run and no other."""

import multiprocessing
import os
from pathlib import Path

import pytest
from made_snapshots import flip_byte, stage

from slurmft.checkpoint.memory_sources import scan
from slurmft.checkpoint.replicas import keep_local, lineage_of, local_folder
from slurmft.errors import StorageError
from slurmft.policy.checkpoints import Tier


def test_the_newest_two_stay_and_can_be_offered(tmp_path):
    folder = local_folder(tmp_path / "scratch", tmp_path / "check points")
    for step in (40, 50, 60):
        assert keep_local(*stage(tmp_path / "mine", identity=(step, 3, step)), folder) == ""
    assert [(one.name[0], one.tier) for one in scan(None, folder)] == [(60, Tier.LOCAL_DISK), (50, Tier.LOCAL_DISK)]
    assert scan(None, folder)[0].image.read_bytes() == (tmp_path / "mine/shard-0.a.image").read_bytes()[:3_000_000]


def test_a_run_begun_anew_does_not_meet_what_the_old_one_left(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    old = local_folder(tmp_path, checkpoints)
    assert local_folder(tmp_path, checkpoints) == old
    (checkpoints / "lineage.json").unlink()
    assert local_folder(tmp_path, checkpoints) != old


def _draw(folder: str) -> str:
    return lineage_of(Path(folder))


def test_ranks_that_ask_at_once_get_one_answer(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(_draw, [str(tmp_path / "new")] * 16))) == 1
    assert os.listdir(tmp_path / "new") == ["lineage.json"]


@pytest.mark.parametrize(
    "text",
    ["", '{"format": 1}', '{"format": 1, "lineage": "../../etc"}', '{"format": 1, "lineage": 5}'],
    ids=["empty", "none", "a way out", "a number"],
)
def test_a_damaged_lineage_is_an_error(tmp_path, text):
    (tmp_path / "lineage.json").write_text(text)
    with pytest.raises(StorageError, match=r"lineage\.json"):
        lineage_of(tmp_path)


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path):
    folder = local_folder(tmp_path, tmp_path / "checkpoints")
    folder.parent.chmod(0o777)
    assert local_folder(tmp_path, tmp_path / "checkpoints").parent != folder.parent


def test_neither_is_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"slurmft-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    assert local_folder(tmp_path, tmp_path / "checkpoints").parent.parent == tmp_path
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_cannot_be_kept_is_said_and_leaves_nothing(tmp_path):
    folder = local_folder(tmp_path / "scratch", tmp_path / "checkpoints")
    paths = stage(tmp_path / "mine")
    flip_byte(paths[1], 1_500_000)
    assert keep_local(*paths, folder) == "a newer snapshot is being staged"
    assert "No such file" in keep_local(*paths, tmp_path / "none")
    paths[0].unlink()
    assert keep_local(*paths, folder) == "a newer snapshot is being staged"
    assert list(folder.iterdir()) == []
