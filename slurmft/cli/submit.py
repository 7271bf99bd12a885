"""The verbs that begin a run, and what they take: ``slurmft submit``, ``infer``, ``serve``, ``endpoint``,
``quickstart``, ``schema``, ``init``, ``examples``, ``sbatch``, ``launch``, ``ft-launch`` and ``trials``; and the
processes of its job: ``run``, ``agent``, ``companion``, with ``metrics``, which the last one publishes.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

import slurmft.examples
from slurmft.cli import arguments
from slurmft.cli.main import say, say_block, say_error, say_json
from slurmft.errors import UsageError
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import mode_of_shown_files, read_text, replace_atomically
from slurmft.system.processes import who, without_collections

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slurmft.config.run import RunConfig
    from slurmft.ipc.zygote_start import Zygote
    from slurmft.operations.submit import Submitted

# --- ``slurmft submit`` ---


def submission_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What each verb that submits a run takes."""
    parameters = (
        arguments.config_argument,
        click.argument("sbatch_options", nargs=-1, type=click.UNPROCESSED),
        click.option("--dry-run", is_flag=True, help="Print exactly what would be submitted, and change nothing."),
        arguments.wait_option,
        arguments.cluster_option,
    )  # fmt: skip
    for each in reversed(parameters):
        function = each(function)
    return function


@click.command(context_settings={"ignore_unknown_options": False})
@submission_options
@click.option("--strict", is_flag=True, help="Refuse to submit when a stop would not have the time for its save.")
@click.option("--unchecked", is_flag=True, help="Do not look here for the command's program, script and packages: only "
              "the nodes have them.")  # fmt: skip
@arguments.set_option("Override one key, such as slurm.time=30.")
@click.option("--data", help="Text file or folder to train on: added to the command as --data.")
def submit(
    *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, strict: bool, wait: bool, cluster: str,
    overrides: tuple[str, ...], data: str | None, unchecked: bool = False,
) -> int:  # fmt: skip
    """Submit a run, or continue one that has stopped. Options behind -- go to sbatch."""
    from slurmft.operations.run_configuration import load_given

    settings = load_given(config, overrides)
    if data is not None:
        if not Path(data).exists():
            raise UsageError(f"--data: there is no {data}")
        settings = settings.model_copy(update={"command": (*settings.command, "--data", str(Path(data).absolute()))})
    return submit_run(settings, sbatch_options, dry_run=dry_run, strict=strict, wait=wait, cluster=cluster,
                      unchecked=unchecked)  # fmt: skip


def submit_run(
    settings: RunConfig, sbatch_options: tuple[str, ...], *, dry_run: bool, strict: bool, wait: bool, cluster: str,
    unchecked: bool = False,
) -> int:  # fmt: skip
    """Submit the run that ``settings`` describe, as the options of ``slurmft submit`` say; returns the exit code."""
    from slurmft.operations import submit as submitting

    def tell(line: str) -> None:
        say(line, err=True)

    if dry_run:
        say_block(submitting.plan(settings, sbatch_options, strict=strict, cluster=cluster, tell=tell,
                                  unchecked=unchecked))  # fmt: skip
        return 0
    made = submitting.submit_run(settings, sbatch_options, strict=strict, cluster=cluster, who=who(),
                                 command=" ".join(sys.argv), tell=tell, unchecked=unchecked)  # fmt: skip
    return follow_made(settings, made, wait=wait)


def follow_made(settings: RunConfig, made: Submitted, *, wait: bool) -> int:
    """Say what was submitted; with ``wait`` show its progress, and return the run's exit code, else 0."""
    is_slurm = made.where == "slurm"
    say(f"submitted {settings.name} as job {made.job}" if is_slurm else f"started {settings.name} ({made.job})")
    say(f"run folder: {made.run.path}")
    if wait:
        from slurmft.cli.status import follow

        return follow(made.run, told=made.before, stop_on_interrupt=not is_slurm)
    say(f"watch it with: slurmft status {made.run.path} --watch", err=True)
    return 0


# --- ``slurmft infer`` ---

TOLD_EVERY = 100_000


