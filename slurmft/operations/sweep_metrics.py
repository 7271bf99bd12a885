"""A sweep's results for monitoring: a file for the textfile collector, and a heartbeat for a dead-man switch."""

from __future__ import annotations

import logging
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from slurmft.errors import UsageError
from slurmft.operations.sweep import SweepReport
from slurmft.policy.nodes.node_health import Condition
from slurmft.policy.nodes.suspicion import State
from slurmft.system.exposition import GAUGE, Family, Sample, text
from slurmft.system.files import replace_atomically
from slurmft.system.opening import read_text

HEARTBEAT_S = 10.0
MAX_LEMONS = 20
"""Nodes that the file names."""

MAX_URL_BYTES = 4096

_HELD = (State.EXCLUDED, State.PROBATION)

log = logging.getLogger(__name__)


def metrics_text(report: SweepReport, *, may_exclude: float = 0.5) -> str:
    """The report in the text format of Prometheus, without timestamps. Unknown values are left out.

    Args:
        may_exclude: the part of the nodes that may be excluded, ``exclusions.max_excluded_fraction``.
    """
    return text(
        Family(name, about, GAUGE, [Sample(labels, value) for labels, value in values])
        for name, about, values in _metrics(report, may_exclude)
    )


def _metrics(report: SweepReport, may_exclude: float) -> Iterator[tuple[str, str, list[tuple[dict[str, str], float]]]]:
    yield "slurmft_sweep_slurm_up", "Whether Slurm answered the last sweep.", [({}, float(report.saw_cluster))]
    yield "slurmft_sweep_timestamp_seconds", "When the last sweep was done.", [({}, round(time.time(), 3))]
    yield "slurmft_sweep_duration_seconds", "Time of the last sweep.", [({}, round(report.took_s, 3))]
    if (plan := report.plan) is None:
        return
    yield "slurmft_sweep_nodes", "Nodes that Slurm names.", [({}, report.nodes)]
    by_condition = [({"condition": str(each)}, float(len(plan.assessment.of(each)))) for each in Condition]
    yield "slurmft_sweep_nodes_checked", "Nodes with results, by what they come to.", by_condition
    states = {state: [node for node, held in plan.standings.items() if held.state is state] for state in _HELD}
    by_state = [({"state": str(state)}, float(len(nodes))) for state, nodes in states.items()]
    yield "slurmft_sweep_nodes_held", "Nodes on the exclusion list before the last sweep.", by_state
    lemons = sorted(states[State.EXCLUDED], key=lambda node: -plan.standings[node].score)[:MAX_LEMONS]
    about = "Nodes that their failures keep excluded, the worst first; not those that were excluded by hand."
    yield (
        "slurmft_sweep_lemon_info", about, [({"node": node}, 1.0) for node in lemons
                                            if not plan.standings[node].by_hand]
    )  # fmt: skip
    if report.nodes and may_exclude:
        used = len(states[State.EXCLUDED]) / (may_exclude * report.nodes)
        about = "Part of the nodes that may be excluded (exclusions.max_excluded_fraction) which are."
        yield "slurmft_sweep_exclusions_used_ratio", about, [({}, round(used, 4))]
    for name, about, value in (
        ("excluded", "Nodes that the last sweep excluded.", len(plan.excluded)),
        ("held_back", "Sick nodes that a safety limit kept.", len(plan.held_back)),
        ("cluster_problems", "Failures that many nodes share.", len(plan.cluster_problems)),
        ("drained", "Nodes that the last sweep drained.", report.drained),
        ("resumed", "Nodes that the last sweep resumed.", report.resumed),
        ("tests", "Jobs that the last sweep submitted to look at nodes.", report.tested),
        ("rescued", "Runs that the last sweep brought back.", report.rescued),
        ("problems", "What the last sweep could not look at or do.", len(report.problems)),
    ):
        yield f"slurmft_sweep_{name}", about, [({}, float(value))]


def write_metrics(path: Path, report: SweepReport, *, may_exclude: float) -> None:
    """Replace the file, readable by all: the collector is another user.

    Raises:
        OSError: the old one is untouched.
    """
    replace_atomically(path, metrics_text(report, may_exclude=may_exclude), mode=0o644, durable=False)


def heartbeat_url(path: Path) -> str:
    """The URL in a file; it is a secret, so it is not given on the command line.

    Raises:
        UsageError: there is none in it.
    """
    try:
        url = read_text(path, limit_bytes=MAX_URL_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not url.startswith(("https://", "http://")) or any(sign.isspace() for sign in url):
        raise UsageError(f"{path} does not hold one URL", hint="one line that begins with https://")
    return url


def send_heartbeat(url: str) -> str:
    """Tell a dead-man switch that a sweep saw the cluster; returns what went wrong, or nothing."""
    try:
        with urllib.request.urlopen(url, timeout=HEARTBEAT_S) as answer:  # noqa: S310 - its scheme was looked at
            answer.read(1024)
    except (OSError, ValueError, HTTPException) as error:  # OSError: URLError, HTTPError and timeouts
        return f"the heartbeat was not taken: {getattr(error, 'reason', None) or error}"
    return ""
