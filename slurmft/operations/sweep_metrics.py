"""A sweep's results for monitoring: a file for the textfile collector, and a heartbeat for a dead-man switch."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from slurmft.errors import UsageError
from slurmft.operations.sweep import SweepReport
from slurmft.policy.nodes.node_health import Condition
from slurmft.policy.nodes.suspicion import State
from slurmft.system.files import replace_atomically
from slurmft.system.opening import read_text

HEARTBEAT_S = 10.0
MAX_URL_BYTES = 4096

log = logging.getLogger(__name__)


def metrics_text(report: SweepReport) -> str:
    """The report in the text format of Prometheus, without timestamps. Unknown values are left out."""
    return "".join(
        f"# HELP {name} {about}\n# TYPE {name} gauge\n"
        + "".join(f"{name}{labels} {value:g}\n" for labels, value in values)
        for name, about, values in _metrics(report)
    )


def _metrics(report: SweepReport) -> Iterator[tuple[str, str, list[tuple[str, float]]]]:
    yield "slurmft_sweep_slurm_up", "Whether Slurm answered the last sweep.", [("", float(report.saw_cluster))]
    yield "slurmft_sweep_duration_seconds", "Time of the last sweep.", [("", round(report.took_s, 3))]
    if (plan := report.plan) is None:
        return
    yield "slurmft_sweep_nodes", "Nodes that Slurm names.", [("", report.nodes)]
    by_condition = [(f'{{condition="{each}"}}', float(len(plan.assessment.of(each)))) for each in Condition]
    yield "slurmft_sweep_nodes_checked", "Nodes with results, by what they come to.", by_condition
    by_state = [
        (f'{{state="{each}"}}', float(sum(held.state is each for held in plan.standings.values())))
        for each in (State.EXCLUDED, State.PROBATION)
    ]
    yield "slurmft_sweep_nodes_held", "Nodes on the exclusion list before the last sweep.", by_state
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
        yield f"slurmft_sweep_{name}", about, [("", float(value))]


def write_metrics(path: Path, report: SweepReport) -> None:
    """Replace the file, readable by all: the collector is another user.

    Raises:
        OSError: the old one is untouched.
    """
    replace_atomically(path, metrics_text(report), mode=0o644, durable=False)


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