@click.command(context_settings={"ignore_unknown_options": False})
@submission_options
@click.option("-i", "--input-file", type=click.Path(path_type=Path, allow_dash=True), metavar="FILE",
              help="The requests, in place of inference.input; - is standard input.")  # fmt: skip
@click.option("-o", "--output-file", type=arguments.PATH, metavar="PATH",
              help="In place of inference.output: one file (.jsonl, .parquet) or a folder.")  # fmt: skip
@arguments.set_option("Override one key, such as inference.concurrency=8.")
def infer(
    *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, wait: bool, cluster: str,
    overrides: tuple[str, ...], input_file: Path | None, output_file: Path | None,
) -> int:  # fmt: skip
    """Answer a batch of requests, or continue one that has stopped. Options behind -- go to sbatch.

    The requests are read and checked first; nothing is submitted when one of them is none.
    """
    from slurmft.operations.run_configuration import load_given
    from slurmft.operations.submit import read_requests

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


@click.command(context_settings={"ignore_unknown_options": False})
@submission_options
@click.option("--update", is_flag=True, help="Give the endpoint that runs the engine of CONFIG, replica by replica, "
              "and wait for the end; it goes back when one does not become ready.")  # fmt: skip
@arguments.set_option("Override one key, such as inference.serving.routers=1.")
def serve(
    *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, wait: bool, cluster: str,
    update: bool, overrides: tuple[str, ...],
) -> int:  # fmt: skip
    """Serve a model: submit an endpoint, or continue one that has stopped. Options behind -- go to sbatch."""
    from slurmft.operations.run_configuration import load_given

    settings = load_given(config, overrides)
    if settings.serving is None:
        raise UsageError(f"{config} has no section inference.serving", hint="slurmft infer answers a batch")
    if update:
        from slurmft.operations.endpoints import engine_keys, update_engine

        if sbatch_options or wait or cluster != "auto":
            raise UsageError("--update takes no options of a submission", hint="only --dry-run and --set")
        if dry_run:
            say(f"would change: {', '.join(engine_keys(settings))}")
            return 0
        say(update_engine(settings, say))
        return 0
    if not dry_run:
        from slurmft.operations.endpoints import prepare_endpoint

        folder, headers = (shlex.quote(str(path)) for path in (settings.run_folder, prepare_endpoint(settings)))
        own = f'--cacert "$(slurmft endpoint {folder} --ca-file)" ' if settings.serving.tls_own else ""
        say(f'test it with: curl {own}-H @{headers} "$(slurmft endpoint {folder} --timeout 600)/v1/models"')
    return submit_run(settings, sbatch_options, dry_run=dry_run, strict=False, wait=wait, cluster=cluster)


@click.command()
@arguments.own_run_argument
@click.option("--header-file", is_flag=True, help="Print the path of a file with the header that has the token, for "
              "curl -H @FILE, instead.")  # fmt: skip
@click.option("--ca-file", "ca", is_flag=True, help="Print the path of the certificate to trust, for curl --cacert, "
              "where the endpoint makes its own (inference.serving.tls_own), instead.")  # fmt: skip
@click.option("--timeout", default=0.0, type=arguments.Amount(0, arguments.MAX_TIMEOUT_S), show_default=True,
              help="Seconds to wait until a router takes connections.")  # fmt: skip
@click.option("--forward", type=click.IntRange(0, 65_535), metavar="PORT", help="Listen at this port of 127.0.0.1 (0: "
              "a free one) until interrupted, and pass each connection on to a router that lives.")  # fmt: skip
def endpoint(*, run: RunFolder, header_file: bool, ca: bool, timeout: float, forward: int | None) -> int:
    """Print the address of a router of the endpoint RUN that lives."""
    from slurmft.inference.endpoint import ca_file, headers_file
    from slurmft.operations.endpoints import living_url

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

    from slurmft.operations.forwarding import Forwarder

    try:
        asyncio.run(Forwarder(run.path).serve(port, lambda found: say(f"{scheme}://127.0.0.1:{found}")))
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        raise UsageError(f"port {port} cannot be used: {error.strerror or error}") from error
    return 0


