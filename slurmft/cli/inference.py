"""``slurmft infer``, ``serve`` and ``endpoint``: a batch of requests, and a model that is served."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from slurmft.cli.arguments import Amount, own_run_argument
from slurmft.cli.main import say
from slurmft.cli.submit import submit_run
from slurmft.errors import UsageError
from slurmft.operations.run_configuration import load_given
from slurmft.operations.submit import read_requests
from slurmft.storage.run_folder import RunFolder

# --- ``slurmft infer`` ---

TOLD_EVERY = 100_000


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("sbatch_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print exactly what would be submitted, and change nothing.")
@click.option("--wait", is_flag=True, help="Show progress until the run ends; exit with the run's exit code.")
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default="auto", show_default=True,
              help="Where to run; auto: Slurm where its commands are, else this machine.")  # fmt: skip
@click.option("-i", "--input-file", type=click.Path(path_type=Path, allow_dash=True), metavar="FILE",
              help="The requests, in place of inference.input; - is standard input.")  # fmt: skip
@click.option("-o", "--output-file", type=click.Path(path_type=Path), metavar="PATH",
              help="In place of inference.output: one file (.jsonl, .parquet) or a folder.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override one key, such as inference.concurrency=8.")  # fmt: skip
def infer(
    *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, wait: bool, cluster: str,
    overrides: tuple[str, ...], input_file: Path | None, output_file: Path | None,
) -> int:  # fmt: skip
    """Answer a batch of requests, or continue one that has stopped. Options behind -- go to sbatch.

    The requests are read and checked first; nothing is submitted when one of them is none.
    """
    given = {"input": input_file, "output": output_file}
    paths = {name: path if str(path) == "-" else path.absolute() for name, path in given.items() if path is not None}
    overrides += tuple(f"inference.{name}={json.dumps(str(path))}" for name, path in paths.items())
    settings = load_given(config, overrides)
    if settings.inference is None:
        raise UsageError(f"{config} has no section inference", hint="slurmft submit trains")
    if settings.inference.serving is not None:
        raise UsageError(f"{config} is of an endpoint and names no requests", hint="slurmft serve submits it")
    if not dry_run and (found := read_requests(settings, _tell)) is not None:
        bad = f", {found.bad} lines are none and will be in errors.jsonl" if found.bad else ""
        say(f"{found.total} requests{bad}")
    return submit_run(settings, sbatch_options, dry_run=dry_run, strict=False, wait=wait, cluster=cluster)


def _tell(count: int) -> None:
    if count % TOLD_EVERY == 0:
        say(f"{count} requests read", err=True)


# --- ``slurmft serve`` and ``slurmft endpoint`` ---

MAX_TIMEOUT_S = 366 * 86_400


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("sbatch_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print exactly what would be submitted, and change nothing.")
@click.option("--wait", is_flag=True, help="Show progress until the run ends; exit with the run's exit code.")
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default="auto", show_default=True,
              help="Where to run; auto: Slurm where its commands are, else this machine.")  # fmt: skip
@click.option("--update", is_flag=True, help="Give the endpoint that runs the engine of CONFIG, replica by replica, "
              "and wait for the end; it goes back when one does not become ready.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override one key, such as inference.serving.routers=1.")  # fmt: skip
def serve(
    *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, wait: bool, cluster: str,
    update: bool, overrides: tuple[str, ...],
) -> int:  # fmt: skip
    """Serve a model: submit an endpoint, or continue one that has stopped. Options behind -- go to sbatch."""
    settings = load_given(config, overrides)
    if settings.inference is None or settings.inference.serving is None:
        raise UsageError(f"{config} has no section inference.serving", hint="slurmft infer answers a batch")
    if update:
        from slurmft.operations.endpoint import engine_keys, update_engine

        if sbatch_options or wait or cluster != "auto":
            raise UsageError("--update takes no options of a submission", hint="only --dry-run and --set")
        if dry_run:
            say(f"would change: {', '.join(engine_keys(settings))}")
            return 0
        say(update_engine(settings, say))
        return 0
    if not dry_run:
        from slurmft.operations.endpoint import prepare_endpoint

        folder, headers = (shlex.quote(str(path)) for path in (settings.run_folder, prepare_endpoint(settings)))
        own = f'--cacert "$(slurmft endpoint {folder} --ca-file)" ' if settings.inference.serving.tls_own else ""
        say(f'test it with: curl {own}-H @{headers} "$(slurmft endpoint {folder} --timeout 600)/v1/models"')
    return submit_run(settings, sbatch_options, dry_run=dry_run, strict=False, wait=wait, cluster=cluster)


@click.command()
@own_run_argument
@click.option("--header-file", is_flag=True, help="Print the path of a file with the header that has the token, for "
              "curl -H @FILE, instead.")  # fmt: skip
@click.option("--ca-file", "ca", is_flag=True, help="Print the path of the certificate to trust, for curl --cacert, "
              "where the endpoint makes its own (inference.serving.tls_own), instead.")  # fmt: skip
@click.option("--timeout", default=0.0, type=Amount(0, MAX_TIMEOUT_S), show_default=True,
              help="Seconds to wait until a router takes connections.")  # fmt: skip
@click.option("--forward", type=click.IntRange(0, 65_535), metavar="PORT", help="Listen at this port of 127.0.0.1 (0: "
              "a free one) until interrupted, and pass each connection on to a router that lives.")  # fmt: skip
def endpoint(*, run: RunFolder, header_file: bool, ca: bool, timeout: float, forward: int | None) -> int:
    """Print the address of a router of the endpoint RUN that lives."""
    from slurmft.inference.endpoint import ca_file, headers_file
    from slurmft.operations.endpoint import living_url

    if not (headers := headers_file(run.path)).is_file():
        raise UsageError(f"run {run.path.name} is no endpoint", hint="slurmft serve starts one")
    if ca:
        if not (path := ca_file(run.path)).is_file():
            raise UsageError(f"run {run.path.name} makes no certificates of its own", hint="inference.serving.tls_own")
        say(str(path))
        return 0
    if forward is not None:
        return _forward(run, forward, living_url(run, within_s=timeout).partition(":")[0])
    say(str(headers) if header_file else living_url(run, within_s=timeout))
    return 0


def _forward(run: RunFolder, port: int, scheme: str) -> int:
    import asyncio

    from slurmft.inference.forwarder import Forwarder

    try:
        asyncio.run(Forwarder(run.path).serve(port, lambda found: say(f"{scheme}://127.0.0.1:{found}")))
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        raise UsageError(f"port {port} cannot be used: {error.strerror or error}") from error
    return 0
