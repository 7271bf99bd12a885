"""``slurmft plan`` and ``slurmft advise``: settings of a run, from simulated lives and from what was measured."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmft.cli.arguments import own_configuration
from slurmft.cli.main import say, say_json
from slurmft.errors import StorageError
from slurmft.system.files import replace_atomically
from slurmft.system.foreign_text import one_line

if TYPE_CHECKING:
    from slurmft.planning.plan import Estimate, Outcome

# --- ``slurmft plan`` ---

FORMAT = 1
_COLUMNS = ("days", "failures", "restarts", "requeues", "given_up", "excluded")


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--site", type=click.Path(path_type=Path),
              help="The cluster and its failures (configs/plan.yaml); default: a typical one.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override one key of the run or of the site, for all alternatives.")  # fmt: skip
@click.option("--vary", "varied", multiple=True, metavar="KEY=A,B,...",
              help="Compare these values of one key of the run or of the site; several: all combinations.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(2, 1000), help="Simulated lives of each alternative.")
@click.option("--svg", type=click.Path(path_type=Path), help="Write a picture of where the time goes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, of a versioned format.")
def plan(
    *, config: Path, site: Path | None, overrides: tuple[str, ...], varied: tuple[str, ...], seeds: int | None,
    svg: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Simulate the life of CONFIG on a described cluster, with the policy that decides in a real run.

    Says which share of the time would be useful training (ETTR, with the queue) and where the rest goes, for the run as
    configured and for alternatives: other intervals, spares, budgets, or a cluster that repairs faster. Nothing is
    submitted.
    """
    from slurmft.planning.plan import alternatives, simulated

    found = alternatives(config, site, overrides=overrides, varied=varied, seeds=seeds)
    outcomes = list(simulated(found, lambda text: say(one_line(text), err=True)))
    if svg is not None:
        from slurmft.planning.plan import svg as drawn

        try:
            replace_atomically(svg, drawn(outcomes), mode=0o644)
        except OSError as error:
            raise StorageError(f"cannot write {svg}: {error.strerror or error}") from error
    if as_json:
        say_json({"format": FORMAT, "alternatives": [_facts(each) for each in outcomes]})
        return 0
    width = max(11, *(len(one_line(each.name)) for each in outcomes))
    say(f"{'alternative':<{width}}  {'ETTR':>15}  {'without queue':>15}  {'days':>7}  {'failures':>8}  "
        f"{'restarts':>8}  {'requeues':>8}  {'given up':>8}  {'excluded':>8}")  # fmt: skip
    for each in outcomes:
        numbers = "  ".join(f"{_mean(each, name):>{7 if name == 'days' else 8}.1f}" for name in _COLUMNS)
        say(f"{one_line(each.name):<{width}}  {each.ettr!s:>15}  {each.goodput!s:>15}  {numbers}")
    say("")
    say(f"{'share of time':<{width}}  " + "  ".join(f"{name:>9}" for name in _shares(outcomes[0])))
    for each in outcomes:
        say(f"{one_line(each.name):<{width}}  " + "  ".join(f"{share:>9.2%}" for share in _shares(each).values()))
    for each in outcomes:
        if each.finished < len(each.lives):
            say(f"{one_line(each.name)}: {len(each.lives) - each.finished} of {len(each.lives)} lives did not finish "
                "within 20 times their work")  # fmt: skip
    return 0


def _mean(outcome: Outcome, name: str) -> float:
    found: Estimate = getattr(outcome, name)
    return found.mean


def _shares(outcome: Outcome) -> dict[str, float]:
    from slurmft.planning.plan import shares

    return shares(outcome)


def _facts(outcome: Outcome) -> dict[str, object]:
    return {
        "name": outcome.name,
        "lives": len(outcome.lives),
        "finished": outcome.finished,
        "first_order_ettr": outcome.formula,
        "shares": _shares(outcome),
        **{
            name: {"mean": getattr(outcome, name).mean, "half_width": getattr(outcome, name).half_width}
            for name in ("ettr", "goodput", *_COLUMNS)
        },
    }


# --- The verb ``advise`` ---

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
