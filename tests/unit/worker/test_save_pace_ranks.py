"""Two real ranks whose clocks and speeds differ: they save by seconds, before the same steps."""

from pathlib import Path

from ranks import reports_of_ranks
from worker_variable import worker_variable

SCRIPT = """
import json, sys, time
from pathlib import Path
from slurmft import start_session

out, rank = Path(sys.argv[1]), int(sys.argv[2])
now = time.monotonic_ns
time.monotonic_ns = lambda: now() + rank * 10**15  # another node's clock
saved, began = [], time.monotonic()
with start_session(backend="gloo") as session:
    for step in session.steps(start=5, until=205, save=lambda step: saved.append([step, time.monotonic() - began])):
        time.sleep(0.004 + 0.006 * rank)
(out / f"report-{rank}.json").write_text(json.dumps(saved))
"""


def test_they_save_before_the_same_steps(tmp_path: Path):
    pace = worker_variable(checkpoint={"interval": "seconds", "interval_seconds": 0.4})
    reports = reports_of_ranks(SCRIPT, tmp_path, meet=True, **pace)
    steps, others = ([step for step, _ in report] for report in reports)
    assert steps == others
    assert steps[-1] == 205
    assert 3 <= len(steps) <= 12  # 200 steps of 10 ms and more are 2 s and more