# --- ``slurmft quickstart`` ---

EXAMPLES = Path(slurmft.examples.__path__[0])
CONFIG = EXAMPLES / "quickstart.yaml"
INFER_CONFIG = EXAMPLES / "quickstart_infer.yaml"
PROMPTS, KILL_AFTER = 200, 40


@click.command()
@click.option("--cluster", type=arguments.CLUSTERS, default="local", show_default=True,
              help="Where to train; auto: Slurm where its commands are, else this machine.")  # fmt: skip
@click.option("--data", help="Text file or folder to train on; default: Python's own standard library.")
@click.option("--infer", is_flag=True, help="Let the trained GPT answer 200 prompts on two replicas of this machine, "
              "one of which is killed on the way; it is trained first where no quickstart has.")  # fmt: skip
@click.pass_context
def quickstart(context: click.Context, *, cluster: str, data: str | None, infer: bool) -> int:
    """Train a small GPT, with live progress: about a minute, no Slurm and no GPU needed.

    The run's folder is made below runs/ in the current folder. The configuration is one to copy from.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError("the quickstart trains with torch, which is not installed here", hint="pip install torch")
    # `make quickstart` activates no environment, and the example trains with what is installed in this one
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return _infer(context, cluster, data) if infer else _train(context, cluster, data)


def _train(context: click.Context, cluster: str, data: str | None) -> int:
    folder = _new_folder("quickstart")
    say(f"slurmft submit {CONFIG} --cluster {cluster} --wait --set run_folder={folder}", err=True)
    code: int = context.invoke(
        submit, config=CONFIG, sbatch_options=(), dry_run=False, strict=False, wait=True, cluster=cluster,
        overrides=(f"run_folder={folder}",), data=data,
    )  # fmt: skip
    return code


def _infer(context: click.Context, cluster: str, data: str | None) -> int:
    from slurmft.operations import submit as submitting

    if (model := submitting.trained_model(Path("runs"))) is None:
        if code := _train(context, cluster, data):
            return code
        model = submitting.trained_model(Path("runs"))
    run = RunFolder(_new_folder("infer"))
    run.create()
    requests = run.path / "requests.jsonl"
    submitting.write_prompts(requests, PROMPTS)
    settings = {"run_folder": run.path, "inference.input": requests, "environment.BYTE_GPT_CHECKPOINTS": model}
    overrides = tuple(f"{key}={value}" for key, value in settings.items())
    words = " ".join(f"--set {each}" for each in overrides)
    say(f"slurmft infer {INFER_CONFIG} --cluster local --wait {words}", err=True)
    killer = submitting.ReplicaKiller(run, KILL_AFTER)
    killer.start()
    try:
        code = context.invoke(infer, config=INFER_CONFIG, sbatch_options=(), dry_run=False, wait=True,
                              cluster="local", overrides=overrides)  # fmt: skip
    finally:
        killer.stop()
    if code:
        return int(code)
    for name, value in submitting.summary_of(run, killer.killed).items():
        say(f"  {name:<16} {value}")
    return 0


def _new_folder(name: str) -> Path:
    return Path("runs") / f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


# --- ``slurmft schema``: the JSON schema of a configuration ---


@click.command()
def schema() -> int:
    """Print the JSON schema of a configuration, for editors."""
    say_json(configuration_schema(), indent=2)
    return 0


def configuration_schema() -> dict[str, Any]:
    """The JSON schema of a configuration, with the documentation of its keys."""
    from slurmft.config.run import RunConfig

    value = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
    texts: dict[tuple[str, str], str] = {}
    models = _models()
    for source in {Path(inspect.getfile(model)) for model in models}:
        texts |= _texts(source.read_text(encoding="utf-8"))
    parts = {**value["$defs"], RunConfig.__name__: value}
    for model in models:
        for key, facts in parts[model.__name__].get("properties", {}).items():
            if text := texts.get((model.__name__, key)):
                facts["description"] = text
    of_functions = {"required": ["trials"], "properties": {"trials": {"type": "object", "required": ["callable"]}}}
    value["oneOf"] = [{"required": ["command"]}, {"required": ["inference"]}, of_functions]
    return value


def _models() -> list[type[BaseModel]]:
    """The configuration, its sections, and the parts of these."""
    from slurmft.config.run import RunConfig

    found: list[type[BaseModel]] = [RunConfig]
    for model in found:  # grows meanwhile
        found += [
            part for field in model.model_fields.values() for part in _parts(field.annotation) if part not in found
        ]
    return found


def _parts(annotation: Any) -> list[type[BaseModel]]:
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [part for each in get_args(annotation) for part in _parts(each)]


def _texts(source: str) -> dict[tuple[str, str], str]:
    """(class, attribute) -> the string below it.

    pydantic would read them too, but every time a configuration is loaded, which costs a submission 15 ms.
    """
    found = {}
    for model in [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]:
        for before, node in zip(model.body, model.body[1:], strict=False):
            match before, node:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[model.name, name] = inspect.cleandoc(text)
    return found


_PLACES = ("*.py", "*.yaml", "sbatch/*.*", "configs/*.*", "configs/*/*.*")

# --- ``slurmft init`` ---

_PYTHON = "python is the one that your shell finds; another one is named by its path"


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGUMENTS]...]")
@click.option("-o", "--output", type=arguments.PATH, help="File to write; default: NAME.yaml here.")
@click.option("--run-folder", help="Folder of the run, whose last part is its name; default: one below SLURMFT_RUNS.")
@click.option("--nodes", type=click.IntRange(1, 100_000), help="Nodes; default: 1.")
@click.option("--gpus", type=click.IntRange(0, 1024), help="GPUs of each node, with a worker each; default: 0, one "
              "worker on the CPU.")  # fmt: skip
@click.option("--partition", help="Slurm's partition; default: the cluster's own.")
@click.option("--time", "limit", help="Time limit of one job, as sbatch takes it; the run may need many: 4:00:00.")
@click.option("-y", "--yes", is_flag=True, help="Ask nothing: what no option says is the default.")
def init(
    *, command: tuple[str, ...], output: Path | None, run_folder: str | None, nodes: int | None, gpus: int | None,
    partition: str | None, limit: str | None, yes: bool,
) -> int:  # fmt: skip
    """Write a short configuration for a script, to be changed by hand and submitted.

    On a terminal it asks for what no option says. A file that is there is not replaced.
    """
    from slurmft.config.base import parsed
    from slurmft.config.run import from_values

    asks = sys.stdin.isatty() and not yes
    if not command:
        if not asks:
            raise UsageError("which script?", hint="slurmft init --gpus 8 train.py --steps 1000")
        command = _words(click.prompt("script, with its arguments"))
    stem = Path(next((word for word in command if word.endswith(".py")), command[0])).stem
    name = re.sub(r"[^\w.-]+", "-", stem).lstrip("-.") or "run"
    if _is_batch_script(Path(command[0])):
        raise UsageError(f"{command[0]} is a batch script, which runs as it is",
                         hint=f"slurmft sbatch {shlex.quote(command[0])}")  # fmt: skip
    if program := {".py": "python", ".sh": "bash"}.get(Path(command[0]).suffix):
        command = (program, *command)
    given: dict[str, tuple[Any, str, Any]] = {
        "nodes": (nodes, "nodes", 1),
        "gpus": (gpus, "GPUs of each node", 0),
        "partition": (partition, "partition (empty: the cluster's own)", ""),
        "limit": (limit, "time limit of one job", "4:00:00"),
        "run_folder": (
            run_folder,
            "folder of the run, which all nodes see",
            str(arguments.runs_root().absolute() / name),
        ),
    }
    answers: dict[str, Any] = {}
    for key, (value, question, default) in given.items():
        asked = click.prompt(question, default=default) if asks and value is None else default
        answers[key] = asked if value is None else value
    text = _configuration(command, **answers)
    from_values(parsed(text, of="the configuration"), source="slurmft init")  # refuses what would not be submitted
    path = output or Path(f"{name}.yaml")
    if os.path.lexists(path):
        raise UsageError(f"there is {path} already", hint="name another file with --output, or move it away")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", hint="name another file with --output, or make it")
    replace_atomically(path, text, mode=mode_of_shown_files(), durable=False)
    word = shlex.quote(str(path))
    say(f"wrote {path}; next: slurmft doctor {word}, then slurmft submit {word}")
    return 0


def _is_batch_script(path: Path) -> bool:
    try:
        return path.suffix != ".py" and "\n#SBATCH" in read_text(path, errors="replace")
    except (OSError, ValueError):
        return False


def _words(line: str) -> tuple[str, ...]:
    """As a shell splits them."""
    try:
        return tuple(shlex.split(line))
    except ValueError as error:
        raise UsageError(f"{line!r} is no command: {error}", hint="close the quotes") from error


def _configuration(
    command: tuple[str, ...], *, nodes: int, gpus: int, partition: str, limit: str, run_folder: str
) -> str:
    words = ", ".join(json.dumps(word) for word in command)
    slurm = {"partition": partition, "time": limit, "gpus_per_node": gpus}
    options = "\n".join(f"  {key}: {json.dumps(value)}" for key, value in slurm.items() if value)
    return f"""\
