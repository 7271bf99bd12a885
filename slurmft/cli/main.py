"""``slurmft``: the verbs, one broad ``except``, and the exit codes."""

from __future__ import annotations

import logging
import os
import sys

import click

import slurmft
from slurmft.cli import reading, submitting, verbs
from slurmft.errors import SlurmftError

_EXIT_CODES = """\b
Exit codes:
  0   done; of a job: the run is complete
  2   bad configuration or usage; nothing was started
  16  the trainer wants other hardware; requeued (excluding nodes is yet to come)
  17  a result failed its validation; not continued
  69  the lab cannot exist here (no root, or packages missing)
  75  temporary: stopped with a checkpoint, or Slurm did not answer
  93  not to be requeued: no progress, or the budget is spent
  other: the first failing worker's own code
"""


class _LazyLab(click.Group):
    """The lab's verbs, imported when one is asked for."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "lab":
            from slurmft.cli.lab import lab

            return lab
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "lab"])


@click.group(cls=_LazyLab, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(slurmft.__version__, prog_name="slurmft")
@click.option("-v", "--verbose", is_flag=True, help="Say more on standard error.")
def cli(*, verbose: bool) -> None:
    """Keep a PyTorch training run going on a Slurm cluster, and prove that nothing was lost."""
    # an unlocked terminal or a log: either way one line per message, on standard error
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="slurmft %(asctime)s %(levelname)s %(message)s" if _in_job() else "slurmft: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def _in_job() -> bool:
    return not sys.stderr.isatty()


for command in (
    submitting.submit, verbs.run, verbs.agent, verbs.stop, verbs.save, verbs.requeue, verbs.schema,
    reading.status, reading.logs, reading.explain,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    try:
        code = cli.main(standalone_mode=False, prog_name="slurmft")
    except click.exceptions.Abort:
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except SlurmftError as error:
        click.echo(f"slurmft: {error}", err=True)
        code = error.exit_code
    except BrokenPipeError:  # `slurmft explain | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:
        logging.getLogger(__name__).debug("traceback", exc_info=True)
        text = f"slurmft: internal error: {error!r}\n  hint: please report this; run with -v for the traceback"
        click.echo(text, err=True)
        code = 70
    sys.exit(code if isinstance(code, int) else 0)
