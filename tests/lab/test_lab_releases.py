"""Which release of Slurm a lab is built of, and where it comes from. The labs are tested in ``tests/slurm``."""

import fcntl
import threading
import time
from pathlib import Path

import pytest

from slurmft.errors import LabError, LabUnavailable, UsageError
from slurmft.lab import settings
from slurmft.lab.members import Mount, mounts_of, paths_to_expose, root_mounts
from slurmft.lab.settings import LabPaths, mark_source

FOLDER = Path("/var/lib/some-lab")
TARGETS = """\
bookworm-security main http://mirror.example/debian-security/
bookworm contrib http://mirror.example/debian/
bookworm main http://mirror.example/debian/
nodistro main https://other.example/
"""


def no_install(packages: tuple[str, ...]) -> None:
    raise LabUnavailable(f"no {' '.join(packages)} here")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What programs answer, by their first word; one that is missing fails. A fresh place to keep releases in."""
    answers = {"slurmctld": "slurm-wlm 22.05.8", "apt-get": TARGETS, "chroot": "slurm-wlm 24.11.5", "debootstrap": ""}

    def run(argv: list[str], **_: object) -> str:
        if argv[0] == "unshare":
            argv = argv[argv.index("debootstrap") :]
        if argv[0] not in answers:
            raise LabError(f"{argv[0]}: not found")
        if argv[0] == "debootstrap":
            Path(argv[4]).mkdir()
            answers["fetched"] = " ".join(argv)
        return answers[argv[0]]

    monkeypatch.setattr(settings, "run", run)
    monkeypatch.setattr(settings, "FOLDER", tmp_path / "releases")
    monkeypatch.setattr(settings, "require_root", lambda: None)
    monkeypatch.setattr(settings, "install", no_install)
    monkeypatch.setattr(settings, "codename", lambda: "bookworm")
    monkeypatch.setattr(settings.shutil, "which", lambda name, path: name if name in answers else None)
    return answers


@pytest.mark.parametrize(
    ("asked", "release"),
    [("", ""), ("22.05", ""), ("22.05.8", ""), ("24.11.5", "24.11"), ("26.05", "26.05")],
)
def test_the_machines_own_release_needs_no_other(commands: dict[str, str], asked: str, release: str) -> None:
    assert settings.release_of(asked) == release


def test_a_machine_without_slurm_takes_every_release_from_elsewhere(commands: dict[str, str]) -> None:
    del commands["slurmctld"]
    assert settings.release_of("22.05") == "22.05"


@pytest.mark.parametrize("asked", ["23.02", "24", "24.11.5.1", "trixie", "../24.11"])
def test_a_release_that_no_debian_has_is_refused_with_those_that_there_are(
    commands: dict[str, str], asked: str
) -> None:
    with pytest.raises(UsageError, match=r"(?s)no release.*22.05, 24.11, 26.05"):
        settings.release_of(asked)
    with pytest.raises(UsageError):
        settings.ensure_release(asked)


def test_a_release_is_fetched_once_from_apts_own_mirror(commands: dict[str, str]) -> None:
    tree = settings.ensure_release("24.11")
    assert tree is not None
    assert tree.is_dir()
    assert " trixie " in commands["fetched"]
    assert " http://mirror.example/debian/ " in commands["fetched"]
    del commands["debootstrap"], commands["apt-get"]
    assert settings.ensure_release("24.11") == tree, "it is kept"


@pytest.mark.parametrize(
    ("missing", "answer", "words"),
    [
        ("debootstrap", None, "no debootstrap here"),
        ("apt-get", None, "apt-get"),
        ("apt-get", "nodistro main https://other.example/", "no source for Debian bookworm"),
        ("chroot", "slurm-wlm 25.05.1", "has Slurm 25.05 now, not 24.11"),
    ],
)
def test_what_is_missing_is_named_and_nothing_half_made_is_kept(
    commands: dict[str, str], missing: str, answer: str | None, words: str
) -> None:
    del commands[missing]
    if answer is not None:
        commands[missing] = answer
    with pytest.raises(LabUnavailable, match=f"(?s){words}"):
        settings.ensure_release("24.11")
    assert not (settings.FOLDER / "24.11").exists()


def test_two_labs_that_need_the_same_release_fetch_it_once(commands: dict[str, str]) -> None:
    settings.FOLDER.mkdir()
    with (settings.FOLDER / "24.11.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=settings.ensure_release, args=("24.11",))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
        (settings.FOLDER / "24.11").mkdir()  # by the other one
    waiting.join(10)
    assert "fetched" not in commands


def test_a_root_of_its_own_has_the_mark_the_releases_programs_and_the_hosts_users(tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    mounts = mounts_of("n1", LabPaths(FOLDER), [], tmp_path)
    assert mounts[0] == Mount("tmpfs", mark_source(FOLDER, "n1"), "/")
    by_target = {mount.target: mount for mount in mounts}
    assert (by_target["/usr"].kind, by_target["/usr"].source) == ("bind", str(tmp_path / "usr"))
    assert (by_target["/bin"].kind, by_target["/bin"].source) == ("link", "usr/bin")
    assert by_target["/etc/passwd"].source == "/etc/passwd"
    assert list(by_target).index("/etc") < list(by_target).index("/etc/hosts"), "a later one must not cover it"
    assert mounts[: len(root_mounts(tmp_path, "x"))][1:] == list(root_mounts(tmp_path, "x"))[1:]


def test_in_a_root_of_its_own_everything_of_the_host_is_brought_in(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    mounts = paths_to_expose([tmp_path / "open"], covered=(Path("/"),))
    assert [(mount.kind, mount.target) for mount in mounts] == [("bind", str(tmp_path / "open"))]
