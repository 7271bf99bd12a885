"""Writes the reference pages that say what the code says: configuration, verbs and public names.

python docs/generate.py    (part of `make docs`; tests/docs/test_reference_pages.py fails when they are out of date)
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

import slurmft
from slurmft.cli import submit as schemas
from slurmft.cli.main import VERBS, cli
from slurmft.config.base import section_of
from slurmft.config.health import HealthConfig
from slurmft.config.run import RunConfig
from slurmft.policy import decide, life
from slurmft.policy.judge import WorkerEnd
from slurmft.policy.symptoms import SIGNATURES, Remedy, Signature
from slurmft.policy.verdict import Action, Cause, Decision, Suspect, Verdict

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
WIDTH = 120
MARK = "<!-- Written by docs/generate.py from the code: change it there, then run `make docs`. -->"
BY_OTHERS = {"Session"}
"""Classes that a program gets from a function instead of making them."""

NOT_FOR_TRAINERS = {"CheckpointManager.at_boundary", "CheckpointManager.rescue"}
"""Methods that only slurmft's own session calls."""

TEN = {
    "command": "what each worker runs",
    "run_folder": "where everything about the run is, on a filesystem that all nodes share; its last part is the name",
    "nodes": "how many nodes",
    "nproc_per_node": "workers of each node: one for each GPU",
    "checkpoint.interval_steps": "steps between two saves of a script that saves with slurmft",
    "checkpoint.keep_last_n": "how many checkpoints stay",
    "preemption.signal_lead_s": "seconds that a save at a time limit may take",
    "slurm.partition": "where the job runs, and so by what it is preempted",
    "slurm.time": "the time limit of one job; the run may need many",
    "spare_nodes": "nodes that wait to take the place of a lost one",
}
"""Key -> what it is for, at the head of the page."""

KINDS = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "array": "list",
         "object": "mapping", "null": "null"}  # fmt: skip


