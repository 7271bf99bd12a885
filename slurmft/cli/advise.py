"""The verb ``advise``."""

from __future__ import annotations

import textwrap
from pathlib import Path

import click

from slurmft.cli.arguments import own_configuration
from slurmft.cli.main import say, say_json
from slurmft.system.foreign_text import one_line

WIDTH = 110
NAME_WIDTH = 13


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key of the configuration.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def advise(*, config: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Recommend the signal lead and the checkpoint interval of CONFIG, from what was measured.

    How long steps and saves took and how often the run failed comes from its own folder, or where that has no record
    yet, from runs of the same workload beside it. Slurm is asked for its grace where there is one; nothing is changed.
    """
    from slurmft.operations.advise import counsel

    found = counsel(own_configuration(config, overrides))
    if as_json:
        say_json(found.as_json())
        return 0
    for name, text in found.lines():
        first, *rest = textwrap.wrap(one_line(text), WIDTH - NAME_WIDTH) or [""]
        say(f"{name:<{NAME_WIDTH}}{first}")
        for line in rest:
            say(f"{'':<{NAME_WIDTH}}{line}")
    return 0
