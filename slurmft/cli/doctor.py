"""``slurmft doctor``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from slurmft.cli.arguments import own_configuration
from slurmft.cli.main import say, say_json
from slurmft.operations.site import as_lines, diagnose

FORMAT = 1
_EXIT_CODES = """\b
Exit codes:
  0   all of it works; notes are facts to know
  1   warnings: it works, worse than it could
  2   problems: something that this run needs does not work; also bad usage
  69  there is no Slurm on this machine
  75  Slurm did not answer
"""


@click.command(epilog=_EXIT_CODES)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, of a versioned format.")
def doctor(*, config: Path | None, as_json: bool) -> int:
    """Say what will and will not work on this cluster, and what to do about it.

    For the run of CONFIG, or for any. Asks Slurm a few questions, tries locks and replacing in the run folder's
    filesystem, looks at the room there, and at what an administrator has set up: hooks, health.yaml, results of nodes,
    and who may change what root relies on. Changes nothing.
    """
    settings = own_configuration(config) if config is not None else None
    found = diagnose(settings, os.environ, here=Path.cwd())
    if as_json:
        facts = [asdict(finding) for finding in found.findings]
        say_json({"format": FORMAT, "exit_code": found.exit_code, "findings": facts})
    else:
        for line in as_lines(found.findings):
            say(line)
    return found.exit_code
