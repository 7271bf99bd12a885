"""Saves in a framework's format: a folder counts when all ranks are done, and not a moment earlier."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks import run_ranks

from slurmft.errors import CheckpointError, Fenced
from slurmft.integrations.folders import COMPLETE_MARKER, MarkedFolders


def fill(folder: Path) -> None:
    (folder / "state").write_text(folder.name)
    (folder / "sharded").mkdir()
    (folder / "sharded" / "part").write_text("0")


def steps(folders: MarkedFolders) -> list[int]:
    return [save.place.step for save in folders.complete()]


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    folders = MarkedFolders(tmp_path / "saves", keep=2)
    assert folders.newest() is None
    for step in (5, 10, 15, 15):
        folders.write(step, fill)
    assert steps(folders) == [15, 15]
    newest = folders.newest()
    assert newest is not None
    assert (newest.place.serial, (newest.path / "state").read_text()) == (1, newest.path.name)
    assert newest.path.stat().st_mode & 0o77 == 0


def test_a_save_that_fails_leaves_the_older_ones(tmp_path: Path) -> None:
    folders = MarkedFolders(tmp_path, keep=1)
    folders.write(5, fill)

    def full(folder: Path) -> None:
        fill(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="No space left") as error:
        folders.write(10, full)
    assert error.value.errno == errno.ENOSPC, "the session tries again"
    assert steps(folders) == [5]
    folders.write(10, fill)
    assert [path.name[5:20] for path in tmp_path.iterdir()] == ["000000000000010"], "what was not finished is gone"


def change_size(folder: Path) -> None:
    (folder / "state").write_text("")


def remove_file(folder: Path) -> None:
    (folder / "sharded" / "part").unlink()


def remove_marker(folder: Path) -> None:
    (folder / COMPLETE_MARKER).unlink()


def damage_marker(folder: Path) -> None:
    (folder / COMPLETE_MARKER).write_text('{"format": 1, "files"')


def mark_by_a_link(folder: Path) -> None:
    content = (folder / COMPLETE_MARKER).read_text()
    (folder / COMPLETE_MARKER).unlink()
    os.mkfifo(folder / COMPLETE_MARKER)
    assert json.loads(content)["step"] == 10


def let_others_write(folder: Path) -> None:
    folder.chmod(0o777)


@pytest.mark.parametrize(
    "harm", [change_size, remove_file, remove_marker, damage_marker, mark_by_a_link, let_others_write]
)
def test_what_is_not_whole_is_not_resumed_from(tmp_path: Path, harm) -> None:
    folders = MarkedFolders(tmp_path, keep=3)
    folders.write(5, fill)
    harm(folders.write(10, fill))
    newest = folders.newest()
    assert newest is not None
    assert newest.place.step == 5


def test_marked_saves_of_which_none_is_whole_are_an_error(tmp_path: Path) -> None:
    """Beginning anew would throw the training away without a word."""
    folders = MarkedFolders(tmp_path, keep=3)
    change_size(folders.write(5, fill))
    with pytest.raises(CheckpointError, match="none of the 1 marked saves"):
        folders.newest()


def test_a_stale_attempt_marks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner.json").write_text('{"format": 1, "generation": 3}')
    monkeypatch.setenv("SLURMFT_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("SLURMFT_GENERATION", "2")
    folders = MarkedFolders(tmp_path / "saves", keep=3)
    with pytest.raises(Fenced):
        folders.write(5, fill)
    assert steps(folders) == []


SAVING = """
    import sys
    from pathlib import Path
    import torch.distributed as dist
    from slurmft.integrations.folders import MarkedFolders
    from slurmft.system.files import replace_atomically
    dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=int(sys.argv[2]), world_size=2)
    folders = MarkedFolders(Path(sys.argv[1]), keep=2)
    found = folders.newest()
    step = found.place.step if found else 0
    if found:  # every rank's file is there, whole, and of the same step
        for rank in range(2):
            assert (found.path / f"rank-{rank}").read_bytes() == b"%d %d " % (rank, step) * 40_000, found
    print("resumed", step, flush=True)

    def fill(folder):
        with open(folder / f"rank-{dist.get_rank()}", "wb") as file:
            for _ in range(40):
                file.write(b"%d %d " % (dist.get_rank(), step) * 1_000)
                file.flush()
        replace_atomically(folder / f"own-{dist.get_rank()}", b"generators")

    for _ in range(int(sys.argv[4])):
        step += 1
        folders.write(step, fill)
"""


ONE_IS_LATE = """
    import sys, time
    from pathlib import Path
    import torch.distributed as dist
    from slurmft.integrations import folders as marked_folders
    from slurmft.system.files import replace_atomically
    dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=int(sys.argv[2]), world_size=2)
    sync = marked_folders._sync

    def watched(folder, **options):
        assert (folder / "rank-1").exists(), "the folder is synced while another rank writes"
        sync(folder, **options)

    def fill(folder):
        while dist.get_rank() and not (folder / "rank-0").exists():
            time.sleep(0.001)
        time.sleep(0.3 * dist.get_rank())  # in which rank 0 would go on, if it could
        replace_atomically(folder / f"rank-{dist.get_rank()}", "whole")

    marked_folders._sync = watched
    marked_folders.MarkedFolders(Path(sys.argv[1]), keep=2).write(5, fill)
"""


def test_a_folder_is_synced_when_every_rank_has_written(tmp_path: Path) -> None:
    """Rank 0 listed the temporary file of another rank, found it renamed, and now and then a run ended with ENOENT."""
    run_ranks(textwrap.dedent(ONE_IS_LATE), tmp_path / "saves", 2, str(tmp_path / "store"))
    assert steps(MarkedFolders(tmp_path / "saves", keep=2)) == [5]


def kill_during_saves(folder: Path, seeds: range) -> list[int]:
    """Kill two ranks while they save, once for each seed; returns where each start resumed.

    Raises:
        AssertionError: a start resumed from a save that was not whole, or from an older one than was marked.
    """
    resumed = list[int]()
    for seed in seeds:
        dice = random.Random(seed)
        store = folder.with_suffix(f".{seed}")
        command = [sys.executable, "-c", textwrap.dedent(SAVING), str(folder)]
        ranks = [
            subprocess.Popen([*command, str(rank), str(store), "1000000"], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            assert ranks[0].stdout is not None
            line = ranks[0].stdout.readline().split()
            assert line[:1] == ["resumed"], f"seed {seed}: {line}"
            resumed.append(int(line[1]))
            with_first = dice.random() < 0.5  # one rank dies before the other
            with contextlib.suppress(subprocess.TimeoutExpired):
                ranks[0].wait(dice.uniform(0.0, 0.25))
            for rank in ranks if with_first else reversed(ranks):
                rank.send_signal(signal.SIGKILL)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
        assert resumed == sorted(resumed), f"seed {seed}: a marked save was lost: {resumed}"
    return resumed


def test_kills_during_saves(tmp_path: Path) -> None:
    resumed = kill_during_saves(tmp_path / "saves", range(2))
    assert resumed[-1] > 0


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_100_kills_during_saves(tmp_path: Path) -> None:
    resumed = kill_during_saves(tmp_path / "saves", range(1000, 1100))
    assert resumed[-1] > 100