def main() -> None:
    for path, text in pages().items():
        (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Path below docs/ -> what belongs there."""
    return {
        "reference/configuration.md": _page("Configuration", _configuration()),
        "reference/verbs.md": _page("Verbs", _verbs()),
        "../packaging/man/slurmft.1": "\n".join(_manual()) + "\n",
        "reference/public-names.md": _page("Public names", _public_names()),
        "reference/causes.md": _page("Causes in text", _causes()),
        "concepts/life-of-an-attempt.md": _page("The life of an attempt", _life()),
        "images/life.svg": _picture_of_life(),
    }


def _page(title: str, blocks: Iterable[str]) -> str:
    return "\n\n".join([MARK, f"# {title}", *blocks]) + "\n"


def _paragraphs(text: str, indent: str = "") -> str:
    """Prose wrapped for reading as text, with Markdown's code marks instead of reStructuredText's."""
    text = re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(text))
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    wrap = {"width": WIDTH, "initial_indent": indent, "subsequent_indent": indent, "break_on_hyphens": False}
    return "\n\n".join(textwrap.fill(part, break_long_words=False, **wrap) for part in parts)  # type: ignore[arg-type]


# ---- configuration ---------------------------------------------------------------------------------------------------


def _configuration() -> Iterator[str]:
    yield _paragraphs(
        """Every key of a run's configuration, as `slurmft submit` reads it. Unknown keys are refused, with the nearest
        known one; units are in the names. `configs/reference.yaml` has the same keys as a file to copy from, and
        `configs/schema.json` (`slurmft schema`) lets an editor complete and check them.
        `--set checkpoint.keep_last_n=5` overrides one key for one submission.

        The [last part](#healthyaml) is the file of the health checks, which is not part of a run's configuration."""
    )
    facts = schemas.configuration_schema()
    top, sections = facts["properties"], []
    yield "## Ten keys that most runs need"
    rows = (f"| [`{key}`](#{key.replace('.', '')}) | {text} |" for key, text in TEN.items())
    yield "\n".join(["| key | what it says |", "|---|---|", *rows])
    yield "`slurmft init` writes a file with most of them. All others are advanced: their defaults should do."
    yield "## The run"
    for key, field in RunConfig.model_fields.items():
        if (model := section_of(field.annotation)) is not None:
            sections.append((key, model, top[key].get("description", "")))
        else:
            yield from _key(key, top[key], field, facts)
    for name, model, text in sections:
        yield f"## {name}"
        yield from _section(name, model, facts, text)
    yield from _health()


def _section(name: str, model: type[BaseModel], facts: Mapping[str, Any], text: str = "") -> Iterator[str]:
    part = facts["$defs"][model.__name__]
    yield _paragraphs("\n\n".join(filter(None, [part["description"], text])))
    for key, field in model.model_fields.items():
        if (inner := section_of(field.annotation)) is not None:
            yield f"### {name}.{key}"
            yield from _section(f"{name}.{key}", inner, facts)
        else:
            yield from _key(f"{name}.{key}", part["properties"][key], field, facts, level=3 + name.count("."))


def _health() -> Iterator[str]:
    texts = schemas._texts(Path(inspect.getfile(HealthConfig)).read_text(encoding="utf-8"))
    facts = HealthConfig.model_json_schema()

    def keys(model: type[BaseModel], above: str) -> Iterator[str]:
        part = facts if model is HealthConfig else facts["$defs"][model.__name__]
        for key, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield f"### {above}{key}"
                yield _paragraphs(inner.__doc__ or "")
                yield from keys(inner, f"{above}{key}.")
            else:
                described = {**part["properties"][key], "description": texts[model.__name__, key]}
                yield from _key(f"{above}{key}", described, field, facts, level=4)

    yield "## health.yaml"
    yield _paragraphs(
        """What `slurmft health`, Slurm's hooks and `slurmft sweep` read: `--config` or `--health`, else the file that
        `SLURMFT_HEALTH_CONFIG` names, else `/etc/slurmft/health.yaml`, else the defaults. `configs/health.yaml` is the
        same as a file to copy from."""
    )
    yield from keys(HealthConfig, "")


def _key(
    name: str, described: Mapping[str, Any], field: Any, facts: Mapping[str, Any], level: int = 3
) -> Iterator[str]:
    default = "required"
    if not field.is_required():
        default = f"default `{_as_yaml(field.get_default(call_default_factory=True, validated_data={}))}`"
    yield f"{'#' * level} `{name}`"
    yield f"{_kind(described, facts)}; {default}"
    yield _paragraphs(described.get("description", ""))


def _as_yaml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)


