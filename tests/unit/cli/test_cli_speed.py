"""What the command line imports, and so how long one waits for it. bench/endings has the figures."""

import importlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest

import slurmft.cli
from slurmft.cli.main import HIDDEN_VERBS, VERBS, cli

REPOSITORY = Path(slurmft.cli.__file__).parents[2]
MODULES = sorted(path.stem for path in Path(slurmft.cli.__file__).parent.glob("[a-z]*.py"))
HELP_TAKES_LESS_THAN_S = 0.5
"""Of processor time, five times what it takes; the machine tests other things at the same time."""

_ENTER = """
import json, sys
import slurmft.cli.main as entry
sys.argv = ['slurmft', *{arguments!r}]
try:
    entry.main()
except SystemExit as stop:
    print(json.dumps([stop.code, sorted(sys.modules)]))
"""


def modules_after(*arguments: str, cwd: Path) -> set[str]:
    """What is imported when this command line is done."""
    command = [sys.executable, "-c", _ENTER.format(arguments=arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, check=True)
    code, modules = json.loads(result.stdout.splitlines()[-1])
    assert code in (0, 2), result.stderr
    return set(modules)


def packages(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def commands_of(module: str) -> dict[str, click.Command]:
    """The commands that a module of the command line offers; those of a group belong to the group."""
    values = vars(importlib.import_module(f"slurmft.cli.{module}")).values()
    found = [value for value in values if isinstance(value, click.Command) and value is not cli]
    inner = {id(command) for group in found if isinstance(group, click.Group) for command in group.commands.values()}
    return {str(command.name): command for command in found if id(command) not in inner}


def test_the_table_of_verbs_is_what_the_modules_offer():
    offered = {
        name: (module, "" if command.hidden else command.get_short_help_str(limit=10_000).removesuffix("."))
        for module in MODULES
        for name, command in commands_of(module).items()
    }
    assert offered == VERBS | {name: (module, "") for name, module in HIDDEN_VERBS.items()}


def test_every_verb_answers_to_its_name():
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in [*cli.list_commands(context), *HIDDEN_VERBS]}
    assert {name: command.name for name, command in commands.items() if command} == {name: name for name in commands}
    assert cli.get_command(context, "nonsense") is None


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"], []], ids=" ".join)
def test_what_needs_no_verb_imports_none(arguments, tmp_path):
    modules = modules_after(*arguments, cwd=tmp_path)
    mistake = {"slurmft.policy", "slurmft.policy.values"} if arguments == ["nonsense"] else set()  # the nearest verb
    assert {name for name in modules if name.partition(".")[0] == "slurmft"} - mistake == {
        "slurmft", "slurmft.cli", "slurmft.cli.main", "slurmft.errors", "slurmft.system",
        "slurmft.system.foreign_text",
    }  # fmt: skip
    others = packages(modules) - set(sys.stdlib_module_names) - {"__main__", "slurmft", "click"}
    started_with = packages(_modules_of_bare_python(tmp_path))
    assert others - started_with == set()
    assert "asyncio" not in modules


def _modules_of_bare_python(cwd: Path) -> set[str]:
    code = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    return set(json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=cwd, timeout=60)))


def test_a_dry_run_imports_only_what_writes_the_script(tmp_path):
    config = REPOSITORY / "configs" / "quickstart.yaml"
    modules = modules_after("submit", str(config), "--dry-run", "--cluster", "local", cwd=tmp_path)
    assert "submitit" in modules
    assert packages(modules) & {"rich", "psutil", "torch"} == set()
    assert "slurmft.supervisor.attempt" not in modules


def test_a_nodes_processes_import_no_tables_and_no_submission(tmp_path):
    for verb in ("run", "agent"):
        assert packages(modules_after(verb, "--help", cwd=tmp_path)) & {"rich", "submitit", "torch"} == set()


@pytest.mark.parametrize("module", ["slurmft.supervisor.run", "slurmft.agent.agent"])
def test_a_trainings_processes_import_no_inference(module, tmp_path):
    code = f"import json, sys, slurmft.cli.submit, {module}; print(json.dumps(sorted(sys.modules)))"
    modules = set(json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, timeout=60)))
    assert packages(modules) & {"numpy", "tenacity", "torch"} == set()
    assert modules & {"slurmft.inference.ledger", "slurmft.agent.inference", "slurmft.supervisor.inference"} == set()


def test_help_comes_at_once(tmp_path):
    took = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "slurmft", "--help"], stdout=subprocess.DEVNULL, cwd=tmp_path, timeout=60, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < HELP_TAKES_LESS_THAN_S, took
