"""Other releases of Slurm than the one that is installed: file trees of the Debian releases that ship them.

A tree is made once with debootstrap, from the mirror that apt uses here, and kept for all labs of this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from slurmft.errors import LabError, LabUnavailable, UsageError
from slurmft.lab.packages import install, require_root
from slurmft.lab.processes import CLEAN_ENVIRONMENT, SEARCH_PATH, make_folder, run

RELEASES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
"""Slurm's release, and the name of the Debian release that has it."""

FOLDER = Path("/var/lib/slurmft-lab-releases")
PACKAGES = (
    "munge", "slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "mariadb-server", "iproute2",
    "procps", "python3", "e2fsprogs",
)  # fmt: skip
"""``python3`` for the libraries that our own interpreter, which is brought in from the host, finds in every Debian."""

SCRIPTS = Path("/usr/share/debootstrap/scripts")
NEWER_SCRIPT = "sid"
"""Debian's development script, for a release that is newer than the installed debootstrap."""

LIMIT_S = 1800.0
LOCK_S = 1800.0

log = logging.getLogger(__name__)


def release_of(version: str) -> str:
    """``24.11`` of ``24.11.5``; empty for no version, and for the one that this machine has installed.

    Raises:
        UsageError: no Debian release has it.
    """
    if not version:
        return ""
    match = re.fullmatch(r"(\d\d\.\d\d)(?:\.\d+)?", version)
    if match is None or match[1] not in RELEASES:
        raise _unknown(version)
    return "" if match[1] == installed() else match[1]


def _unknown(version: str) -> UsageError:
    known = ", ".join(RELEASES)
    return UsageError(f"there is no release {version!r} of Slurm to build a lab of", hint=f"Debian has {known}")


def installed() -> str:
    """The release of Slurm that this machine has installed; empty where it has none."""
    try:
        return _release_in(run(["slurmctld", "-V"], doing="asking slurmctld for its version"))
    except LabError:
        return ""


def ensure_release(release: str) -> Path | None:
    """The file tree of a release, made when it is missing; None for the machine's own.

    Raises:
        UsageError: there is no such release.
        LabUnavailable: no root, debootstrap cannot be installed, no mirror, or it has another release.
        LabError: another command has been making it for half an hour.
    """
    if not release:
        return None
    if release not in RELEASES:
        raise _unknown(release)
    tree = FOLDER / release
    if tree.is_dir():
        return tree
    require_root()
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    make_folder(FOLDER)
    with _locked(FOLDER / f"{release}.lock"):
        if not tree.is_dir():
            _make(release, tree)
    return tree


def mirror() -> str:
    """The address that apt takes this machine's own Debian from.

    Raises:
        LabUnavailable: apt is missing, or names none.
    """
    mine = codename()
    words = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)", "Identifier: Packages"]
    try:
        rows = [line.split() for line in run(words, doing="asking apt for its mirror").splitlines()]
    except LabError as error:
        raise LabUnavailable(error.what, hint="another release of Slurm comes from a mirror of Debian") from error
    found = [row[2] for row in rows if len(row) == 3 and row[:2] == [mine, "main"]]
    if not found:
        raise LabUnavailable(
            f"apt has no source for Debian {mine}, from which another release of Slurm could come",
            hint="see /etc/apt/sources.list and /etc/apt/sources.list.d",
        )
    return found[0]


def _make(release: str, tree: Path) -> None:
    if shutil.which("debootstrap", path=SEARCH_PATH) is None:
        log.info("installing debootstrap, which fetches Slurm %s", release)
        install(("debootstrap",))
    suite, source = RELEASES[release], mirror()
    began = time.monotonic()
    log.info("fetching Slurm %s with Debian's %s from %s into %s: about a minute, once", release, suite, source, tree)
    making = tree.with_name(f".making-{release}")
    shutil.rmtree(making, ignore_errors=True)
    script = SCRIPTS / (suite if (SCRIPTS / suite).exists() else NEWER_SCRIPT)
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, str(making), source]
    try:
        run([*argv, str(script)], doing=f"fetching Slurm {release}", timeout_s=LIMIT_S,
            environment={**CLEAN_ENVIRONMENT, "DEBIAN_FRONTEND": "noninteractive"})  # fmt: skip
        found = _release_in(run(["chroot", str(making), "slurmctld", "-V"], doing=f"trying Slurm {release}"))
        if found != release:
            raise LabError(f"Debian's {suite} has Slurm {found} now, not {release}")
        make_folder(making)
        making.rename(tree)
    except LabError as error:
        hint = f"{making}/debootstrap/debootstrap.log says more; does {source} answer?"
        raise LabUnavailable(error.what[-2000:], hint=hint) from error
    log.info("Slurm %s is there after %.0f s", release, time.monotonic() - began)


def _release_in(text: str) -> str:
    match = re.search(r"\b(\d\d\.\d\d)\.\d+", text)
    return match[1] if match else ""


def codename() -> str:
    """This Debian's name; empty where it has none."""
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r'^VERSION_CODENAME="?(\w+)', text, re.MULTILINE)
    return match[1] if match else ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline, told = time.monotonic() + LOCK_S, False
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(f"another lab command has held {path} for {LOCK_S:g} s") from None
                if not told:
                    told = True
                    log.info("another lab command is fetching it: waiting for %s", path)
                time.sleep(0.2)
        yield
