"""``slurmft``: the verbs, one broad ``except``, and the exit codes.

A verb's module is imported when the verb is asked for: ``--help`` and a typo cost no more than click.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click

import slurmft
from slurmft.errors import SlurmftError
from slurmft.system.foreign_text import MAX_TEXT, block, one_line

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.console import Console
    from rich.table import Table

# --- Everything that the command line prints: the one place where text of others becomes safe for a terminal ---
# `tests/architecture/test_architecture.py` holds the other modules of this package to it.


def say(text: str, *, err: bool = False, bold: bool = False) -> None:
    """Print ``text`` as one line, line breaks and control characters replaced."""
    click.secho(one_line(text), err=err, bold=bold or None)


def say_block(text: str, *, err: bool = False) -> None:
    """Print ``text`` with its line feeds and tabs, and nothing else that a terminal obeys."""
    click.echo(block(text), err=err)


def say_error(text: str, *, prefix: str = "slurmft: ") -> None:
    """Print ``text`` on standard error; its further lines are indented, so that none looks like one of ours."""
    click.echo(prefix + re.sub(r"\n(?![ \t])", "\n  ", block(text, MAX_TEXT)), err=True)


def say_json(value: Any, *, indent: int | None = None) -> None:
    """Print ``value`` exactly; JSON escapes what a terminal would obey."""
    import json

    click.echo(json.dumps(value, indent=indent).replace("\x7f", "\\u007f"))


def say_raw(text: str) -> None:
    """Print a worker's own output: as it is, or as ``foreign_text.Terminal`` has made it."""
    click.echo(text, nl=False, color=True)  # otherwise click takes colours out of what goes into a pipe


def console(width_in_pipe: int = 10_000) -> Console:
    """A console for tables and bars; rich is imported here, since hooks and ``--json`` do without it.

    What goes into a pipe or a file is not wrapped, unless ``COLUMNS`` is set.
    """
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
    from rich.control import Control
    from rich.segment import Segment

    class Safe:
        def __init__(self, inner: ConsoleRenderable) -> None:
            self._inner = inner

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for segment in console.render(self._inner, options):
                yield segment if segment.control else Segment(block(segment.text), segment.style)

    class Hook:
        @staticmethod
        def process_renderables(renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
            return [each if isinstance(each, Control) else Safe(each) for each in renderables]

    made = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else width_in_pipe)
    made.push_render_hook(Hook())  # type: ignore[arg-type]
    return made


def table(*titles: str, wrapped: Collection[str]) -> Table:
    """A table without a frame; only the columns that are ``wrapped`` may break their lines."""
    from rich.table import Table  # as the console

    made = Table(box=None, pad_edge=False)
    for title in titles:
        made.add_column(title, overflow="fold", no_wrap=title not in wrapped)
    return made