def _kind(described: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    if "$ref" in described:
        return _kind(facts["$defs"][described["$ref"].rpartition("/")[2]], facts)
    if "enum" in described:
        return "one of " + ", ".join(f"`{value}`" for value in described["enum"])
    if "const" in described:
        return f"`{described['const']}`"
    if "anyOf" in described:
        return " or ".join(_kind(each, facts) for each in described["anyOf"])
    kind = KINDS.get(described.get("type", ""), "any value")
    if kind == "text" and described.get("format") == "path":
        kind = "path"
    bounds = [
        f"{words} {described[key]:g}"
        for key, words in (("minimum", "at least"), ("ge", "at least"), ("exclusiveMinimum", "above"), ("gt", "above"),
                           ("maximum", "at most"), ("le", "at most"), ("exclusiveMaximum", "below"), ("lt", "below"))
        if key in described
    ]  # fmt: skip
    return " ".join([kind, ", ".join(bounds)]).strip()


# ---- verbs -----------------------------------------------------------------------------------------------------------


def _verbs() -> Iterator[str]:
    yield _paragraphs(
        """`slurmft VERB --help` prints the same. RUN is the path of a run folder, or a name below `runs`;
        `SLURMFT_RUNS` names another folder than `runs`. Verbs that only read (`status`, `logs`, `explain`, `advise`,
        `checkpoint list`, `verify` and `export`) show other users' runs as far as the file modes let them; all others
        refuse them ([security](../security.md)). `touch KILL` and `touch SAVE` in the run folder do what
        `stop` and `save` do.

        Exit codes that hold for all verbs are in [exit codes](exit-codes.md); those of a single verb stand with it."""
    )
    with click.Context(cli, info_name="slurmft", terminal_width=WIDTH) as root:
        rows = [f"| [`{name}`](#{_anchor(name)}) | {text} |" for name, (_, text) in sorted(VERBS.items())]
        yield "\n".join(["| verb | |", "|---|---|", *rows])
        for name in sorted(VERBS):
            command = cli.get_command(root, name)
            assert command is not None
            yield from _verb(command, root, name, level=2)


def _anchor(name: str) -> str:
    return f"slurmft-{name}"


def _verb(command: click.Command, above: click.Context, name: str, level: int) -> Iterator[str]:
    with click.Context(command, info_name=name, parent=above, terminal_width=WIDTH) as context:
        yield f"{'#' * level} slurmft {context.command_path.removeprefix('slurmft ')}"
        yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```"
        yield _paragraphs(command.help or "")
        records = (option.get_help_record(context) for option in command.get_params(context)
                   if isinstance(option, click.Option) and "--help" not in option.opts)  # fmt: skip
        rows = [f"| `{_cell(names)}` | {_prose(text)} |" for names, text in filter(None, records)]
        if rows:
            yield "\n".join(["| option | |", "|---|---|", *rows])
        if command.epilog:
            block = inspect.cleandoc(command.epilog.replace("\b\n", ""))
            yield f"```text\n{block}\n```"
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                if found is not None and not found.hidden:
                    yield from _verb(found, context, inner, level + 1)


def _manual() -> Iterator[str]:
    """The manual page, in the macros of man(7)."""
    yield from (
        f'.TH SLURMFT 1 "" "slurmft {slurmft.__version__}" "User Commands"', ".SH NAME",
        "slurmft \\- keep training and inference going on a Slurm cluster", ".SH SYNOPSIS",
        ".B slurmft", r"\fIVERB\fR [\fIOPTIONS\fR] [\fIARGUMENTS\fR]", ".SH VERBS",
    )  # fmt: skip
    with click.Context(cli, info_name="slurmft", terminal_width=WIDTH) as root:
        for name in sorted(VERBS):
            command = cli.get_command(root, name)
            assert command is not None
            yield from _verb_of_manual(command, root, name)
    yield from (
        ".SH FILES", ".TP", ".B runs/", "Runs that verbs find by name; SLURMFT_RUNS names another folder.",
        ".TP", r".B ~/.local/state/slurmft/", "The exclusion list and the index of runs.",
        ".SH SEE ALSO", ".BR sbatch (1), ", ".BR scontrol (1)",
    )  # fmt: skip


def _verb_of_manual(command: click.Command, above: click.Context, name: str) -> Iterator[str]:
    with click.Context(command, info_name=name, parent=above, terminal_width=WIDTH) as context:
        yield f".SS {_roff(' '.join([context.command_path, *command.collect_usage_pieces(context)]))}"
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            yield ".PP"
            yield _roff(paragraph.replace("\b", "").replace("``", ""))
        for option in command.get_params(context):
            if isinstance(option, click.Option) and (record := option.get_help_record(context)):
                yield f".TP\n.B {_roff(record[0])}"
                yield _roff(record[1].replace("``", "")) or "\\&"
        if command.epilog:
            yield f".PP\n.nf\n{_roff(inspect.cleandoc(command.epilog.replace(chr(8), '')), keep=True)}\n.fi"
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                if found is not None and not found.hidden:
                    yield from _verb_of_manual(found, context, inner)


def _roff(text: str, *, keep: bool = False) -> str:
    """Text that no line of is taken for a request; ``keep``: with its line ends."""
    lines = text.splitlines() if keep else [" ".join(text.split())]
    shown = [line.replace("\\", "\\e").replace("-", "\\-") for line in lines]
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in shown)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _prose(text: str) -> str:
    return _cell(re.sub(r"``(.+?)``", r"`\1`", text)).replace("<", "&lt;").replace("[", "\\[")


# ---- public names ----------------------------------------------------------------------------------------------------


def _public_names() -> Iterator[str]:
    yield _paragraphs(
        """Everything that `import slurmft` offers, and what [versioning](../architecture.md#what-is-public) covers.
        Names are loaded on first use, so `import slurmft` costs little and never imports torch. Beside these,
        `slurmft.health.HealthChecker` runs the [health checks](../how-to/sweep-and-hooks.md) inside of a program."""
    )
    homes: dict[str, str] = slurmft._HOMES
    errors = [name for name in homes if homes[name] == "slurmft.errors"]
    for name, home in homes.items():
        if name not in errors:
            yield from _name(name, home)
    yield "## slurmft.compat"
    yield _paragraphs(
        """Further names of other packages, which would be confused with others here: `from slurmft.compat import
        FaultTolerancePlugin`. [Come from another tool](../how-to/coming-from.md) says what each becomes."""
    )
    for name, home in slurmft.compat._HOMES.items():
        if isinstance(value := getattr(slurmft.compat, name), int):
            yield f"### {name}"
            yield f"The exit code {value}: [exit codes](exit-codes.md)."
        elif name not in homes:
            heading, *rest = _name(name, home)
            yield from (f"#{heading}", *rest)
    yield "## Errors"
    yield _paragraphs(
        """Every error that slurmft raises on purpose, with the exit code of a verb that ends with it. `what` is the
        message without its hint, `hint` says what to do."""
    )
    tree = (ast.get_docstring(_tree("slurmft.errors")) or "").partition("\n\n")[2]
    yield f"```text\n{tree.strip()}\n```"
    for name in errors:
        yield f"`{name}`\n:   {_paragraphs(_definition(name, homes[name])[1], indent='    ').strip()}"


# ---- causes in text --------------------------------------------------------------------------------------------------


def _causes() -> Iterator[str]:
    yield _paragraphs(
        """What slurmft makes of the words that programs, Slurm and the kernel print when something ends: in a rank's
        log or error file where it left nothing better, and in `slurmft.categorize_failure`. Of a log, the newest 1,000
        lines count. Lines of source that a traceback quotes do not, nor do remarks, nor errors after which the program
        went on. The first row that fits counts; what may be a peer's failure yields to anything else that is found.
        [Verdicts and exclusions](../concepts/verdicts-and-exclusions.md) says what outweighs which."""
    )
    yield "## What is right to do"
    yield "| word | meaning |\n|---|---|\n" + "\n".join(f"| {each.value} | {_meaning_of(each)} |" for each in Remedy)
    yield "## Signatures"
    yield _signatures([each for each in SIGNATURES if not each.is_loose])
    yield "## Words of people"
    yield _paragraphs(
        """They name the category of an exception, or of a text of one line, where no signature fits. No verdict is
        based on them."""
    )
    yield _signatures([each for each in SIGNATURES if each.is_loose])


def _meaning_of(remedy: Remedy) -> str:
    """The text below its line in the source."""
    [enum] = [node for node in _tree("slurmft.policy.symptoms").body if getattr(node, "name", "") == "Remedy"]
    assert isinstance(enum, ast.ClassDef)
    for line, text in itertools.pairwise(enum.body):
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == remedy.name and isinstance(text, ast.Expr):
            return " ".join(str(ast.literal_eval(text.value)).replace("``", "`").split())
    raise KeyError(remedy)


def _signatures(rows: Iterable[Signature]) -> str:
    lines = [
        "| what it is | category | cause of a verdict | suspected | right | printed by, for example |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        cause = "" if row.is_loose else row.cause.value
        example = row.patterns[0].replace("|", "\\|")
        what = f"{row.name} (or a peer's failure)" if row.is_echo else row.name
        lines.append(f"| {what} | {row.category.value} | {cause} | {row.suspected.value} | {row.remedy.value} | "
                     f"{row.source}: `` {example} `` |")  # fmt: skip
    return "\n".join(lines)


# ---- the life of an attempt ------------------------------------------------------------------------------------------

_EXAMPLES: tuple[life.Event, ...] = (
    life.Began(), life.LaunchFailed("x"), life.AgentEndedEarly("n0", "Exited"), life.AgentLost("n0", True, "x"),
    life.LostInStart(("n0",), "x"), life.StepEnded(), life.ProcessesEnded((1,), expected=False),
    life.WorkerEnded(WorkerEnd(rank=0, node="n0", code=1), all_ended=False),
    life.WorkerEnded(WorkerEnd(rank=0, node="n0", code=0), all_ended=True), life.Hung("x"), life.NodesBroken(("n0",)),
    life.Ended(), life.OwnSignal("SIGTERM"), life.EndingKnown("SIGTERM", is_ending=True), life.SignalDue("SIGTERM"),
    life.Signalled("SIGTERM", "n0"), life.CauseFound(Cause.PREEMPTED, 20.0, 0.0),
    life.Asked(Cause.REQUEUED_BY_USER, "x"), life.Noticed(Cause.RECLAIMED, "x", 60.0), life.TakenOver("x"),
    life.SlurmEnds(30.0),
)  # fmt: skip
"""One event of each kind; of a worker's end, a failure and the last one."""


def _spaced(kind: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", kind.__name__).lower()


def _moves() -> dict[tuple[life.Phase, life.Phase], list[str]]:
    """Two phases -> the events that lead from one to the other, as the machine does with an example of each."""
    found: dict[tuple[life.Phase, life.Phase], list[str]] = {}
    for phase, event in itertools.product(life.Phase, _EXAMPLES):
        before = life.State(phase=phase, began=phase is not life.Phase.MUSTER)
        after, _ = life.step(before, event, 0.0)
        is_last = isinstance(event, life.WorkerEnded) and event.all_ended
        name = "last worker ended" if is_last else _spaced(type(event))
        if after.phase is not phase and name not in found.setdefault((phase, after.phase), []):
            found[phase, after.phase].append(name)
    return found


def _picture_of_life() -> str:
    """Phases from left to right; what leads from one to the next stands on the arrow, and to the last one below."""
    at = {phase: 20 + 240 * number for number, phase in enumerate(life.Phase)}
    moves, shapes, y = _moves(), list[str](), 190
    for phase, x in at.items():
        shapes.append(f'<rect x="{x}" y="40" width="110" height="44" rx="8" fill="#ffffff" stroke="#5a6b7b"/>')
        shapes.append(f'<text x="{x + 55}" y="67" text-anchor="middle" font-weight="600">{phase.value}</text>')
    for (phase, to), names in moves.items():
        left, right = at[phase] + 110, at[to]
        if right - left < 200:
            shapes.append(f'<path d="M{left} 62 H{right - 6}" stroke="#5a6b7b" fill="none" marker-end="url(#to)"/>')
            shapes += [f'<text x="{(left + right) / 2}" y="{78 + 16 * row}" text-anchor="middle" font-size="12">{name}'
                       "</text>" for row, name in enumerate(names)]  # fmt: skip
        else:
            middle = at[phase] + 55
            shapes.append(f'<path d="M{middle} 84 V{y} H{right + 55} V90" stroke="#5a6b7b" fill="none" '
                          'marker-end="url(#to)"/>')  # fmt: skip
            shapes.append(f'<text x="{middle + 10}" y="{y - 6}" font-size="12">{", ".join(names)}</text>')
            y += 40
    told = "; ".join(f"{phase.value} to {to.value}: {', '.join(names)}" for (phase, to), names in moves.items())
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 870 {y}" font-family="system-ui, sans-serif" ' \
           f'font-size="15" role="img" aria-label="{told}">'  # fmt: skip
    arrow = '<defs><marker id="to" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto">' \
            '<path d="M0 0 L8 4 L0 8 z" fill="#5a6b7b"/></marker></defs>'  # fmt: skip
    ground = f'<rect width="870" height="{y}" rx="12" fill="#f6f8fa"/>'
    return "\n".join([head, arrow, ground, '<g fill="#1f2a36">', *shapes, "</g>", "</svg>"]) + "\n"


def _life() -> Iterator[str]:
    yield _paragraphs(
        """`slurmft/policy/life.py` is a pure machine: `step(state, event, now)` gives the next state and what is to be
        done. The supervisor feeds it with what happens, and carries its actions out; whether an attempt has failed,
        stops or is over is decided nowhere else, for training, Ray, batches, endpoints and roles alike. What follows
        from its end is [a verdict](verdicts-and-exclusions.md), and a decision."""
    )
    phases = ", ".join(phase.value for phase in life.Phase)
    yield f"![What leads from one phase to the other: {phases}](../images/life.svg)"
    yield _paragraphs(
        """Beside its phase an attempt may be stopping, for one stop: the first that is asked for begins the save, and a
        later one can only change what follows it. A user's stop counts whenever it comes."""
    )
    yield "## Phases"
    yield "| phase | |\n|---|---|\n" + "\n".join(
        f"| {phase.value} | {_prose(text)} |" for phase, text in _members("slurmft.policy.life", life.Phase)
    )
    for title, kinds in (("What happens", life.Event), ("What is done", life.Action)):
        yield f"## {title}"
        yield "| | |\n|---|---|\n" + "\n".join(
            f"| {_spaced(kind)} | {_prose(_first_paragraph(inspect.getdoc(kind) or ''))} |" for kind in kinds.__args__
        )

    yield "## What follows its end"
    yield _paragraphs(
        """`slurmft/policy/decide.py` is the machine of what follows: one thing is done at a time, and what comes
        of it decides on the next. `supervisor/act.py` does these things, also in the place of a supervisor that was
        killed, whose decision is in the journal. Nothing is done for the run before that, a run that shall go on does
        so in one way, and one that shall not has none: `tests/unit/policy/test_what_follows.py` tries all that may come
        of each thing."""
    )
    then = _what_follows()
    lines = [
        f"    {do.name.lower()}[{do.value}] -->{f'|{words}|' if words else ''} {next_.name.lower()}[{next_.value}]"
        for do, nexts in then.items()
        for next_, words in nexts.items()
    ]
    yield "```mermaid\nflowchart TD\n" + "\n".join(lines) + "\n```"
    yield "| | | then |\n|---|---|---|\n" + "\n".join(
        f"| {do.value} | {_prose(text)} | "
        + "; ".join(f"{words}: {next_.value}" if words else next_.value for next_, words in then[do].items())
        + " |"
        for do, text in _members("slurmft.policy.decide", decide.Do)
    )


def _members(module: str, kind: type[StrEnum]) -> Iterator[tuple[Any, str]]:
    """The members of an enumeration, each with its docstring."""
    tree = next(node for node in _tree(module).body if getattr(node, "name", "") == kind.__name__)
    assert isinstance(tree, ast.ClassDef)
    texts = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Expr)][1:]
    yield from zip(kind, texts, strict=True)


def _what_follows() -> dict[decide.Do, dict[decide.Do, str]]:
    """What is done -> what comes next, and the answers that lead there, as the machine does in every situation."""
    do = decide.Do
    open_ = [
        decide.State(
            decide.Rules(in_slurm=in_slurm, continue_by=by, resubmits=resubmits),
            Verdict(cause=cause, reason="x", suspects=suspects),
        )
        for in_slurm, by, resubmits, cause, suspects in itertools.product(
            (True, False), ("auto", "requeue", "resubmit", "nothing", "job"), (False, True),
            (Cause.NODE_LOST, Cause.PREEMPTED, Cause.RERUN_ELSEWHERE), ((), (Suspect(node="n1", gpu="GPU-1"),)),
        )
    ]  # fmt: skip
    decisions = [Decision(action=each, reason="x", exit_code=0, elsewhere=True) for each in Action]
    examples: dict[type, list[decide.Found]] = {
        decide.Decided: [decide.Decided(each, doubt) for each in decisions for doubt in (False, True)],
        decide.NoPlace: [decide.NoPlace("x")],
    }
    seen, found = set(open_), {each: dict[decide.Do, dict[str, None]]() for each in do}
    while open_:
        state = open_.pop()
        if state.do in (do.OVER, do.START_ANEW):
            continue
        kinds = decide.FINDS.get(state.do, (decide.Answer.DONE,))
        words = {decide.NoPlace: "no place", **({kinds[0]: ""} if len(kinds) == 1 else {})}
        for kind in kinds:
            for answer in examples[kind] if isinstance(kind, type) else [kind]:
                after = decide.step(state, answer)
                found[state.do].setdefault(after.do, {})[words.get(kind, str(kind))] = None
                if after not in seen:
                    seen.add(after)
                    open_.append(after)
    return {each: {then: ", ".join(words) for then, words in found[each].items()} for each in do}


def _tree(module: str) -> ast.Module:
    path = REPOSITORY / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _definition(name: str, module: str) -> tuple[ast.ClassDef | ast.FunctionDef, str]:
    """The definition of a name and its docstring, through the packages that hand it on."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node, ast.get_docstring(node) or ""
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names) and node.module:
            return _definition(name, node.module)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and ast.unparse(node.targets[0]) == name:
            return _definition(node.value.id, module)  # another name of the same
    raise LookupError(f"{module} does not define {name}")


def _with_bases(node: ast.ClassDef, module: str) -> list[ast.ClassDef]:
    """The class, and the classes of slurmft that it is made of, as far as its module imports or defines them."""
    found = [node]
    for base in (base for base in node.bases if isinstance(base, ast.Name)):
        for each in ast.walk(_tree(module)):
            if isinstance(each, ast.ClassDef) and each.name == base.id:
                found += _with_bases(each, module)
            if isinstance(each, ast.ImportFrom) and base.id in (alias.name for alias in each.names):
                home = each.module or ""
                inner, _ = _definition(base.id, home) if home.startswith("slurmft.") else (None, "")
                found += _with_bases(inner, home) if isinstance(inner, ast.ClassDef) else []
    return found


def _name(name: str, module: str) -> Iterator[str]:
    node, text = _definition(name, module)
    yield f"## {name}"
    if isinstance(node, ast.FunctionDef):
        yield f"```python\n{_signature(node)}\n```"
        yield _first_paragraph(text)
        return
    body = [part for each in _with_bases(node, module) for part in each.body]
    methods = {each.name: each for each in reversed(body) if isinstance(each, ast.FunctionDef)}
    start = None if name in BY_OTHERS else methods.get("__init__")
    yield f"```python\n{_signature(start, name) if start else f'class {name}'}\n```"
    yield _first_paragraph(text)
    facts = []
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(words))):
                facts.append((f"{key}: {ast.unparse(field.annotation)}", words))
    for each in (each for each in body if isinstance(each, ast.FunctionDef) and methods[each.name] is each):
        if not each.name.startswith("_") and f"{name}.{each.name}" not in NOT_FOR_TRAINERS:
            is_property = any(ast.unparse(mark) == "property" for mark in each.decorator_list)
            told = ast.unparse(each.returns) if each.returns else "None"
            facts.append((f"{each.name}: {told}" if is_property else _signature(each), ast.get_docstring(each) or ""))
    for signature, words in facts:
        line = " ".join(signature.split()).replace("( ", "(").replace(", )", ")")
        yield f"`{line}`\n:   {_paragraphs(_lead(words), indent='    ').strip()}"


def _signature(node: ast.FunctionDef, name: str = "") -> str:
    returns = "" if name or node.returns is None else f" -> {ast.unparse(node.returns)}"
    arguments = list(_arguments(node.args))
    line = f"{name or node.name}({', '.join(arguments)}){returns}"
    if len(line) <= WIDTH:
        return line
    inside = textwrap.indent(",\n".join(arguments), "    ")
    return f"{name or node.name}(\n{inside},\n){returns}"


def _arguments(given: ast.arguments) -> Iterator[str]:
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    for argument, default in zip(plain, defaults, strict=True):
        if argument.arg not in ("self", "cls"):
            yield _argument(argument, default)
    if given.vararg is not None:
        yield "*" + _argument(given.vararg, None)
    elif given.kwonlyargs:
        yield "*"
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _argument(argument, default)
    if given.kwarg is not None:
        yield "**" + _argument(given.kwarg, None)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation is not None else ""
    value = "" if default is None else (" = " if kind else "=") + ast.unparse(default)
    return f"{argument.arg}{kind}{value}"


def _lead(text: str) -> str:
    return inspect.cleandoc(text).partition("\n\n")[0]


def _first_paragraph(text: str) -> str:
    return _paragraphs(_lead(text))


if __name__ == "__main__":
    main()