# All keys, each with its default: slurmft examples reference.yaml

command: [{words}]  # {_PYTHON}
run_folder: {json.dumps(run_folder)}  # on a filesystem that all nodes share; its last part is the run's name
nodes: {nodes}
nproc_per_node: {gpus or 1}  # workers of each node{", one for each GPU" if gpus else ""}

checkpoint:
  interval_steps: 500  # for scripts that save with slurmft; the others save as they do without it

slurm:  # sbatch's long options, with _ for -
{options}
"""


# --- ``slurmft examples`` ---


@click.command()
@click.argument("name", required=False)
@click.option("--path", "only_path", is_flag=True, help="Print where it lies, instead of what is in it.")
def examples(*, name: str | None, only_path: bool) -> int:
    """Print the file NAME that comes with slurmft, or list all: configurations, alerts, dashboards, a batch script."""
    files = {path.name: path for place in _PLACES for path in sorted(EXAMPLES.glob(place)) if path.stem != "__init__"}
    if name is None:
        for each, path in sorted(files.items()):
            say(f"{each:<22} {path}" if only_path else f"{each:<22} {_purpose(path)}")
        return 0
    if name not in files:
        from slurmft.policy.values import did_you_mean, shown

        raise UsageError(f"no file {shown(name)} comes with slurmft{did_you_mean(name, sorted(files))}",
                         hint="slurmft examples lists them")  # fmt: skip
    if only_path:
        say(str(files[name]))
    else:
        say_block(read_text(files[name]).removesuffix("\n"))
    return 0


def _purpose(path: Path) -> str:
    """The first sentence of its first comment, or of its docstring."""
    if path.suffix == ".json":
        return "the schema of a configuration, for editors" if path.stem == "schema" else "a dashboard for Grafana"
    lines = [line for line in read_text(path).splitlines() if not line.startswith(("#!", "# yaml-language"))]
    words = (line.strip('#" ').removeprefix("Purpose: ") for line in lines)
    found = next(filter(None, words), "")
    return re.split(r"[.:](?: |$)|, so that", found)[0]


# --- ``slurmft sbatch``: the batch script that one has, submitted as it is; and what it launches, in the job ---

# no -h: click would find it in sbatch's -Jhello
_AS_GIVEN = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}


@click.command(context_settings=_AS_GIVEN)
@click.option("--again", is_flag=True, help="Repeat launches that have finished in an earlier start of the job.")
@arguments.set_option("Set one key of the configuration of each run, such as checkpoint.interval_steps=50.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF SBATCH] SCRIPT [ARGUMENTS]...")
def sbatch(*, again: bool, overrides: tuple[str, ...], words: tuple[str, ...]) -> int:
    """Submit the batch script that you have, as sbatch would; what it launches is supervised.

    Takes what sbatch takes: its options, #SBATCH lines and variables, --wrap, a script from standard input. Only where
    you set nothing, --requeue, --open-mode=append and --signal=USR2@120 are added. The options below come first.

    In the job the script runs as it is. A launch that trains is restarted where ranks or nodes fail, and goes on
    through the queue: torchrun, ft_launcher, python -m torch.distributed.run, accelerate launch, deepspeed, and srun
    where its command runs a Python program. SLURMFT=off in front of a launch, or #SLURMFT off above it, leaves it
    alone; SLURMFT=train and #SLURMFT train supervise any other command of these names, or of python.
    """
    from slurmft.operations.script import submit_script

    return submit_script(
        words, os.environ, overrides=overrides, again=again, tell=lambda line: say(f"slurmft: {line}", err=True)
    )


@click.command(hidden=True, context_settings=_AS_GIVEN)
@click.option("--last-word", is_flag=True)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def launch(*, last_word: bool, words: tuple[str, ...]) -> int:
    """Stand for a launcher of a batch script (called by the functions of slurmft/launchers)."""
    from slurmft.operations import script

    def tell(line: str) -> None:
        say(f"slurmft: {line}", err=True)

    if last_word:
        if word := script.last_word(os.environ):
            tell(word)
        return 0
    return script.launch(words[0], words[1:], os.environ, read_ranks=_ranks, tell=tell)


def _ranks(words: Sequence[str]) -> Mapping[str, Any]:
    from slurmft.compat import neighbours

    return neighbours.parse(words).settings


# --- ``slurmft convert``: what there is in its place ---


@click.command(context_settings=_AS_GIVEN)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT]")
def convert(*, words: tuple[str, ...]) -> int:
    """Say what to use instead: a batch script is not converted any more, it is run as it is."""
    script = words[0] if words else "job.sh"
    raise UsageError("batch scripts are not converted to configurations any more: they run as they are",
                     hint=f"slurmft sbatch {script}; slurmft init writes a configuration")  # fmt: skip


# --- ``slurmft ft-launch``: a command line of ``ft_launcher`` or torchrun becomes a run ---


@click.command(name="ft-launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[LAUNCHER OPTIONS] SCRIPT [ARGUMENTS]...")
@click.option("--run-folder", type=arguments.PATH,
              help="Folder of the run; default: runs/ and the --rdzv-id, or the script's name.")  # fmt: skip
@click.option("--cluster", type=arguments.CLUSTERS, default=None,
              help="Where to run; auto: Slurm where its commands are, else this machine. "
              "Default: local with --standalone, else auto.")  # fmt: skip
@arguments.set_option("Set one key, such as slurm.time=30.")
@click.option("--print-config", is_flag=True, help="Print the configuration for slurmft submit, and change nothing.")
@click.option("--dry-run", is_flag=True, help="Print exactly what would be submitted, and change nothing.")
@arguments.wait_option
def ft_launch(
    *, words: tuple[str, ...], run_folder: Path | None, cluster: str | None, overrides: tuple[str, ...],
    print_config: bool, dry_run: bool, wait: bool,
) -> int:  # fmt: skip
    """Submit a run by the command line of ft_launcher or torchrun.

    Called once, and not on every node. Takes torchrun's options (--nnodes, --nproc-per-node, --max-restarts, -m, ...)
    and --ft-* or --ft-param-* of nvidia-resiliency-ext behind the options below. Options without a counterpart are
    named.
    """
    from slurmft.compat import neighbours
    from slurmft.config.run import from_values
    from slurmft.scheduler.slurm import known_options

    if "SLURM_PROCID" in os.environ:
        raise UsageError("this is inside of a job, where each task would submit a run of its own",
                         hint="call slurmft ft-launch once, where you would call sbatch")  # fmt: skip
    launch = neighbours.parse(words)
    for remark in launch.remarks:
        if not remark.startswith("FaultToleranceConfig"):  # which has said it
            say(f"ft-launch: {remark}", err=True)
    values = {**launch.settings, **({"run_folder": str(run_folder)} if run_folder is not None else {})}
    settings = from_values(values, overrides, source="ft-launch", known_here=known_options)
    if print_config:
        say_block(settings.as_yaml())
        return 0
    return submit_run(
        settings, (), dry_run=dry_run, strict=False, wait=wait,
        cluster=cluster or ("local" if launch.standalone else "auto"),
    )  # fmt: skip


# --- ``slurmft trials``: a sweep, what has come of it, and failed trials again ---


class _Trials(click.Group):
    """What is no verb of this group is the CONFIG of a sweep."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["submit", *args])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_option = bool(args) and args[0].startswith("-") and args[0] not in ("--help", "-h")
        return super().parse_args(ctx, ["submit", *args] if is_option else args)


