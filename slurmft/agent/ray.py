"""``launcher: ray``: one node of a Ray cluster under each agent, and the command once, on the first of them.

    agent ── zygote ── holder ─┬─ sweeper, in a session of its own: ends what a killed holder leaves behind
                               ├─ ray start --block, with everything of Ray's on this node
                               └─ the command, on the head only; it finds the cluster in RAY_ADDRESS

To the agent the holder is the worker. The head's ends as the command does, others when Ray ends on their node. All
ports are free ones. What a node of Ray obeys, it obeys for a token of this attempt only, and its files lie in a private
folder that goes with it. SIGTERM drains the node: Ray Train tells its workers (``ray.train.get_preemption_info``).
A Ray that does not start is the run's trouble and not the node's: the holder exits with 1 and leaves Ray's words.

    python -m slurmft.agent.ray --hold SECONDS COMMAND...     the holder; SECONDS are those of a stop
    python -m slurmft.agent.ray --drain SECONDS ADDRESS NAME  drains the node of that name
    python -m slurmft.agent.ray --sweep SESSION FOLDER        the sweeper; waits for the end of its input
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import importlib.metadata
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from slurmft.agent.torchrun import leave_as, runnable, start_child
from slurmft.ipc.pages import PAGE_VARIABLE, TIMING_PAGE_VARIABLE
from slurmft.policy.verdict import Cause
from slurmft.policy.worker_settings import WORKER_VARIABLE
from slurmft.storage.checkpoint_names import MEMORY_VARIABLE
from slurmft.storage.verdicts import EVIDENCE_VARIABLE, VERDICT_VARIABLE, WorkerVerdict, write_verdict
from slurmft.system import files
from slurmft.system.files import PrivateFolder, make_private_folder, replace_atomically
from slurmft.system.processes import MARK_VARIABLE, session_members

LOWEST = (2, 60)
"""Version of Ray. Before 2.52 it takes no token: every user who reaches its ports could run code in the cluster."""

LOOK_S = 0.1
HEAD_S = 300.0
"""How long a node waits for the head, and for its own Ray: all of it may have to come from a shared filesystem."""

WORDS_BYTES, LOG_BYTES = 4000, 1500
"""Of the end of what ``ray start`` has said when it failed, and of each of Ray's own logs."""

LOGS = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err")

SWEEP_S = 10.0
LONGEST_TEMPORARY = 24
"""Characters of a folder in which Ray's sockets still have names that fit: the kernel allows 107."""

NOT_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
              "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", PAGE_VARIABLE, TIMING_PAGE_VARIABLE,
              MEMORY_VARIABLE, WORKER_VARIABLE, VERDICT_VARIABLE, EVIDENCE_VARIABLE, "SLURM_PROCID", "SLURM_LOCALID",
              "SLURM_STEP_NUM_TASKS")  # fmt: skip
"""Variables of a rank, which neither the command nor any worker of Ray's is."""


def token_of(secret: bytes, attempt: str) -> str:
    """The token of an attempt's Ray cluster: every agent knows the run's secret, and other users do not."""
    return hmac.new(secret, f"ray {attempt}".encode(), hashlib.sha256).hexdigest()


def leave_token(folder: Path, secret: bytes, attempt: str) -> None:
    """Leave the token in the agent's private folder, where the holder of this attempt looks for it."""
    replace_atomically(folder / f"ray-token-{attempt}", token_of(secret, attempt))


def rays_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of Ray and of the command: not that of a rank, and with the token of this attempt."""
    kept = {name: value for name, value in given.items()
            if name not in NOT_A_RANK and not name.startswith("TORCHELASTIC_")}  # fmt: skip
    kept.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else every node reports to Ray's makers
    kept.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")  # Ray's own 5 s are a good part of a short grace
    kept.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 loses to every other process of a shared node
    for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_NAMESPACE"):  # of another cluster of this user's
        kept.pop(name, None)
    token = Path(given[PAGE_VARIABLE]).parent / f"ray-token-{given['SLURMFT_ATTEMPT']}"
    return {**kept, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


_WITHOUT_CLIENT_SERVER = """
from ray.scripts import scripts
scripts.get_ray_client_dependency_error = lambda: "switched off"
scripts.main()
"""
"""Ray's command line, without the server of Ray Client, for which Ray has no option where grpcio is there."""


