"""What the commands cost: wall time as the lab's ordinary user, in turns with what they are compared with."""

from __future__ import annotations

import json
import statistics

import yaml
from contenders import TRAINERS, empty_queue, new_folder
from table import Row, Table

from slurmft.lab.cluster import Lab

HELP_S, DRY_RUN_S, SUBMIT_RATIO = 0.150, 0.400, 1.3


def measure(lab: Lab, rounds: int) -> dict[str, list[float]]:
    """Seconds by command."""
    folder = new_folder(lab, "commands")
    config = folder / "run.yaml"
    # never starts: what is timed is the submission
    settings = {"command": ["true"], "run_folder": "run", "slurm": {"time": "60", "begin": "now+1day"}}
    config.write_text(yaml.safe_dump(settings))
    script = folder / "job.sh"
    script.write_text(lab.run(["slurmft", "submit", str(config), "--dry-run"], cwd=folder).stdout)
    commands = {
        "python": ["python", "-c", "pass"],
        "help": ["slurmft", "--help"],
        "dry run": ["slurmft", "submit", str(config), "--dry-run"],
        "submit": ["slurmft", "submit", str(config), "--set", f"run_folder={folder}/run-{{n}}"],
        "sbatch": [["python", "-c", "pass"], ["sbatch", str(script)]],
        "sbatch from python": ["python", str(TRAINERS / "sbatch_from_python.py"), str(script)],
        "asking": ["python", str(TRAINERS / "sbatch_from_python.py"), str(script), "ask"],
    }
    argv = ["python", str(TRAINERS / "time_commands.py"), str(rounds)]
    try:
        output = lab.run(argv, cwd=folder, input=json.dumps(commands), timeout=300).stdout
    finally:
        empty_queue(lab)
    times: dict[str, list[float]] = json.loads(output)
    return times


def table(times: dict[str, list[float]]) -> Table:
    medians = {label: statistics.median(values) for label, values in times.items()}
    bare, imported, asking = (
        medians["submit"] / medians[label] for label in ("sbatch", "sbatch from python", "asking")
    )
    asked = f"at most {SUBMIT_RATIO}"
    return Table(
        "Commands", "milliseconds",
        [
            _row("`slurmft --help`", times["help"], f"under {HELP_S * 1e3:.0f}", medians["help"] < HELP_S),
            _row("`slurmft submit --dry-run`", times["dry run"], f"under {DRY_RUN_S * 1e3:.0f}",
                 medians["dry run"] < DRY_RUN_S),
            _row("`slurmft submit`", times["submit"]),
            _row("`python -c pass`", times["python"]),
            _row("`python -c pass`, then plain `sbatch`", times["sbatch"]),
            _row("plain `sbatch` from a Python program that imports the same packages", times["sbatch from python"]),
            _row("the same, and it asks Slurm the four questions that slurmft asks", times["asking"]),
            Row(what="`slurmft submit` : bare Python and `sbatch`", note=f"{bare:.2f} times", target=asked,
                hit=bare <= SUBMIT_RATIO),
            Row(what="`slurmft submit` : Python with the same packages and `sbatch`", note=f"{imported:.2f} times",
                target=asked, hit=imported <= SUBMIT_RATIO),
            Row(what="`slurmft submit` : Python with the same packages, `sbatch` and the same questions",
                note=f"{asking:.2f} times"),
        ],
        ["The script that `sbatch` gets is the very one that slurmft submits; the packages are submitit, pydantic, "
         "yaml, click and filelock."],
    )  # fmt: skip


def _row(what: str, seconds: list[float], target: str = "", hit: bool | None = None) -> Row:
    return Row(what=what, values=[value * 1e3 for value in seconds], digits=0, target=target, hit=hit)
