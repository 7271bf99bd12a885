"""Root's rescue of other users' runs: for each owner a process with that owner's rights and nothing of root's.

All files in a run folder may have been forged by the folder's owner, so root reads none of them: it lists names and
owners, and the owner's process does the rest. The output of that process is the owner's text: it is bounded, and shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pwd
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from slurmft.storage.ownership import user_name
from slurmft.system import opening

AT_ONCE = 8
"""Owners' processes at one time; one that hangs does not block the others."""

OWNER_LIMIT_S = 100
"""A rescue waits up to 60 s for a requeued job, and as long for sbatch."""

OUTPUT_LIMIT_BYTES = 64 * 1024
MAX_LINES, MAX_LINE = 50, 300
DRAIN_S = 0.2
ROTATION_S = 300

log = logging.getLogger(__name__)

_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SLURM_CONF", "SLURM_CLUSTERS")
"""Variables of root's environment that an owner's process gets; sbatch would pass all of it on to the job."""

_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1

_NO_LOGIN = frozenset({"nologin", "false", "sync", "shutdown", "halt"})


@dataclass(kw_only=True, slots=True)
class Rescued:
    """The results of a rescue."""

    done: list[str] = field(default_factory=list)
    """In words."""

    problems: list[str] = field(default_factory=list)
    """Runs that could not be rescued, in words."""

    left_alone: str = ""
    """Which runs of other users were not touched, and why, in one line; empty where there are none."""


def rescue_on_behalf(owners: Mapping[int, Sequence[str]], root: Path, *, limit_s: float, only: Path | None = None
                     ) -> Rescued:  # fmt: skip
    """Have the runs below ``root`` rescued by their ``owners`` (user id to names), or the run ``only`` by its owner.

    Each owner's process ends after OWNER_LIMIT_S, and no new one begins after ``limit_s`` seconds; owners that were not
    reached are named, and another owner is first the next time. Call as root.
    """
    deadline, found = time.monotonic() + limit_s, Rescued()
    accounts = {owner: account for owner in sorted(owners) if (account := _account(owner)) is not None}
    found.left_alone = left_alone({owner: names for owner, names in owners.items() if owner not in accounts},
                                  "no account that can log in")  # fmt: skip
    first = int(time.time() / ROTATION_S) % max(1, len(accounts))
    in_turn = [*list(accounts.values())[first:], *list(accounts.values())[:first]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for told in pool.map(lambda account: _as_owner(account, root, only, deadline), in_turn):
            found.done += told.done
            found.problems += told.problems
    return found


def left_alone(names: Mapping[int, Sequence[str]], why: str) -> str:
    """One line that counts these folders and names some of them; empty where there are none."""
    count, shown = sum(map(len, names.values())), []
    for owner in sorted(names)[:3]:
        some = ", ".join(sorted(names[owner])[:3]) + ", ..." * (len(names[owner]) > 3)
        shown.append(f"{user_name(owner)}: {some}")
    more = "; ..." * (len(names) > 3)
    return f"left alone: {count} folders of other users ({why}): {'; '.join(shown)}{more}" if count else ""


def _account(owner: int) -> pwd.struct_passwd | None:
    """The account to act as; None for root, and for accounts without a login shell."""
    try:
        account = pwd.getpwuid(owner)
    except KeyError:
        return None
    return None if owner == 0 or Path(account.pw_shell).name in _NO_LOGIN else account


def _as_owner(account: pwd.struct_passwd, root: Path, only: Path | None, deadline: float) -> Rescued:
    if time.monotonic() > deadline:
        return Rescued(problems=[f"runs of {account.pw_name} were not looked at: there was no time left"])
    _leave_session_of_root(account.pw_uid)
    # isolated: neither root's PYTHONPATH nor the owner's own packages
    argv = [sys.executable, "-I", "-m", "slurmft", "requeue", "--rescue", "--as-owner", *([str(only)] if only else [])]
    try:
        process = subprocess.Popen(
            argv, user=account.pw_uid, group=account.pw_gid,
            extra_groups=os.getgrouplist(account.pw_name, account.pw_gid), umask=0o077, cwd="/",
            env=_environment(account, root), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        why = f"{error.strerror or error}; can they read {sys.prefix}?"
        return Rescued(problems=[f"no process as {account.pw_name}: {why}"])
    out, err, code = _until_ended(process, [stream for stream in (process.stdout, process.stderr) if stream])
    warnings = _lines(account, err)
    if code != 0:
        return Rescued(done=_lines(account, out), problems=[f"{account.pw_name}: {_ending(code)}", *warnings])
    for line in warnings:  # such as a damaged run, which its owner sees in status: no business of root's
        log.debug("%r", line)
    return Rescued(done=_lines(account, out))


def _leave_session_of_root(owner: int) -> None:
    """For this thread and what it starts: an empty session keyring, without root's tickets, and the owner's audit id.
    Both are a thread's own, and a child has them from its first moment."""
    if (number := _KEYCTL.get(os.uname().machine)) is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, _JOIN_SESSION_KEYRING, None)
    with contextlib.suppress(OSError):  # a kernel without audit, or one in which it cannot be changed
        opening.write_bytes("/proc/thread-self/loginuid", str(owner).encode())


def _environment(account: pwd.struct_passwd, root: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return kept | {
        "HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name,
        "SHELL": account.pw_shell or "/bin/sh", "SLURMFT_RUNS": str(root.absolute()),
    }  # fmt: skip


def _until_ended(process: subprocess.Popen[bytes], streams: Sequence[IO[bytes]]) -> tuple[bytes, bytes, int | None]:
    """Its output, within limits, and its exit code; it is killed when it exceeds one of them (None)."""
    deadline, said = time.monotonic() + OWNER_LIMIT_S, [bytearray() for _ in streams]
    with selectors.DefaultSelector() as waiting:
        for number, stream in enumerate(streams):
            os.set_blocking(stream.fileno(), False)
            waiting.register(stream, selectors.EVENT_READ, number)
        while waiting.get_map() and (left_s := deadline - time.monotonic()) > 0:
            ready = waiting.select(min(DRAIN_S, left_s))
            if not ready and process.poll() is not None:
                break  # a process that it left behind holds its pipes
            for key, _ in ready:
                if not (part := os.read(key.fd, OUTPUT_LIMIT_BYTES)):
                    waiting.unregister(key.fileobj)
                said[key.data] += part
            if max(map(len, said)) > OUTPUT_LIMIT_BYTES:
                break
    code = _ended(process, 1.0 if time.monotonic() < deadline else 0.0)
    for stream in streams:
        stream.close()
    return bytes(said[0]), bytes(said[-1]), code


def _ended(process: subprocess.Popen[bytes], within_s: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(within_s)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # in uninterruptible sleep it stays behind
        process.wait(1.0)
    return None


def _ending(code: int | None) -> str:
    return "ended after its limit of time or output" if code is None else f"ended with exit code {code}"


def _lines(account: pwd.struct_passwd, text: bytes) -> list[str]:
    lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    cut = [f"{account.pw_name}: {line[:MAX_LINE]}" for line in lines[:MAX_LINES]]
    return cut + [f"{account.pw_name}: {len(lines) - MAX_LINES} more lines"] * (len(lines) > MAX_LINES)
