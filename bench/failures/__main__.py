"""The book of failures: each is injected into a run on a lab cluster; what was seen becomes a page with figures.

    python bench/failures                    # root; 20 minutes, those that have been seen already are left out
    python bench/failures --only hang        # this one again
    python bench/failures --only-page        # the page anew, from what was seen

What was seen lies in bench/results/failures.json, the page in docs/failures.md, its figures in docs/images/failures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "unit" / "support"))

import pytest
import saves_table
from book import SEEN, write
from scenarios import STORIES, play

import slurmft
from slurm.conftest import Run
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings

ROOT = Path(__file__).resolve().parents[2]
SAVES = "saves"
TRIES = 2


def say(text: str) -> None:
    print(f"{datetime.now():%T} {text}", flush=True)


def runs_of(lab: Lab) -> Callable[[str], Run]:
    """Makes runs of 2 nodes x 2 ranks, in folders of their own."""

    def make(name: str) -> Run:
        path = lab.home / f"{datetime.now():%H%M%S}" / name
        path.parent.mkdir(exist_ok=True)
        os.chown(path.parent, lab.uid, lab.gid)
        config = {
            "command": ["true"], "run_folder": str(path), "nodes": 2, "nproc_per_node": 2,
            "checkpoint": {"interval_steps": 25}, "slurm": {"partition": "low", "time": "10"},
            "exclusions": {"path": str(path.with_suffix(".exclusions"))},
        }  # fmt: skip
        path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
        return Run(lab, path)

    return make


def in_order(lab: Lab) -> None:
    """All nodes idle, whatever a chapter that failed has left."""
    lab.run_as_admin(["scancel", "--user", lab.user], check=False)
    lab.wait_until_idle(90)


def see(lab: Lab, name: str) -> Any:
    """What one chapter has shown; tried again once, as its run may meet a busy machine."""
    new_run = runs_of(lab)
    for left in reversed(range(TRIES)):
        try:
            if name == SAVES:
                with tempfile.TemporaryDirectory(prefix="failures-") as folder:
                    return saves_table.measure(Path(folder), say)
            story = next(each for each in STORIES if each.name == name)
            return play(new_run(name), story)
        except (pytest.fail.Exception, slurmft.SlurmftError) as error:
            if not left:
                raise
            say(f"{name}, to be tried again: {error}")
            in_order(lab)
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [story.name for story in STORIES] + [SAVES]
    parser.add_argument("--only", action="append", choices=names, help="see this one again; may be repeated")
    parser.add_argument("--only-page", action="store_true")
    parser.add_argument(
        "--lab", type=Path, help="a lab of 5 nodes that stands; default: one of its own, removed after it"
    )
    arguments = parser.parse_args()
    seen = json.loads(SEEN.read_text()) if SEEN.exists() else {}
    due = [] if arguments.only_page else arguments.only or [name for name in names if name not in seen]
    failed = []
    if due:
        folder = arguments.lab or Path(f"/var/lib/slurmft-lab-failures-{os.getpid()}")
        try:
            lab = Lab.standing(folder) if arguments.lab else Lab.up(
                LabSettings(folder=folder, nodes=5, accounting=True, kill_wait_s=5, grace_s=15, slurmd_timeout_s=8)
            )  # fmt: skip
            for name in due:
                say(f"{name} ...")
                try:
                    found = see(lab, name)
                except (pytest.fail.Exception, slurmft.SlurmftError) as error:
                    failed.append(name)
                    say(f"{name} FAILED: {error}")
                else:
                    say(f"{name}: {found['faults'] if isinstance(found, dict) else 'done'}")
                    seen[name] = found
                    seen["of"] = {
                        "version": slurmft.__version__, "date": f"{datetime.now(UTC):%Y-%m-%d}",
                        "cores": os.cpu_count(),
                        "load": max(round(os.getloadavg()[1]), seen.get("of", {}).get("load", 0)),
                        "machine": platform.machine(),
                        "slurm": lab.run(["sinfo", "--version"]).stdout.split()[-1],
                    }  # fmt: skip
                    SEEN.write_text(json.dumps(seen, indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n")
                in_order(lab)
        finally:
            if not arguments.lab:
                cluster.purge(folder)
    write(ROOT / "docs")
    say("docs/failures.md is written")
    if failed:
        sys.exit(f"not seen: {', '.join(failed)}")


if __name__ == "__main__":
    main()