def start_argv(given: Mapping[str, str], address: str, folder: Path) -> list[str]:
    """The ``ray start`` of one node; ``address`` is the head's."""
    host, _, port = address.rpartition(":")
    cpus = given.get("SLURM_CPUS_PER_TASK") or given.get("SLURM_CPUS_ON_NODE") or str(len(os.sched_getaffinity(0)))
    options = {
        "--node-name": name_of(given), "--temp-dir": str(folder), "--num-cpus": cpus, "--min-worker-port": "0",
        "--max-worker-port": "0", "--dashboard-agent-listen-port": "0",
    }  # fmt: skip
    if given["RANK"] == "0":
        options |= {"--node-ip-address": host.strip("[]"), "--port": port, "--include-dashboard": "false"}
        words = ["--head", "--no-monitor"]  # an autoscaler, which has nothing to start nodes with
    else:
        words = [f"--address={address}"]
    return [sys.executable, "-P", "-c", _WITHOUT_CLIENT_SERVER, "start", "--block", *words,
            *(f"{name}={value}" for name, value in options.items())]  # fmt: skip


def name_of(given: Mapping[str, str]) -> str:
    """The name of this node within Ray."""
    return f"slurmft-{given['RANK']}"


def head_address(host: str, port: str) -> str:
    """The head's address in numbers: Ray compares addresses as text.

    Raises:
        OSError: the host has no address.
    """
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)]
    found.sort(key=lambda each: (each.startswith("127.") or each == "::1", ":" in each))
    if found[0].startswith("127."):  # 127.0.1.1 on some; Ray knows only this one as the node itself
        return f"127.0.0.1:{port}"
    return f"{found[0]}:{port}" if ":" not in found[0] else f"[{found[0]}]:{port}"


def why_not(version: str | None) -> str:
    """Why no cluster is made of this version of Ray, or of none; empty where one is."""
    if version is None:
        return "launcher: ray needs Ray, which is not installed on this node"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < LOWEST:
        lowest = ".".join(map(str, LOWEST))
        return f"launcher: ray needs Ray {lowest} or newer, and this node has {version}"
    return ""


def _installed() -> str | None:
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def hold(command: Sequence[str], promised_s: str, given: Mapping[str, str]) -> int:
    """Stand for a node of Ray towards the agent; returns its exit code, negative for a signal."""
    if why := why_not(_installed()):
        sys.stderr.write(f"slurmft: {why}\n  hint: pip install 'ray[train]'\n")
        return 2
    terms: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: terms.append(number))
    private = make_private_folder(_temporary())
    with _sweeper(private):
        return _hold(command, promised_s, given, private, terms)


def _hold(
    command: Sequence[str], promised_s: str, given: Mapping[str, str], private: PrivateFolder, terms: Sequence[int]
) -> int:
    environment, is_head = rays_environment(given), given["RANK"] == "0"
    address = head_address(given["MASTER_ADDR"], given["MASTER_PORT"])
    if not is_head and not _answers(address, terms):
        if terms:
            return -signal.SIGTERM
        sys.stderr.write(f"slurmft: Ray's head at {address} did not answer within {HEAD_S:.0f} s\n")
        return 1
    folder = private.path / "r"  # Ray opens its folder to every user; the one around it stays closed
    said_before, until_s = _size_of_log(), time.monotonic() + HEAD_S
    ray = start_child(start_argv(given, address, folder), environment, signal.SIGKILL)
    driver = drain = None
    started, is_up = folder / "ray_current_cluster", False  # the last that ``ray start`` writes
    while True:
        time.sleep(LOOK_S)
        if driver is not None and (code := driver.poll()) is not None:
            return code
        is_up, code = is_up or started.exists(), ray.poll()
        if not is_up and terms:
            return -signal.SIGTERM  # nothing runs here that could save
        if not is_up and ((code is not None and code >= 0) or time.monotonic() > until_s):
            why = f"it exited with {code}" if code is not None else f"it was not up within {HEAD_S:.0f} s"
            return _not_started(why, _said(said_before), folder, given)
        if code is not None:
            sys.stderr.write(f"slurmft: Ray has ended on this node, with {code}\n")
            return -signal.SIGKILL  # its own code says less: killed from outside, as a rule
        if terms and drain is None:
            argv = [sys.executable, "-P", "-m", "slurmft.agent.ray", "--drain", promised_s, address, name_of(given)]
            drain = start_child(argv, environment, signal.SIGKILL)
        if is_head and driver is None and is_up:
            driver = start_child(runnable(command, given), {**environment, "RAY_ADDRESS": address}, signal.SIGKILL)


