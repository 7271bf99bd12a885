"""What a report costs: a journal of a million events, a page of 1,000 attempts, and the start of a run with that past.

    python bench/reporting --output bench/results/reporting.md     # two minutes; no Slurm, no root

Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "unit" / "support"))
from generated_journals import write_run

import slurmft
from slurmft.reporting.report import page_of, report_of
from slurmft.storage.run_folder import RunFolder

EVENTS = 1_000_000
ATTEMPTS = 1000
PER_ATTEMPT = 8


def measured(what: str, folder: Path) -> tuple[float, float, float, int]:
    """Seconds of the clock and of the processor, MiB at most, and a size: in a process of its own."""
    argv = [sys.executable, __file__, "--measure", what, str(folder)]
    words = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=600).stdout.split()
    return float(words[0]), float(words[1]), float(words[2]), int(words[3])


def measure(what: str, folder: Path) -> None:
    run, began_s, cpu_s, size = RunFolder(folder), time.perf_counter(), time.process_time(), 0
    if what == "first start":
        run.journal().path.with_name("journal.jsonl.past").unlink(missing_ok=True)
    if what in ("first start", "start"):
        size = len(run.journal().read_past())
    else:
        report = report_of(run, now_s=time.time())
        size = report.account.events
        if what == "page":
            size = len(page_of([report], [], now_s=time.time(), is_fleet=False).encode())
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    print(took_s, cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, size)


def rows(folder: Path) -> list[str]:
    small, large = folder / "small", folder / "large"
    write_run(small, attempts=ATTEMPTS)
    write_run(large, attempts=ATTEMPTS, chatter=EVENTS // ATTEMPTS - PER_ATTEMPT)
    megabytes = (large / "journal.jsonl").stat().st_size / 1e6
    found = []
    for title, what, path, asked in (
        (f"page of {ATTEMPTS:,} attempts", "page", small, "1 s, 300 kB"),
        ("account of 10,000 events", "account", small, ""),
        (f"account of 1,000,000 events ({megabytes:.0f} MB)", "account", large, "5 s, constant memory"),
        ("the journal at a start, of 10,000 events", "start", small, ""),
        ("the same, of 1,000,000 events, for the first time", "first start", large, ""),
        ("the same, at the next start", "start", large, "not to read it whole"),
    ):
        took_s, cpu_s, mib, size = min(measured(what, path) for _ in range(3))
        unit = f"{size / 1000:.0f} kB" if what == "page" else f"{size:,} events"
        found.append(f"| {title} | {took_s:.2f} s | {cpu_s:.2f} s | {mib:.0f} MiB | {unit} | {asked} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", nargs=2)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure[0], Path(arguments.measure[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            "# Reports", "", f"`python bench/reporting --output bench/results/reporting.md`, slurmft "
            f"{slurmft.__version__}, {os.cpu_count()} cores, load average of the minute before: "
            f"{os.getloadavg()[0]:.0f}. The best of three, each in a process of its own.", "",
            "|  | clock | processor | memory at most | result | asked |", "|---|---|---|---|---|---|",
            *rows(Path(folder)),
            "", "A start keeps the lines it decides on beside a long journal, with the place up to which it was read; "
            "the next start reads from there on.", "",
        ]  # fmt: skip
    text = "\n".join(lines)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
