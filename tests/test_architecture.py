"""The rules of the design that a reader relies on: who imports whom, who runs what, and what a login node pays."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slurmft
from slurmft import errors

ROOT = Path(slurmft.__file__).parent
REPOSITORY = ROOT.parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

MAX_LINES = 420
SLURM_COMMANDS = {"squeue", "sbatch", "scontrol", "scancel", "sacct", "sinfo", "srun", "sacctmgr", "salloc"}

ALLOWED = {
    "errors": set(),
    "policy": {"errors", "policy"},
    "settings": {"policy", "settings"},
    "config": {"errors", "policy", "settings"},
    "storage": {"errors", "policy", "storage"},
    "scheduler": {"errors", "policy", "config", "storage", "scheduler"},
    "launch": {"errors", "policy", "config", "storage", "scheduler", "launch"},
    "training": {
        "errors",
        "policy",
        "storage",
        "launch.heartbeat",
        "launch.section_stack",
        "launch.timing_page",
        "training",
    },
    "checkpoint": {
        "errors",
        "policy",
        "storage",
        "launch.heartbeat",
        "training.background",
        "training.rng",
        "checkpoint",
    },
    "health": {"errors", "policy", "settings", "config", "storage", "scheduler", "launch", "health"},
    "lab": {"", "errors", "storage.files", "lab"},
    "cli": {
        "",
        "errors",
        "policy",
        "settings",
        "config",
        "storage",
        "scheduler",
        "launch",
        "health",
        "lab",
        "checkpoint",
        "cli",
    },
    "examples": {"", "errors", "config", "training", "checkpoint", "examples"},
    "": {"cli"},  # __init__ loads its names lazily, __main__ starts the command line
}
"""Layer -> the slurmft layers, or single modules, that it may import. The empty name is the package itself."""

HOMES = {
    "yaml": ("config.py",),
    "submitit": ("scheduler/submission.py",),
    "filelock": ("storage/", "lab/"),
    "torch": ("training/", "checkpoint/", "examples/"),
    "numpy": ("policy/straggler", "launch/straggler_watch.py", "launch/node_past.py", "training/"),
    "click": ("cli/",),
    "rich": ("cli/",),
}


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


def imported(module: str) -> list[str]:
    """Every absolute module name that the file imports, at whatever depth; ``from a import b`` counts as a.b too."""
    names: list[str] = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            base = node.module or ""
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def layer_of(module: str) -> str:
    first, slash, _ = module.partition("/")
    name = first.removesuffix(".py")
    return name if slash or name not in ("__init__", "__main__") else ""


def is_allowed(name: str, allowed: set[str]) -> bool:
    """``name`` is as in ``imported``: its last part may be a module or a name in one."""
    inner = name.removeprefix("slurmft").removeprefix(".")
    if not inner:  # import slurmft
        return "" in allowed
    if any(inner == rule or inner.startswith(f"{rule}.") for rule in allowed if rule):
        return True
    return "" in allowed and not (ROOT / inner.split(".")[0]).exists() and not (ROOT / f"{inner}.py").exists()


def test_every_layer_has_its_rule():
    assert {layer_of(module) for module in MODULES} <= set(ALLOWED)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_the_layers_below_it(module):
    layer = layer_of(module)
    strays = [
        name
        for name in imported(module)
        if name.partition(".")[0] == "slurmft" and not is_allowed(name, ALLOWED[layer])
    ]
    assert strays == []


@pytest.mark.parametrize("dependency", sorted(HOMES))
def test_each_heavy_dependency_has_one_home(dependency):
    strays = [
        module
        for module in MODULES
        if any(name.partition(".")[0] == dependency for name in imported(module))
        and not module.startswith(HOMES[dependency])
    ]
    assert strays == []


def test_only_the_trainers_own_code_imports_training():
    importers = {
        module for module in MODULES for name in imported(module)
        if name.startswith("slurmft.training") and not module.startswith(("training/", "examples/"))
    }  # fmt: skip
    assert importers <= {
        "checkpoint/state.py",
        "checkpoint/manager.py",
        "checkpoint/just_in_time.py",
        "checkpoint/rank_records.py",
    }


def test_torch_is_named_as_a_string_only_where_the_zygote_preloads_it():
    """importlib.import_module("torch") would slip through the import rules."""
    lazy = [
        module for module in MODULES
        if not module.startswith(HOMES["torch"])
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)*", node.value)
    ]  # fmt: skip
    # the second one only asks for its version, which imports nothing; the last one means the format of a file
    assert set(lazy) <= {
        "launch/workers.py", "launch/torchrun.py", "launch/flight_recorder.py", "cli/checkpoints.py",
    }  # fmt: skip


def _commands_in(module: str) -> set[str]:
    """Slurm commands in argv position: the first element of a list or tuple, or the first argument of a call."""
    found = set()
    for node in ast.walk(tree(module)):
        first: ast.expr | None = None
        if isinstance(node, ast.List | ast.Tuple) and node.elts:
            first = node.elts[0]
        elif isinstance(node, ast.Call) and node.args:
            first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            words = first.value.split()
            if words and Path(words[0]).name in SLURM_COMMANDS:
                found.add(Path(words[0]).name)
    return found


def test_only_the_scheduler_runs_slurms_commands():
    users = {module: found for module in MODULES if (found := _commands_in(module))}
    strays = {
        module: found for module, found in users.items() if not module.startswith(("scheduler/", "lab/", "cli/lab"))
    }
    assert strays == {"launch/cluster.py": {"srun"}}


def test_no_shell_ever_reads_a_command():
    strays = [
        f"{module}:{node.lineno}" for module in MODULES for node in ast.walk(tree(module))
        if (isinstance(node, ast.keyword) and node.arg == "shell" and getattr(node.value, "value", None) is not False)
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.system", "os.popen"))
    ]  # fmt: skip
    assert strays == []


def test_only_the_command_line_has_a_broad_except():
    strays = [
        module for module in MODULES for node in ast.walk(tree(module))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) == "Exception")
        # a rank reports whatever happened to it to the others; a probe that crashes is a result
        and not module.startswith(("cli/", "checkpoint/", "health/isolation"))
    ]  # fmt: skip
    assert strays == []


def test_policy_has_no_files_no_clock_no_processes():
    forbidden = {
        "os",
        "pathlib",
        "time",
        "datetime",
        "subprocess",
        "asyncio",
        "logging",
        "random",
        "socket",
        "threading",
    }
    strays = [
        f"{module} imports {name}" for module in MODULES if module.startswith("policy/")
        for name in imported(module) if name.partition(".")[0] in forbidden
    ]  # fmt: skip
    assert strays == []


@pytest.mark.parametrize("module", MODULES)
def test_modules_stay_short(module):
    lines = len((ROOT / module).read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES


def test_there_are_no_junk_drawers():
    names = {Path(module).stem for module in MODULES} | {Path(module).parent.name for module in MODULES}
    assert names & {"utils", "util", "helpers", "helper", "common", "misc", "tools"} == set()


def test_the_public_names_are_exactly_these():
    assert slurmft.__all__ == [
        "__version__", "start_session", "Session", "PlannedStop", "ignore_strangers_term", "record",
        "CheckpointManager", "DistributedCheckpointManager", "ElasticSampler", "ElasticLoader", "HealthMonitor",
        "WatchdogTimer", "DistributedSignalHandler", "categorize_failure", "SlurmftError",
    ]  # fmt: skip
    assert dir(slurmft) == sorted(slurmft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = slurmft.nonsense


def test_the_public_names_can_be_loaded():
    assert {name for name in slurmft.__all__ if getattr(slurmft, name) is None} == set()


def _drawn_tree() -> dict[str, tuple[str | None, int]]:
    """Class -> (parent, exit code), from the picture in the docstring of slurmft.errors."""
    drawn: dict[str, tuple[str | None, int]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"((?:[|] {3}| {4})*(?:[+]-- )?)(\w+) \((\d+)\)", line):
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            drawn[match[2]] = (above[depth - 1] if depth else None, int(match[3]))
    return drawn


def test_the_error_tree_is_the_one_that_is_drawn():
    actual: dict[str, tuple[str | None, int]] = {"SlurmftError": (None, errors.SlurmftError.exit_code)}
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.SlurmftError) and value is not errors.SlurmftError:
            actual[name] = (value.__bases__[0].__name__, value.exit_code)
    assert actual == _drawn_tree()


def test_every_error_of_other_modules_has_a_place_below_the_tree():
    """Subclasses outside of errors.py are fine where a caller tells them apart; their exit code is their parent's."""
    from slurmft.scheduler.queueing import RequeueDisabled

    assert RequeueDisabled.exit_code == errors.SlurmError.exit_code