def _not_started(why: str, said: str, folder: Path, given: Mapping[str, str]) -> int:
    """Say that Ray did not start here, and Ray's reason; the exit code, which accuses no node.

    Only the head leaves a verdict: Ray is started again on other nodes, and the run may end well.
    """
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    text, logs = f"Ray did not start: {why}{f': {last[:500]}' if last else ''}", _logs(folder)
    sys.stderr.write(f"{logs}slurmft: {text}\n")
    if given["RANK"] == "0" and (path := given.get(VERDICT_VARIABLE)):
        with contextlib.suppress(OSError):
            write_verdict(Path(path), WorkerVerdict(cause=Cause.WORKER_ERROR, message=text, traceback=logs + said))
    return 1


def _said(before: int) -> str:
    """What ``ray start`` has written to the log of this rank, which had ``before`` bytes then; its end."""
    with contextlib.suppress(OSError):
        start = max(before, _size_of_log() - WORDS_BYTES)
        return files.read_part("/proc/self/fd/2", start, WORDS_BYTES).decode(errors="replace")
    return ""


def _logs(folder: Path) -> str:
    """The ends of Ray's own logs, which are removed with its folder."""
    found = ""
    for name in LOGS:
        with contextlib.suppress(OSError):
            path = folder / "session_latest" / "logs" / name
            if text := files.read_part(path, -LOG_BYTES, LOG_BYTES).decode(errors="replace").strip():
                found += f"the end of Ray's {name}:\n{text}\n"
    return found


def _size_of_log() -> int:
    """Bytes of the rank's log; 0 where that is no file."""
    status = os.fstat(2)
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def drain(promised_s: str, address: str, name: str) -> int:
    """Announce that this node is going to end: what ``ray drain-node`` does, which knows nodes by their ids only."""
    messages = importlib.import_module("ray.core.generated.autoscaler_pb2")
    reason = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = round((time.time() + float(promised_s)) * 1000)
    client = importlib.import_module("ray._raylet").GcsClient(address=address)
    for key, node in client.get_all_node_info().items():
        if node.node_name == name:
            accepted, why = client.drain_node(key.hex(), reason, "slurmft stops this node", deadline_ms)
            if not accepted:
                sys.stderr.write(f"slurmft: Ray does not drain {name}: {why}\n")
            return 0 if accepted else 1
    return 1


def sweep(session: str, folder: str) -> int:
    """Wait for the holder's end, then end every process of its session and remove its folder."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    until_s = time.monotonic() + SWEEP_S
    # Ray gives its workers process groups of their own, but leaves them in the session
    while (left := session_members(int(session)) - {int(session)}) and time.monotonic() < until_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)  # unpacked packages may lie deep
    return 0


@contextlib.contextmanager
def _sweeper(private: PrivateFolder) -> Iterator[None]:
    argv = [sys.executable, "-P", "-m", "slurmft.agent.ray", "--sweep", str(os.getpid()), str(private.path)]
    sweeper = subprocess.Popen(
        argv, env=os.environ | {MARK_VARIABLE: ""}, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        if sweeper.stdin is not None:
            sweeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            sweeper.wait(2 * SWEEP_S)


def _temporary() -> Path:
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= LONGEST_TEMPORARY else "/tmp")  # noqa: S108 - a private folder is made in it


def _answers(address: str, terms: Sequence[int]) -> bool:
    host, _, port = address.rpartition(":")
    until_s = time.monotonic() + HEAD_S
    while time.monotonic() < until_s and not terms:
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
            return True
        time.sleep(LOOK_S)
    return False


def main(argv: Sequence[str]) -> NoReturn:
    if argv[:1] == ["--drain"]:
        sys.exit(drain(*argv[1:4]))
    if argv[:1] == ["--sweep"]:
        sys.exit(sweep(*argv[1:3]))
    leave_as(hold(argv[2:], argv[1], os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
