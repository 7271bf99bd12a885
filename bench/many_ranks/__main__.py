"""16,384 ranks: what one commit, one rank's load, the supervisor and files of a whole cluster cost, with the real code.

    python bench/many_ranks --output bench/results/many_ranks.md     # six minutes, 2 GB below --folder

The images are small, the numbers of files, indexes and pieces are not: this measures what grows with the ranks. Shards
that lie below --folder from an earlier time are not written again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shared_files
from folders import DENSE, LAYERS, write_dense, write_spread
from measures import IDENTITY

import slurmft
from slurmft.checkpoint.catalog import METADATA_FILE
from slurmft.storage.checkpoint_names import MANIFEST

RANKS, ON_NODE = 16_384, 8
COMMIT_S, LOAD_S, LOAD_MIB, FILES_S = 2.0, 5.0, 200.0, 2.0


def measure(*arguments: object) -> dict[str, Any]:
    script = Path(__file__).with_name("measures.py")
    done = subprocess.run([sys.executable, str(script), *map(str, arguments)], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def verdict(value: float, limit: float) -> str:
    return "hit" if value <= limit else "**miss**"


def _write(kind: str, folder: Path, ranks: int, middle: int) -> None:
    if kind == "dense":
        write_dense(folder, IDENTITY, ranks)
    else:
        write_spread(folder, IDENTITY, ranks, with_image={0, middle, middle // 2 * 2, middle // 2 * 2 + 1})


def supervisor_rows(agents: int) -> list[str]:
    """As ``bench/fleet``."""
    script = Path(__file__).parents[1] / "fleet" / "attempt.py"
    done = subprocess.run([sys.executable, script, str(agents), str(ON_NODE)], stdout=subprocess.PIPE, check=True)
    return [f"| {' | '.join(row)} |" for row in json.loads(done.stdout)]


def rows_of(kind: str, directory: Path, ranks: int) -> list[str]:
    """Write the shards of all ranks, commit them, and load some ranks' parts."""
    folder = directory / kind / IDENTITY.folder_name
    middle = ranks // 2 + 3
    began = time.monotonic()
    if folder.exists():
        for name in (MANIFEST, METADATA_FILE):
            (folder / name).unlink(missing_ok=True)
    else:
        folder.mkdir(parents=True)
        _write(kind, folder, ranks, middle)
    print(f"{kind}: {ranks} shards are there after {time.monotonic() - began:.0f} s", file=sys.stderr)
    index_bytes = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".json"))
    found = measure("commit", folder, ranks)
    named = "with .metadata" if found["metadata"] else "without .metadata"
    what = f"{DENSE} tensors that all ranks have" if kind == "dense" else f"{LAYERS} weights and their moments, spread"
    state = f"{what} ({index_bytes / 2**20:.0f} MiB of indexes)"
    rows = [f"| {state} | commit, {named} | {found['seconds']:.2f} s | {found['mib']:.0f} MiB | {COMMIT_S:g} s |"
            f" {verdict(found['seconds'], COMMIT_S)} |"]  # fmt: skip
    loads = [("rank 0", 0, ranks), (f"rank {middle}", middle, ranks)]
    loads += [(f"rank {middle // 2} of {ranks // 2}", middle // 2, ranks // 2)] if kind == "spread" else []
    for text, rank, world in loads:
        found = measure("load", folder, kind, rank, world)
        is_hit = found["seconds"] <= LOAD_S and found["mib"] <= LOAD_MIB
        what, asked = f"load of {text}: {found['indexes']} indexes read", f"{LOAD_S:g} s, {LOAD_MIB:g} MiB"
        result = "hit" if is_hit else "**miss**"
        rows.append(f"| | {what} | {found['seconds']:.2f} s | {found['mib']:.0f} MiB | {asked} | {result} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/many_ranks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--folder", type=Path, help="where the files are written; a temporary one otherwise")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as held:
        folder = args.folder or Path(held.enter_context(tempfile.TemporaryDirectory()))
        rows = [*rows_of("dense", folder, args.ranks), *rows_of("spread", folder, args.ranks)]
    found = measure("decide", args.ranks, ON_NODE)
    rows.append(f"| | which state of all nodes' memories to load | {found['seconds']:.2f} s | {found['mib']:.0f} MiB |"
                f" {LOAD_S:g} s, {LOAD_MIB:g} MiB | {verdict(found['seconds'], LOAD_S)} |")  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        files = [f"| {what} | {took_s:.2f} s | {FILES_S:g} s | {verdict(took_s, FILES_S)} |"
                 for what, took_s in shared_files.measure(Path(name)).items()]  # fmt: skip
    agents = args.ranks // ON_NODE
    versions = f"{platform.system()}, Python {platform.python_version()}, slurmft {slurmft.__version__}"
    text = "\n".join([
        f"# {args.ranks:,} ranks", "",
        f"`python bench/many_ranks` on {os.cpu_count()} cores, {versions}, files on the local disk. Processes that"
        f" wanted to run when it ended: {os.getloadavg()[0]:.1f}.", "",
        "## Checkpoints", "", "One process each; the memory is what it grew by.", "",
        "| state | work | time | memory | asked | |", "|---|---|---|---|---|---|", *rows, "",
        "## The supervisor", "", f"A real attempt with {agents:,} simulated agents on loopback, all of them in one"
        " process beside the supervisor's.", "", "| | | asked | |", "|---|---|---|---|", *supervisor_rows(agents), "",
        "## Files of the whole cluster", "", "| | time | asked | |", "|---|---|---|---|", *files, "",
    ])  # fmt: skip
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