@click.group(cls=_Trials, subcommand_metavar="CONFIG | results RUN | retry RUN --failed")
def trials() -> None:
    """Run each trial of a sweep once, or go on with one that has stopped: slurmft trials CONFIG.

    A sweep that is there gets the trials that are new. Options behind -- go to sbatch.
    """


@trials.command("submit", context_settings={"ignore_unknown_options": False})
@submission_options
@arguments.set_option("Override one key, such as trials.max_jobs=8.")
def submit_sweep(
    *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, wait: bool, cluster: str,
    overrides: tuple[str, ...],
) -> int:  # fmt: skip
    """Submit the sweep that CONFIG describes, or add what is new."""
    from slurmft.operations.run_configuration import load_given

    settings = load_given(config, overrides)
    if settings.trials is None:
        raise UsageError(f"{config} has no section trials", hint="slurmft submit trains")
    if dry_run:
        return submit_run(settings, sbatch_options, dry_run=True, strict=False, wait=False, cluster=cluster)
    return _add_trials(settings, sbatch_options, cluster=cluster, wait=wait, retry=False)


@trials.command()
@arguments.own_run_argument
@click.option("--failed", is_flag=True, required=True, help="Those that have failed.")
@arguments.wait_option
@arguments.cluster_option
def retry(*, run: RunFolder, failed: bool, wait: bool, cluster: str) -> int:
    """Run trials of RUN again, each in its folder."""
    from slurmft.operations.run_configuration import configuration_of

    assert failed
    return _add_trials(configuration_of(run), (), cluster=cluster, wait=wait, retry=True)