def never_fail_to_encode() -> None:
    """Show characters that the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- ``slurmft``: the verbs, one broad ``except``, and the exit codes ---

VERBS = {
    "advise": ("report", "Recommend the signal lead and the checkpoint interval of CONFIG, from what was measured"),
    "checkpoint": ("checkpoint", "The checkpoints of a run: list them, verify, export, remove"),
    "convert": ("submit", "Say what to use instead: a batch script is not converted any more, it is run as it is"),
    "doctor": ("nodes", "Say what will and will not work on this cluster, and what to do about it"),
    "drill": ("nodes", "Try a preemption: a small job with your own options gets the real signal, and a table shows "
              "the results"),
    "endpoint": ("submit", "Print the address of a router of the endpoint RUN that lives"),
    "examples": ("submit", "Print the file NAME that comes with slurmft, or list all: configurations, alerts, "
                 "dashboards, a batch script"),
    "exclude": ("nodes", "The exclusion list: list nodes, show why, add, remove, forget what has faded"),
    "explain": ("status", "Show the run's history: each event, each decision and its reason, from the journal"),
    "ft-launch": ("submit", "Submit a run by the command line of ft_launcher or torchrun"),
    "health": ("health", "Check this node: GPUs, memory, disks, filesystems, network, host, own probes"),
    "hooks": ("health", "Slurm's hooks: show the lines for slurm.conf"),
    "infer": ("submit", "Answer a batch of requests, or continue one that has stopped"),
    "init": ("submit", "Write a short configuration for a script, to be changed by hand and submitted"),
    "inject": ("control", "Inject a fault into a running RUN, to see what follows"),
    "join": ("control", "Lend nodes to a run: submit a job on whose nodes it trains too, from its next checkpoint on"),
    "lab": ("lab", "A real Slurm cluster on this machine, for tests and for trying things out (needs root)"),
    "logs": ("status", "Print a worker's output, and the supervisor's when there is none"),
    "metrics": ("submit", "Print or write measured values of RUN, or of all runs below SLURMFT_RUNS, as Prometheus "
                "reads them"),
    "plan": ("report", "Simulate the life of CONFIG on a described cluster, with the policy that decides in a real "
             "run"),
    "quickstart": ("submit", "Train a small GPT, with live progress: about a minute, no Slurm and no GPU needed"),
    "report": ("report", "Show where the time of a run went, and what its failures have cost: from the journal alone"),
    "requeue": ("control", "Save and go through the queue again; start a waiting job now; rescue one that lost its "
                "batch script"),
    "rm": ("control", "Remove a run that is not running: its folder, with journal, logs and the checkpoints in it"),
    "run": ("submit", "Run the supervisor of one job (called by the batch script)"),
    "save": ("control", "Save a checkpoint now and go on training"),
    "sbatch": ("submit", "Submit the batch script that you have, as sbatch would; what it launches is supervised"),
    "schema": ("submit", "Print the JSON schema of a configuration, for editors"),
    "serve": ("submit", "Serve a model: submit an endpoint, or continue one that has stopped"),
    "status": ("status", "Show what runs are doing: RUN, or all below SLURMFT_RUNS (default: runs)"),
    "stop": ("control", "Save, then end the run; it is not requeued"),
    "submit": ("submit", "Submit a run, or continue one that has stopped"),
    "sweep": ("nodes", "Sweep the cluster once, for cron: exclude and drain sick nodes, resume healthy ones, "
              "restart lost runs"),
    "trials": ("submit", "Run each trial of a sweep once, or go on with one that has stopped: slurmft trials CONFIG"),
    "watch": ("status", "Watch runs: all of them, or the ranks, saves and events of RUN, until q is pressed"),
}  # fmt: skip
"""Verb -> its module in slurmft.cli, which has a command of that name, and the first sentence of its help."""

GROUPS = {
    "Every day": "init submit status logs watch stop save requeue explain report rm doctor",
    "To try it": "quickstart examples drill inject lab",
    "Recovery and evidence": "checkpoint exclude advise plan join",
    "With a script of your own": "sbatch ft-launch convert",
    "Inference": "infer serve endpoint",
    "Sweeps": "trials",
    "Administrators": "sweep health hooks metrics",
    "Internal": "run schema",
}
"""The verbs as ``--help`` shows them."""

HIDDEN_VERBS = dict.fromkeys(("agent", "companion", "launch"), "submit")
"""The same for verbs that only slurmft itself calls; --help does not show them."""

_EXIT_CODES = """\b
Exit codes:
  0   done; of a job: the run is complete
  1   it could not be done: Slurm refused, or a file is damaged, not ours, or of a newer version
  2   bad configuration or usage; nothing was started
  16  the trainer wants other hardware; requeued on other nodes than the suspects
  17  a result failed its validation; not continued
  69  the lab cannot exist here (no root, or packages missing)
  70  an error in slurmft itself
  74  stopped, but its save did not happen; the newest checkpoint continues
  75  temporary: stopped with a checkpoint, or Slurm did not answer
  93  not to be requeued: no progress, or the budget is spent
  other: the first failing worker's own code
