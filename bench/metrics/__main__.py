"""What metrics of a run with a journal of a million events cost: the first look, each further one, a scrape, a file.

    python bench/metrics --output bench/results/metrics.md     # a minute; no Slurm, no root

The companion of a supervisor does all of this in a process of its own; what the supervisor itself pays is the look at
its ranks, which is measured with 2,000 of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import slurmft
from slurmft.reporting import metrics as reporting_metrics
from slurmft.reporting.metrics import RunMetrics, families
from slurmft.storage import run_folder
from slurmft.storage.run_folder import LiveView, RunFolder

EVENTS, RANKS, REPEATS = 1_000_000, 2000, 20
CYCLE = (
    ("attempt started", {"generation": 1, "cluster": "slurm", "host": "n1", "nodes": "n[1-8]", "folder": "/home/ann"}),
    ("agents ready", {"hosts": [f"n{node}" for node in range(8)]}), ("workers started", {"world_size": 64}),
    ("first step", {"resumed_from": 100, "source": "memory"}), ("save failed", {"step": 120, "reason": "no space"}),
    ("worker failed", {"rank": 3, "node": "n1", "code": -9, "error": ""}),
    ("last look", {"culprits": [3], "victims": list(range(20)), "folder": "attempts/1.0.0", "seconds": 0.2}),
    ("verdict", {"cause": "worker error", "reason": "rank 3 raised", "first_step": 100, "last_step": 140,
                 "saved_step": 120}),
    ("decision", {"action": "restart", "reason": "a restart in place"}), ("evidence", {"kind": "crash", "node": "n1"}),
)  # fmt: skip


def line(number: int) -> str:
    event, facts = CYCLE[number % len(CYCLE)]
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(1_700_000_000 + number)) + ".000+00:00"
    return json.dumps({"format": 1, "at": at, "attempt": f"1.0.{number // 10}", "event": event, **facts}) + "\n"


def took_ms(work: Callable[[], object], repeats: int = REPEATS) -> str:
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began_s))
    return f"{statistics.median(times):.1f} ms (median of {repeats}, at most {max(times):.1f})"


def measured(folder: Path) -> list[tuple[str, str]]:
    run = RunFolder(folder / "run")
    run.path.mkdir()
    journal = run.journal().path
    with journal.open("w") as stream:
        stream.writelines(map(line, range(EVENTS)))
    now = time.time()
    run.write_progress(at=now, attempt="1.0.99999", step=1, until=9, saved=1, metric=2.5, state="training")
    view = LiveView(at=now, attempt="1.0.99999", steps=[1] * RANKS, step_s=[0.5] * RANKS, nodes=["n1"] * RANKS,
                    sections=["step"] * RANKS, section_s=[0.1] * RANKS, hang_used=0.1, restarts_left=3)  # fmt: skip
    rows = [("the journal", f"{EVENTS:,} events, {journal.stat().st_size / 1e6:.0f} MB")]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = RunMetrics(run)
    cpu_s = time.process_time()
    wall = took_ms(metrics.look, 1)
    rows.append(("first look, which reads all of it", f"{time.process_time() - cpu_s:.1f} s of a CPU; {wall}"))
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    rows.append(("memory that it took", f"{grown_mb:.0f} MB"))

    def with_news() -> None:
        with journal.open("a") as stream:
            stream.write(line(EVENTS))
        metrics.look()

    rows.append(("a further look, with one new event", took_ms(with_news)))
    file = folder / "run.prom"
    rows.append(
        ("look and textfile", took_ms(lambda: reporting_metrics.write_textfile(file, families([metrics.look()]))))
    )
    scrapes = reporting_metrics.Scrapes("127.0.0.1", 0, lambda: families([metrics.look()]))

    def scrape() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{scrapes.port}/metrics", timeout=60) as answer:
            answer.read()

    rows.append(("a scrape", took_ms(scrape)))
    scrapes.close()
    series = [each for each in file.read_text().splitlines() if not each.startswith("#")]
    rows.append(("its size", f"{len(series)} series, {file.stat().st_size / 1000:.1f} kB"))
    rows.append((f"the supervisor writes what {RANKS:,} ranks do", took_ms(lambda: run_folder.write(run.path, view))))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder))
    text = f"""# Metrics of a run

`python bench/metrics`, slurmft {slurmft.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs, load
average before: {load:.1f}.

| | |
|---|---|
""" + "".join(f"| {name} | {value} |\n" for name, value in rows)
    output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