@trials.command()
@arguments.run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each trial, a line each.")
@click.option("--csv", "as_csv", is_flag=True, help="A table, with a column for each parameter.")
@click.option("--parquet", type=arguments.PATH, metavar="FILE", help="Write a Parquet file.")
def results(*, run: RunFolder, as_json: bool, as_csv: bool, parquet: Path | None) -> int:
    """Print what has come of the trials of RUN so far; without an option only how many."""
    from slurmft.inference.trials import rows, write_csv, write_parquet

    if as_json + as_csv + (parquet is not None) > 1:
        raise UsageError("give one of --json, --csv and --parquet")
    found = rows(run.path)
    if as_json:
        for row in found:
            say(json.dumps(row, ensure_ascii=False))
    elif as_csv:
        write_csv(found, sys.stdout)
    elif parquet is not None:
        write_parquet(found, parquet)
    else:
        counts = Counter(row["state"] for row in found)
        say_json({state: counts[state] for state in ("done", "failed", "open")})
    return 0


def _add_trials(settings: Any, sbatch_options: tuple[str, ...], *, cluster: str, wait: bool, retry: bool) -> int:
    from slurmft.operations.submit import submit_trials

    sweep = submit_trials(settings, sbatch_options, cluster=cluster, who=who(), command=" ".join(sys.argv),
                          tell=lambda line: say(line, err=True), retry=retry)  # fmt: skip
    run, added = RunFolder(settings.run_folder), sweep.added
    say(f"{added.new} trials added, {added.known} were there")
    if sweep.is_finished:
        say(f"the sweep is finished; see slurmft trials results {run.path}")
        return 0
    if sweep.made is not None:
        return follow_made(settings, sweep.made, wait=wait)
    say("the sweep runs, or waits, already")
    say(f"run folder: {run.path}")
    if wait:
        from slurmft.cli.status import follow

        return follow(run, told=len(run.journal().read()), stop_on_interrupt=False)
    return 0