def test_an_error_shows_its_hint_below_what_happened():
    error = errors.ConfigError("no such key", hint="look there")
    assert (str(error), error.what, error.hint) == ("no such key\n  hint: look there", "no such key", "look there")
    assert str(errors.ConfigError("no such key")) == "no such key"


_LOOK = "import json, sys\n{code}\nprint(json.dumps(sorted(m for m in sys.modules if m.partition('.')[0] == 'torch')))"
_MAIN = """
import slurmft.cli.main as entry
sys.argv = ['slurmft', *{arguments!r}]
try:
    entry.main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import slurmft", id="import slurmft"),
        pytest.param(_MAIN.format(arguments=["--help"]), id="slurmft --help"),
        pytest.param(_MAIN.format(arguments=["schema"]), id="slurmft schema"),
        pytest.param(_MAIN.format(arguments=["status"]), id="slurmft status"),
        pytest.param(
            _MAIN.format(
                arguments=["submit", str(REPOSITORY / "configs/quickstart.yaml"), "--dry-run", "--cluster", "local"]
            ),
            id="slurmft submit --dry-run",
        ),
        pytest.param(
            "import slurmft.launch.run, slurmft.launch.agent, slurmft.launch.zygote", id="supervisor and agent"
        ),
    ],
)
def test_torch_is_not_imported_by(code, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", _LOOK.format(code=code)],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == []
