"""Executables of the site as probes: Nagios's exit codes and performance data, with any output."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import subprocess
import time

from slurmft.config.health import UserProbe
from slurmft.health.judging import bad, unknown
from slurmft.health.node_view import Scene
from slurmft.policy.nodes.node_health import ProbeResult, Problem, Status

MAX_OUTPUT_BYTES = 64 * 1024
MAX_DETAIL = 500
POLL_S, GONE_S = 0.01, 0.2
_PERFDATA = re.compile(r"\s*(?:'(?:[^']|'')*'|[^\s='|]+)=(-?\d{1,15}(?:\.\d{1,15})?)([A-Za-z%]{0,8})(?:;\S*)?(?=\s|$)")


def user_probe(scene: Scene, name: str, probe: UserProbe) -> ProbeResult:
    """Run it, and believe its exit code.

    It is in a group of processes of its own, which is ended with it; it has no input, and the environment that we have,
    with ``SLURMFT_HEALTH_CONTEXT`` and ``SLURMFT_HEALTH_LEVEL``.
    """
    limit = scene.stretched(probe.timeout_s)
    environment = {**scene.environment, "SLURMFT_HEALTH_CONTEXT": scene.context,
                   "SLURMFT_HEALTH_LEVEL": str(scene.level)}  # fmt: skip
    try:
        process = subprocess.Popen(
            list(probe.command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return unknown(name, f"{probe.command[0]}: {reason}", remedy="look at user_probes in the configuration")
    output = _output_of(process, time.monotonic() + limit)
    if process.poll() is None:
        _end(process)
        return unknown(name, f"no answer within {limit:.1f} s", remedy="raise timeout_s, or make it faster")
    _end(process)
    return result_of_output(name, process.returncode, output, probe)


def result_of_output(name: str, code: int, output: bytes, probe: UserProbe) -> ProbeResult:
    """The result that exit code and output stand for. Any other code than 0 to 3 is UNKNOWN: a probe that was killed or
    not found says nothing of the node."""
    lines = output.decode(errors="replace").replace("\0", " ").splitlines() or [""]
    words, bar, perfdata = lines[0].partition("|")
    detail = " ".join(words.split())[:MAX_DETAIL]
    if code not in (0, 1, 2, 3):
        how = f"it was ended by signal {-code}" if code < 0 else f"it ended with {code}, which Nagios does not know"
        return unknown(name, f"{how}: {detail}".rstrip(": "), remedy="run it by hand")
    number, unit = first_number(perfdata) if bar else (None, "")
    return bad(
        name, Status(code), detail or "it said nothing", remedy=probe.remedy or "run it by hand",
        problem=Problem.HARDWARE if probe.is_hardware else Problem.NODE, value=number, unit=unit,
        evidence=[" ".join(line.split())[:MAX_DETAIL] for line in lines[:20]] if code else (),
    )  # fmt: skip


def first_number(perfdata: str) -> tuple[float | None, str]:
    """Value and unit of the first entry of Nagios's performance data (``'label'=value[unit];warn;crit;min;max``)."""
    match = _PERFDATA.match(perfdata)
    if match is None:
        return None, ""
    value = float(match[1])
    return (value, match[2]) if math.isfinite(value) else (None, "")


def _output_of(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """The beginning of its output until it ends or is too late. Not until the end of the stream, which a background
    process of it may hold open."""
    assert process.stdout is not None
    kept, descriptor = bytearray(), process.stdout.fileno()
    ended = False
    while time.monotonic() < deadline:
        ready = select.select([descriptor], [], [], 0 if ended else POLL_S)[0]
        piece = os.read(descriptor, 1 << 16) if ready else b""
        kept += piece[: MAX_OUTPUT_BYTES - len(kept)]
        if ended and not piece:
            break
        ended = process.poll() is not None
        if ready and not piece:  # it has closed the stream, and may go on
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            break
    return bytes(kept)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and all of its group; one that is stuck in the kernel is left behind."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GONE_S)
    if process.stdout is not None:
        process.stdout.close()