# --- ``slurmft run``, a job's supervisor, and ``slurmft agent``, a node's agent: the processes of a run ---


@click.command()
@arguments.config_argument
@click.option(
    "--after-loss",
    type=click.IntRange(1, 64),
    hidden=True,
    help="Act in the place of a supervisor that this signal ended.",
)
def run(*, config: Path, after_loss: int | None) -> int:
    """Run the supervisor of one job (called by the batch script)."""
    # before the fork: the guardian may need it when files cannot be read any more
    with without_collections():
        from slurmft.operations.run_configuration import load_given, refuse_foreign_configuration
        from slurmft.supervisor.agents import outliving
        from slurmft.supervisor.guardian import guarded

    refuse_foreign_configuration(config)
    settings = functools.cache(lambda: load_given(config))
    outlives = functools.cache(lambda: outliving(settings()))

    def spares(pid: int) -> bool:
        return outlives()(pid)  # the configuration is read when a supervisor is lost, and not before

    guarded([sys.executable, "-P", "-u", "-m", "slurmft", "run", str(config), "--after-loss"], spares=spares)
    with without_collections():
        from slurmft.supervisor.run import recover, supervise

    if after_loss is not None:
        return recover(settings(), os.environ, after_loss)
    return supervise(settings(), os.environ)


