"""``slurmft doctor`` and ``slurmft drill``: whether this cluster is ready for a run."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path

import click

from slurmft.cli.arguments import Amount, own_configuration
from slurmft.cli.main import console, say, say_block, say_json
from slurmft.errors import UsageError
from slurmft.operations.site import as_lines, carry_out, diagnose, prepared
from slurmft.policy.site import passed
from slurmft.scheduler import slurm
from slurmft.scheduler.jobs import preempt_argv, signal_argv
from slurmft.system.foreign_text import one_line

# --- ``slurmft doctor`` ---

FORMAT = 1
_EXIT_CODES_OF_DOCTOR = """\b
Exit codes:
  0   all of it works; notes are facts to know
  1   warnings: it works, worse than it could
  2   problems: something that this run needs does not work; also bad usage
  69  there is no Slurm on this machine
  75  Slurm did not answer
"""


@click.command(epilog=_EXIT_CODES_OF_DOCTOR)
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


# --- ``slurmft drill`` ---

_WORDS = {True: ("pass", "green"), False: ("FAIL", "red"), None: ("-", "")}
_EXIT_CODES_OF_DRILL = """\b
Exit codes:
  0   all of it worked
  1   something failed; the table says what. Or Slurm refused
  2   bad configuration or usage; nothing was submitted
  75  the job did not train in time, or Slurm did not answer
"""


@click.command(epilog=_EXIT_CODES_OF_DRILL)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key, such as slurm.qos=low.")
@click.option("--preempt-with", default="", metavar="PARTITION",
              help="Preempt it for real, with a job of a second in this partition on the same nodes.")  # fmt: skip
@click.option("--limit", default=300.0, show_default=True, type=Amount(10, 7200), help="Seconds it may take.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted and sent, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, of a versioned format.")
def drill(
    *, config: Path, overrides: tuple[str, ...], preempt_with: str, limit: float, dry_run: bool, as_json: bool
) -> int:
    """Try a preemption: a small job with your own options gets the real signal, and a table shows the results.

    At most 2 nodes with 2 ranks, for a few minutes; its jobs and its folder beside your run folder are removed. Without
    --preempt-with its steps get SIGTERM, as at the beginning of a grace. With it the other job asks for whole nodes:
    jobs that share them may be preempted, too.
    """
    if not slurm.available():
        raise UsageError("there is no Slurm on this machine", hint="slurmft doctor")
    user = own_configuration(config, overrides)
    made = prepared(user, os.environ, preempt_with=preempt_with, limit_s=limit)
    if dry_run:
        then = preempt_argv("NODES", preempt_with) if preempt_with else signal_argv("JOB")
        say_block(f"# {made.folder / 'drill.yaml'}\n{made.settings.as_yaml()}")
        say_block(f"{shlex.join(made.submission)}\n{shlex.join(then)}\nscancel JOB; rm -r {made.folder}")
        return 0
    table = carry_out(made, lambda text: say(text, err=True))
    code = 0 if passed(table) else 1
    if as_json:
        say_json({"format": FORMAT, "exit_code": code, "rows": [asdict(row) for row in table]})
        return code
    from rich.table import Table  # doctor does without
    from rich.text import Text

    shown = Table(box=None, pad_edge=False)
    for title in ("", "", "what happened"):
        shown.add_column(title, overflow="fold")
    for row in table:
        word, colour = _WORDS[row.passed]
        shown.add_row(row.what, Text(word, style=colour), Text(one_line(row.text)))
    console().print(shown)
    return code