"""


OTHER_WORDS = {"list": "status", "ls": "status", "ps": "status", "show": "status", "top": "watch", "cancel": "stop",
               "kill": "stop", "resume": "submit", "continue": "submit", "start": "submit", "restart": "requeue",
               "clean": "checkpoint", "delete": "rm", "remove": "rm", "simulate": "plan"}  # fmt: skip
"""What other tools call a verb of ours."""


class Verbs(click.Group):
    """A group of verbs that answers a misspelt one with the nearest."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's; ends the program with exit code 2 where there is no such verb."""
        verb = args[0]
        if not verb.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, verb) is None:
            from slurmft.policy.values import did_you_mean, shown  # only mistakes pay for it

            known, meant = self.list_commands(ctx), OTHER_WORDS.get(verb)
            more = f"; did you mean {meant}?" if meant in known else did_you_mean(verb, known)
            ctx.fail(f"no such verb: {shown(verb)}{more}")
        return super().resolve_command(ctx, args)


class _LazyVerbs(Verbs):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = VERBS[cmd_name][0] if cmd_name in VERBS else HIDDEN_VERBS.get(cmd_name)
        if module is None:
            return None
        from slurmft.system.processes import without_collections  # --help needs none

        with without_collections():
            imported = importlib.import_module(f"slurmft.cli.{module}")
        command: click.Command = getattr(imported, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The lists in ``--help``, from the tables alone."""
        longest = max(map(len, VERBS))
        for title, names in GROUPS.items():
            stubs = [click.Command(name, help=f"{VERBS[name][1]}.") for name in names.split()]
            limit = formatter.width - 6 - longest
            with formatter.section(title):
                formatter.write_dl([(f"{stub.name:<{longest}}", stub.get_short_help_str(limit)) for stub in stubs])


@click.group(cls=_LazyVerbs, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(slurmft.__version__, prog_name="slurmft")
@click.option("-v", "--verbose", is_flag=True, help="More messages on standard error.")
def cli(*, verbose: bool) -> None:
    """Keep a PyTorch training run going on a Slurm cluster, and prove that nothing was lost."""
    # an unlocked terminal or a log: either way one line per message, on standard error
    from slurmft.system.foreign_text import log_to_stderr  # --help needs none

    log_to_stderr(
        "slurmft %(asctime)s %(levelname)s %(message)s" if not sys.stderr.isatty() else "slurmft: %(message)s",
        level=logging.DEBUG if verbose else logging.INFO,
        datefmt="%H:%M:%S",
    )


def _words_for(error: OSError) -> str:
    """What the operating system refused, where, and what to do: errors that no module handles itself."""
    where = f": {str(error.filename)!r}" if error.filename is not None else ""
    return f"{error.strerror or error}{where}\n  hint: {_hint_for(error)}"


def _hint_for(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "it belongs to another user, or is read-only; ls -ld shows its owner"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room there, then try again"
    return "run with -v for the traceback"


def main(begun: object = None) -> None:
    """Run the command line; ends the process with its exit code.

    Args:
        begun: what this process has begun already for the verb, which gets it as its context's object.
    """
    never_fail_to_encode()
    try:
        code = cli.main(standalone_mode=False, prog_name="slurmft", obj=begun)
    except click.exceptions.Abort:
        code = 130
    except click.exceptions.NoArgsIsHelpError as error:
        say_block(error.format_message(), err=True)
        code = error.exit_code
    except click.ClickException as error:
        if isinstance(error, click.UsageError) and error.ctx is not None:
            say_block(f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n", err=True)
        say_error(error.format_message(), prefix="Error: ")
        code = error.exit_code
    except SlurmftError as error:
        hint = ""
        if not error.hint and isinstance(error.__cause__, OSError):
            hint = f"\n  hint: {_hint_for(error.__cause__)}"
        say_error(f"{error}{hint}")
        code = error.exit_code
    except BrokenPipeError:  # `slurmft explain | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except OSError as error:
        logging.getLogger(__name__).debug("traceback", exc_info=True)
        say_error(_words_for(error))
        code = 1
    except Exception as error:
        logging.getLogger(__name__).debug("traceback", exc_info=True)
        say_error(f"internal error: {error!r}\n  hint: please report this; run with -v for the traceback")
        code = 70
    sys.exit(code if isinstance(code, int) else 0)