@click.command(hidden=True)
@arguments.config_argument
@click.argument("attempt")
@click.pass_obj
def agent(begun: Zygote | None, *, config: Path, attempt: str) -> int:
    """Run one node's agent (started by the supervisor with srun)."""
    import asyncio

    with without_collections():
        from slurmft.agent import container as agent_container
        from slurmft.agent.agent import serve
        from slurmft.operations.run_configuration import load_given, refuse_foreign_configuration

    refuse_foreign_configuration(config)
    settings = load_given(config)
    if (container := settings.contained()) is None:
        return asyncio.run(serve(settings, attempt, os.environ, begun))
    agent_container.become_first_process()
    environment = agent_container.usable_environment(os.environ, os.uname().nodename)
    agent_container.refuse_unusable(container, attempt, environment)
    return asyncio.run(serve(settings, attempt, environment))


# --- ``slurmft metrics``: measured values, for Prometheus; ``slurmft companion``, which publishes a run's own ---


@click.command()
@arguments.optional_run_argument
@click.option(
    "--textfile",
    type=arguments.PATH,
    help="File for node_exporter's textfile collector (*.prom), replaced each time; instead of printing.",
)
@click.option(
    "--targets",
    type=arguments.PATH,
    help="File for Prometheus' file_sd_configs (*.json): where supervisors and routers are scraped.",
)
def metrics(*, run: RunFolder | None, textfile: Path | None, targets: Path | None) -> int:
    """Print or write measured values of RUN, or of all runs below SLURMFT_RUNS, as Prometheus reads them.

    For cron. A running job publishes its own by itself where its configuration has a section metrics.
    """
    from slurmft.reporting import metrics as reporting_metrics
    from slurmft.reporting.metrics import families, looks_at
    from slurmft.system.exposition import text

    runs = [run] if run is not None else arguments.every_run()
    looks, problems = looks_at(runs)
    for problem in problems:
        say_error(problem)
    try:
        if targets is not None:
            reporting_metrics.write_targets(targets, runs)
        if textfile is not None:
            reporting_metrics.write_textfile(textfile, families(looks))
    except OSError as error:
        raise UsageError(f"cannot write {textfile or targets}: {error.strerror}") from error
    if textfile is None and targets is None:
        say_block(text(families(looks)).rstrip("\n"))
    return 1 if problems else 0


@click.command(hidden=True)
@arguments.config_argument
def companion(*, config: Path) -> int:
    """Publish the metrics of a run and tell its events (started by the supervisor)."""
    from slurmft.operations.run_configuration import load_given, refuse_foreign_configuration
    from slurmft.reporting.metrics import accompany

    refuse_foreign_configuration(config)
    return accompany(load_given(config), os.environ)
