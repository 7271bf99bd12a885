"""Running commands, and finding and ending the lab's own processes.

A process belongs to the lab when its mount namespace carries the lab's mark: a tmpfs whose source names the lab's
folder and the member. The kernel keeps it, so it survives any crash of ours, and nothing else can be mistaken for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurmft.errors import LabError

MARK = "slurmft-lab"
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Daemons live in sbin folders, which an ordinary PATH lacks."""

UMASK = 0o022
"""Of every daemon: the caller's must not decide whether jobs can read what Slurm writes for them."""

CLEAN_ENVIRONMENT = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8"}


def mark_source(folder: Path, member: str) -> str:
    """The tmpfs source that marks ``member`` of the lab in ``folder``."""
    return f"{MARK}:{folder}:{member}"


def member_of(mountinfo: str, folder: Path) -> str | None:
    """Which member of the lab in ``folder`` a ``/proc/PID/mountinfo`` text belongs to, or None."""
    prefix = mark_source(folder, "")
    for line in mountinfo.splitlines():
        fields = line.partition(" - ")[2].split()
        if len(fields) >= 2 and fields[0] == "tmpfs" and fields[1].startswith(prefix):
            return fields[1].removeprefix(prefix)
    return None


def member_of_process(pid: int, folder: Path) -> str | None:
    """The member a process lives in; None for strangers, zombies and processes that are gone."""
    try:
        return member_of(Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8", errors="replace"), folder)
    except OSError:
        return None


def lab_processes(folder: Path) -> dict[int, str]:
    """Every living process of the lab in ``folder`` with its member, however it was started."""
    known: dict[str, str | None] = {}
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            namespace = str((entry / "ns/mnt").readlink())
        except OSError:
            continue
        if known.get(namespace) is None and (namespace not in known):
            known[namespace] = member_of_process(int(entry.name), folder)
        if (member := known[namespace]) is not None:
            found[int(entry.name)] = member
    return found


def kill_processes(folder: Path, *, member: str | None = None, within_s: float = 15) -> None:
    """SIGKILL every process of the lab, or of one member, and return when none is left.

    Raises:
        LabError: some process outlived the deadline (it hangs in the kernel).
    """
    deadline = time.monotonic() + within_s
    while pids := [pid for pid, owner in lab_processes(folder).items() if member in (None, owner)]:
        if time.monotonic() > deadline:
            raise LabError(f"processes {pids} of the lab survive SIGKILL", hint="look at /proc/PID/stack and dmesg")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def run(
    argv: Sequence[str],
    *,
    doing: str,
    timeout_s: float = 60,
    stdin: str = "",
    environment: Mapping[str, str] = CLEAN_ENVIRONMENT,
) -> str:
    """Run a command of the lab's own machinery and return its stdout. The caller's environment is not passed on.

    Raises:
        LabError: it failed, took too long or does not exist; says what was being done and what it printed.
    """
    try:
        result = subprocess.run(
            list(argv),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=environment,
            umask=UMASK,
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{doing}: no answer within {timeout_s:g} s") from error
    except OSError as error:
        raise LabError(f"{doing}: {error}") from error
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip()
        raise LabError(f"{doing}: {argv[0]} ended with {result.returncode}: {said}")
    return result.stdout


def make_folder(path: Path, mode: int = 0o755) -> None:
    """A folder with exactly this mode, independent of the caller's umask; one that exists gets the mode too."""
    path.mkdir(exist_ok=True)
    path.chmod(mode)


def wait_until(condition: Callable[[], bool], *, doing: str, within_s: float, every_s: float = 0.05) -> None:
    """Poll until ``condition`` holds.

    Raises:
        LabError: it still did not hold after ``within_s`` seconds.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"{doing}: not within {within_s:g} s")
        time.sleep(every_s)
