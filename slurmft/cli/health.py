"""``slurmft health``: the probes of this node, with Nagios's exit codes; ``slurmft hooks``, which Slurm calls."""

from __future__ import annotations

import os
import signal
import sysconfig
from pathlib import Path

import click

import slurmft
from slurmft.cli import arguments
from slurmft.cli.main import Verbs, console, say, say_block, say_error, say_json, table
from slurmft.errors import SlurmftError, UsageError
from slurmft.health.checker import CONTEXTS, keep, load_config, look, scene_here, told
from slurmft.policy.node_health import Checkup, Status
from slurmft.system.foreign_text import one_line

# --- ``slurmft health``: the probes of this node, with Nagios's exit codes ---

_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.CRITICAL: "red", Status.UNKNOWN: "magenta"}
_SHARED = frozenset({"prolog", "epilog", "healthcheck", "cron"})
"""Contexts whose results go to the results folder."""

_EXIT_CODES = """\b
Exit codes, as of Nagios's plugins:
  0  OK
  1  WARNING: worth a look by a person
  2  CRITICAL: the node should not run jobs
  3  UNKNOWN: nothing bad was found and something could not be looked at; also bad usage, or a bad configuration
"""


class _BadUsage(click.UsageError):
    exit_code = int(Status.UNKNOWN)


class _NagiosCommand(click.Command):
    """Bad usage is UNKNOWN: a typo must not look like a sick node."""

    def make_context(self, *args: object, **options: object) -> click.Context:
        try:
            return super().make_context(*args, **options)  # type: ignore[arg-type]
        except click.UsageError as error:
            raise _BadUsage(error.message, error.ctx) from error


@click.command(cls=_NagiosCommand, epilog=_EXIT_CODES)
@arguments.json_option
@click.option(
    "--context",
    type=click.Choice(CONTEXTS),
    default="manual",
    show_default=True,
    help="Where it runs; all but manual write to results_folder.",
)
@click.option(
    "--level",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="1: under 2 s, beside jobs. 2: minutes, computes on all GPUs; for idle nodes.",
)
@click.option(
    "--config",
    type=arguments.PATH,
    help="Thresholds. Default: $SLURMFT_HEALTH_CONFIG, or /etc/slurmft/health.yaml, or none.",
)
@click.option("--only", multiple=True, metavar="NAME", help="Only this probe; may be given several times.")  # fmt: skip
def health(*, as_json: bool, context: str, level: int, config: Path | None, only: tuple[str, ...]) -> int:
    """Check this node: GPUs, memory, disks, filesystems, network, host, own probes."""
    try:
        settings = load_config(config, os.environ)
        scene = scene_here(settings, os.environ, context=context, level=level)
        found = look(scene, only=only)
    except SlurmftError as error:
        say_error(str(error))
        return int(Status.UNKNOWN)
    shared = context in _SHARED
    if shared or found.status is not Status.OK:
        found, problems = keep(found, scene.config, share=shared and not only)
        for problem in problems:
            say_error(str(problem))
    if as_json:
        say_json(told(found))
    else:
        _print(found)
    return int(found.status) if found.results else int(Status.OK)


def _print(found: Checkup) -> None:
    from rich.text import Text

    made = table("check", "status", "detail", wrapped=("detail",))
    for result in found.results:
        detail = result.detail + (f"\n-> {result.remedy}" if result.remedy else "")
        made.add_row(Text(one_line(result.name)), Text(result.status.name, style=_COLOURS[result.status]),
                      Text("\n".join(one_line(line) for line in detail.split("\n"))))  # fmt: skip
    console().print(made)
    files = sorted({line for result in found.results for line in result.evidence if line.startswith("/")})
    for path in files:
        say(f"evidence: {path}")
    say(f"{found.node} is {found.status.name}")


# --- ``slurmft hooks``: Slurm's hooks on the nodes and on the controller ---


@click.group(cls=Verbs)
def hooks() -> None:
    """Slurm's hooks: show the lines for slurm.conf."""


@hooks.command()
def show() -> int:
    """Print the lines for slurm.conf, for this installation."""
    from slurmft.health.checker import slurm_conf_lines

    clone = Path(slurmft.__file__).resolve().parents[1] / "bin"
    installed = Path(sysconfig.get_path("scripts"))
    say_block(slurm_conf_lines(clone if (clone / "slurmft-hook").is_file() else installed).rstrip("\n"))
    return 0


@hooks.command(hidden=True)
@click.argument("name")
@click.argument("job", default="")
def run(*, name: str, job: str) -> int:
    """Run one of the hooks (called by bin/slurmft-hook)."""
    from slurmft.health import checker as health_hooks

    # slurmctld starts its scripts with all signals blocked, and processes that we start would inherit that
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if name == "follow-requeue":
        say(_line(health_hooks.follow_quietly(job)))
        return 0
    if name not in health_hooks.HOOKS:
        raise UsageError(f"there is no hook {name[:40]!r}", hint=f"hooks: {', '.join(health_hooks.HOOKS)}")
    outcome = health_hooks.HOOKS[name](os.environ)
    say(_line(outcome.words))
    return outcome.exit_code


def _line(words: str) -> str:
    """For the system log: what a probe said, as one line of ASCII."""
    return " ".join(words.split()).encode("ascii", "backslashreplace").decode()
