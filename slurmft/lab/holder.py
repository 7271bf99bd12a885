"""The process that keeps one member of the lab alive: its namespaces end when it ends.

Runs by path (``python -I -S holder.py NAME < PLAN``) as the first process of fresh namespaces, before slurmft can be
imported there: standard library only. It prepares mounts and the host name, reports its process id as the host sees
it, and then only collects the exit statuses of orphans, as PID 1 must.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Any

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC = 32, 4096, 16384
MNT_DETACH = 2


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [word.encode() for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def _make_target(target: Path, *, folder: bool) -> None:
    if target.exists():
        return
    (target if folder else target.parent).mkdir(mode=0o755, parents=True, exist_ok=True)
    if not folder:
        target.touch()


def apply_mounts(mounts: list[dict[str, Any]], root: str = "") -> None:
    """Make every mount of the plan, in order, below ``root``.

    Sources are opened before the first mount: a later one may sit below a folder that an earlier one hides.
    """
    sources = {
        index: os.open(mount["source"], os.O_PATH | os.O_CLOEXEC)
        for index, mount in enumerate(mounts)
        if mount["kind"] == "bind"
    }
    for index, mount in enumerate(mounts):
        target = f"{root}{mount['target']}".rstrip("/")
        if mount["kind"] == "tmpfs":
            _mount(mount["source"], target, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mount['mode']}")
        elif mount["kind"] == "bind":
            _make_target(Path(target), folder=stat.S_ISDIR(os.fstat(sources[index]).st_mode))
            _mount(f"/proc/self/fd/{sources[index]}", target, "none", MS_BIND | MS_REC, "")
            if mount["read_only"]:
                _mount("none", target, "none", MS_REMOUNT | MS_BIND | MS_RDONLY, "")
        else:
            _make(mount["kind"], mount["source"], Path(target))
    for descriptor in sources.values():
        os.close(descriptor)


def _make(kind: str, source: str, target: Path) -> None:
    if kind == "folder":
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
    elif kind == "link":
        target.symlink_to(source)
    else:
        shutil.copytree(source, target, symlinks=True)


def enter_root(root: str) -> None:
    """Make the mount at ``root`` the root of this mount namespace; what was there before is out of reach."""
    os.chdir(root)
    libc = ctypes.CDLL(None, use_errno=True)
    # the old root ends up on top of the new one, and is taken away from there
    if libc.pivot_root(b".", b".") != 0 or libc.umount2(b".", MNT_DETACH) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"making {root} the root: {os.strerror(number)}")
    os.chdir("/")


def prepare(plan: dict[str, Any]) -> int:
    """Make mounts and host name; return this process's id as the host sees it."""
    os.umask(0o022)
    # The old /proc still shows the host's process ids; after the next mounts they cannot be found in here.
    pid_on_host = int(os.readlink("/proc/self"))  # noqa: PTH115
    root = plan["root"]
    apply_mounts(plan["mounts"], root)
    if plan["new_proc"]:
        _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "")
    if root:
        enter_root(root)
    socket.sethostname(plan["hostname"])
    os.chdir("/")
    return pid_on_host


def collect_orphans() -> None:
    """Reap children for ever. Never returns; ends by SIGKILL, and everything in the PID namespace with it."""
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            pass


def main() -> None:
    """Prepare, report, wait. A plan that cannot be carried out ends the process with a message on stderr."""
    plan = json.load(sys.stdin)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    pid_on_host = prepare(plan)
    # There is no reader any more when `lab up` was killed: the broken pipe then ends this process too.
    os.write(plan["report_to"], f"{pid_on_host}\n".encode())
    os.close(plan["report_to"])
    collect_orphans()


if __name__ == "__main__":
    main()
