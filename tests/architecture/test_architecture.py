"""The rules of the design that a reader relies on: who imports whom, who runs what, and what a login node pays."""

from __future__ import annotations

import ast
import collections
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

SLURM_COMMANDS = {"squeue", "sbatch", "scontrol", "scancel", "sacct", "sinfo", "srun", "sacctmgr", "salloc"}

_SHARED = {"errors", "system", "policy", "config", "storage", "scheduler", "ipc"}
_BESIDE_THE_TRAINER = {"errors", "system", "policy", "storage", "ipc.pages"}

ALLOWED = {
    "errors": set(),
    "system": {"errors", "system"},
    "policy": {"errors", "policy"},
    "config": {"errors", "policy", "config", "system.files"},
    "storage": {"errors", "system", "policy", "storage"},
    "scheduler": {"errors", "system", "policy", "config", "storage", "scheduler"},
    "ipc": {"errors", "system", "policy", "ipc"},
    "inference": {*_SHARED, "inference"},
    "sync": {"errors", "system", "policy", "config", "storage", "ipc", "sync"},
    "agent": {*_SHARED, "inference", "sync", "agent"},
    "supervisor": {*_SHARED, "inference", "supervisor"},
    "trainer": {*_BESIDE_THE_TRAINER, "trainer"},
    "worker": {*_BESIDE_THE_TRAINER, "trainer", "worker"},
    "checkpoint": {*_BESIDE_THE_TRAINER, "trainer", "checkpoint"},
    "integrations": {"", *_BESIDE_THE_TRAINER, "trainer", "worker", "checkpoint", "integrations"},
    "health": {"errors", "system", "policy", "config", "storage", "scheduler", "health"},
    "operations": {*_SHARED, "inference", "supervisor", "agent", "health", "operations"},
    "planning": {"errors", "policy", "config", "operations.site", "planning"},
    "reporting": {"", *_SHARED, "inference", "supervisor", "operations", "reporting"},
    "compat": {"errors", "policy", "config", "worker", "health", "compat"},
    "lab": {"", "errors", "system.files", "lab"},
    "cli": {
        "",
        *_SHARED,
        "inference",
        "supervisor",
        "agent",
        "health",
        "operations",
        "planning",
        "reporting",
        "lab",
        "checkpoint",
        "examples",
        "compat",
        "cli",
    },
    "examples": {"", "errors", "config", "worker", "checkpoint", "integrations", "examples"},
    "": {
        "cli",
        "errors",
        "ipc.zygote_start",
        "worker",
        "checkpoint",
        "compat",
        "inference",
        "operations",
        "policy.inference",
        "storage.queue",
        "storage.shared_weights",
    },  # __init__ names them for type checkers, __main__ starts the command line
}
"""Layer -> the slurmft layers, or single modules, that it may import. The empty name is the package itself."""

HOMES = {
    "yaml": ("config/base.py",),
    "submitit": ("scheduler/submission.py", "operations/executor.py"),  # the latter has its interface
    "filelock": ("storage/", "lab/"),
    "torch": ("trainer/", "worker/", "checkpoint/", "examples/", "integrations/", "compat/megatron.py"),
    "transformers": ("integrations/huggingface.py",),
    "accelerate": ("examples/",),
    "optuna": ("integrations/optuna.py",),
    "numpy": (
        "inference/",
        "policy/stragglers.py",
        "supervisor/stragglers.py",
        "trainer/savers.py",
        "worker/",
    ),
    "aiohttp": ("inference/",),
    "prometheus_client": ("system/exposition.py", "inference/router.py"),
    "zstandard": ("inference/",),
    "pyarrow": ("inference/",),
    "simpy": ("planning/",),
    "fsspec": ("sync/stores.py",),
    "jinja2": ("reporting/report.py",),
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


def test_modules_import_only_the_layers_below_them():
    strays = [
        f"{module} imports {name}" for module in MODULES for name in imported(module)
        if name.partition(".")[0] == "slurmft" and not is_allowed(name, ALLOWED[layer_of(module)])
    ]  # fmt: skip
    assert strays == []


def test_each_heavy_dependency_has_one_home():
    strays = {
        f"{module} imports {dependency}" for module in MODULES for name in imported(module)
        if (dependency := name.partition(".")[0]) in HOMES and not module.startswith(HOMES[dependency])
    }  # fmt: skip
    assert strays == set()


BACK_UP: dict[str, set[tuple[str, str]]] = {}
"""Package -> its imports (of a module, of what) that point back up between its rooms: to be mended, not to be added to.
A room is a folder of the package, or a module beside them."""


@functools.cache
def imports_within() -> dict[str, set[str]]:
    """Module -> the modules of slurmft that it imports, also in functions and under TYPE_CHECKING; without suffix."""
    names = {module.removesuffix(".py").removesuffix("/__init__"): module for module in MODULES}
    found: dict[str, set[str]] = {}
    for name, module in names.items():
        parts = [each.split(".")[1:] for each in imported(module) if each.startswith("slurmft.")]
        targets = {"/".join(path) if "/".join(path) in names else "/".join(path[:-1]) for path in parts}
        found[name] = (targets & set(names)) - {name}
    return found


def in_circles(arrows: dict[str, set[str]]) -> set[str]:
    """The nodes from which no order from the bottom up can be made; a few above a circle are among them."""
    left = {node: set(targets) for node, targets in arrows.items()}
    while free := [node for node, targets in left.items() if not targets & left.keys()]:
        for node in free:
            del left[node]
    return set(left)


def rooms_of(package: str, *, but: set[tuple[str, str]]) -> dict[str, set[str]]:
    """Room -> the rooms of the same package that its modules import."""
    rooms: dict[str, set[str]] = {}
    for module, targets in imports_within().items():
        above, _, inner = module.partition("/")
        if above != package or not inner:
            continue
        room = inner.split("/")[0]
        inside = {each.partition("/")[2] for each in targets if each.startswith(f"{package}/")}
        found = {each.split("/")[0] for each in inside if (inner, each) not in but}
        rooms[room] = rooms.get(room, set()) | (found - {room})
    return rooms


def test_packages_have_layers_inside():
    packages = {module.partition("/")[0] for module in MODULES if "/" in module}
    circles = {each: sorted(in_circles(rooms_of(each, but=BACK_UP.get(each, set())))) for each in packages}
    assert {each: rooms for each, rooms in circles.items() if rooms} == {}


def test_no_arrow_back_up_is_listed_without_need():
    needless = {
        (package, *arrow) for package, arrows in BACK_UP.items() for arrow in arrows
        if not in_circles(rooms_of(package, but=arrows - {arrow}))
    }  # fmt: skip
    assert needless == set()


SMALL = {
    "__main__": "`python -m slurmft`",
    "worker/shared_weights": "a public name, which must not import the rest of the worker",
    "integrations/accelerate": "public names of its own, for loops of Accelerate",
    "examples/byte_gpt_engine": "an example, to be copied",
    "examples/drill": "an example, which the drill submits",
    "inference/trial_call": "a program, which trials begin with: it must not import the rest of the package",
}
"""Modules below 80 lines that stand alone though one module at most imports them, and why."""

SMALL_LINES, LARGE_LINES = 80, 1000


def lines_of(name: str) -> int:
    module = f"{name}.py" if f"{name}.py" in MODULES else f"{name}/__init__.py"
    return (ROOT / module).read_text(encoding="utf-8").count("\n")


def test_a_small_module_belongs_to_its_only_importer():
    importers = collections.Counter(target for targets in imports_within().values() for target in targets)
    small = {
        name for name in imports_within()
        if lines_of(name) < SMALL_LINES and importers[name] <= 1 and f"{name}.py" in MODULES and name != "__init__"
    }  # fmt: skip
    assert small == set(SMALL), "merge it with its importer, or say here why it stands alone; or it is gone"


def test_a_large_module_says_why_it_stands_in_one_piece():
    silent = [
        name for name in imports_within()
        if lines_of(name) > LARGE_LINES and "In one piece, since " not in _words_of_docstring(name)
    ]  # fmt: skip
    assert silent == []


def _words_of_docstring(name: str) -> str:
    return " ".join((ast.get_docstring(tree(f"{name}.py")) or "").split())


def test_only_the_trainers_own_code_imports_the_worker():
    importers = {
        module for module in MODULES for name in imported(module)
        if name.startswith("slurmft.worker") and not module.startswith(("worker/", "examples/", "integrations/"))
    }  # fmt: skip
    # names of another package, for trainers
    assert importers == {"__init__.py", "compat/__init__.py", "compat/megatron.py", "compat/serving_names.py"}


def test_torch_is_named_as_a_string_only_where_the_zygote_preloads_it():
    """importlib.import_module("torch") would slip through the import rules."""
    lazy = [
        module for module in MODULES
        if not module.startswith(HOMES["torch"])
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)*", node.value)
    ]  # fmt: skip
    # the second one only asks for its version, which imports nothing; the last ones mean the format of a file, and
    # words of a user's command
    assert set(lazy) <= {
        "config/sections.py", "agent/torchrun.py", "agent/workers.py", "agent/zygote.py",
        "cli/checkpoint.py", "cli/submit.py", "policy/sbatch.py",
        "operations/submit.py",  # looks whether it is there
        "agent/inference.py", "inference/driver.py",
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
    assert strays == {"supervisor/cluster.py": {"srun"}}


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
        # and one run's damage must not keep cron from the others; a callable engine, and a server of
        # one's own, is the user's code; and every
        # filesystem of fsspec has errors of its own; a module imported ahead of the workers may raise anything
        and not module.startswith(
            ("cli/", "checkpoint/", "system/processes", "operations/rescue", "inference/driver.py",
             "inference/trial_call.py",
             "sync/stores.py", "agent/zygote.py", "compat/serving_names.py")
        )
    ]  # fmt: skip
    assert strays == []


OPENERS = {
    "system/files.py": "the one opener; folders, to make renames durable; private folders, checked in its own way",
    "worker/standalone.py": "/proc and cgroups",
    "system/processes.py": "/proc and /sys, without waiting and in bounds; its own folder, opened as one and without "
    "following links",
    "sync/folder.py": "/proc",
    "agent/notices.py": "/sys",
    "health/gpu.py": "/dev/kmsg, without waiting and in bounds",
    "operations/site.py": "a folder that the drill has just made for itself"
    "; a folder that the test has just made for itself",
    "ipc/pages.py": "pages in the agent's private folder",
    "agent/workers.py": "the agent's private folder; torch's pipe, without waiting",
    "agent/zygote.py": "requests in the agent's private folder, and the user's own program",
    "agent/agent.py": "a worker's pipe, without waiting",
    "storage/patience.py": "creates exclusively",
    "cli/submit.py": "slurmft's own source",
    "examples/ray_regression.py": "an example that imports nothing of slurmft; a log where its user says",
    "inference/trial_call.py": "in a trial's own process, which imports nothing of slurmft; its own pipe",
    "lab/": "a cluster that root has made for itself",
    "checkpoint/write_requests.py": "/proc; creates exclusively",
    "checkpoint/just_in_time.py": "a worker's pipe, which it has just made in the agent's private folder",
    "checkpoint/image_file.py": "creates exclusively",
    "checkpoint/writer.py": "a folder, opened as one and without following links",
}
"""Who may open files without ``system.files``, and why that is safe. A shared folder may hold a FIFO or a device
under any name: a reader that is not on this list goes through the opener."""

_OPENS = {"read_text", "read_bytes", "write_text", "write_bytes"}


def _opens_itself(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    to_nowhere = bool(call.args) and ast.unparse(call.args[0]) == "os.devnull"
    if name in ("open", "os.open", "io.open", "os.fdopen"):
        return not to_nowhere
    if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) in ("opening", "files"):
        return False
    # the methods of paths; open() of other things takes what no file has
    return call.func.attr in _OPENS or (call.func.attr == "open" and _looks_like_a_mode(call))


def _looks_like_a_mode(call: ast.Call) -> bool:
    if not call.args:
        return all(keyword.arg in ("mode", "encoding", "errors", "newline", "buffering") for keyword in call.keywords)
    mode = getattr(call.args[0], "value", None)
    return isinstance(mode, str) and re.fullmatch(r"[rwxabt+]{1,3}", mode) is not None


def test_files_are_opened_by_the_one_opener():
    found = {
        f"{module}:{node.lineno} {ast.unparse(node)[:60]}" for module in MODULES for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and _opens_itself(node) and not module.startswith(tuple(OPENERS))
    }  # fmt: skip
    assert found == set()


def test_nobody_is_on_the_list_of_openers_without_need():
    needed = {
        module for module in MODULES for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and _opens_itself(node)
    }  # fmt: skip
    assert {place for place in OPENERS if not any(module.startswith(place) for module in needed)} == set()


@pytest.mark.parametrize(
    ("text", "opens"),
    [("open('a')", True), ("os.open(path, 0)", True), ("path.read_text()", True), ("path.open()", True),
     ("path.open('rb')", True), ("path.open(encoding='utf-8')", True), ("path.write_bytes(b'')", True),
     ("os.open(os.devnull, 0)", False), ("opening.read_text(path)", False), ("read_bytes(path)", False),
     ("proceedings.open(own, 3)", False)],
)  # fmt: skip
def test_what_counts_as_opening(text, opens):
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call) and _opens_itself(call) is opens


def test_text_of_others_reaches_terminals_and_logs_through_one_place_each():
    homes = {"cli/main.py", "system/foreign_text.py"}
    calls = [
        f"{module}: {ast.unparse(node.func)}" for module in MODULES if module not in homes
        for node in ast.walk(tree(module)) if isinstance(node, ast.Call)
    ]  # fmt: skip
    printing = ("click.echo", "click.secho", "print", "Console", "rich.print", "sys.stdout.write", "sys.stderr.write")
    logging = ("logging.basicConfig", "logging.Formatter", "logging.StreamHandler", "logging.FileHandler")
    assert [call for call in calls if call.startswith("cli/") and call.partition(": ")[2] in printing] == []
    assert [call for call in calls if call.partition(": ")[2] in logging] == []


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


def test_there_are_no_junk_drawers():
    names = {Path(module).stem for module in MODULES} | {Path(module).parent.name for module in MODULES}
    assert names & {"utils", "util", "helpers", "helper", "common", "misc", "tools"} == set()


def test_the_public_names_are_exactly_these():
    assert slurmft.__all__ == [
        "__version__", "submit", "RunHandle", "Executor", "start_session", "Session", "PlannedStop",
        "ignore_strangers_term", "record",
        "CheckpointManager", "DistributedCheckpointManager", "ElasticSampler", "ElasticLoader", "HealthMonitor",
        "WatchdogTimer", "DistributedSignalHandler", "categorize_failure", "detect_gpu_failure",
        "detect_network_failure", "handle_nccl_timeout", "handle_gpu_oom",
        "Queue", "publish_weights", "stage_in_memory", "shared_weights",
        "get_rerun_state_machine", "RerunStateMachineConfig", "RerunMode", "RerunDiagnostic", "RerunErrorInjector",
        "WorkerHealthMonitor", "AutoRestartManager", "RequestRedistributor", "RequestCheckpointer",
        "RetryManager", "HighAvailabilityCluster", "GracefulDegradation",
        "SlurmftError", "UsageError", "ConfigError", "DataError", "RunBusy", "RunFailed", "DirectoryInUse",
        "LabError", "LabUnavailable", "SlurmError", "SlurmUnavailable", "StorageError", "StorageUnavailable",
        "NewerFormat",
        "Fenced", "CheckpointError", "LaunchError",
    ]  # fmt: skip
    assert dir(slurmft) == sorted(slurmft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = slurmft.nonsense


def test_importing_slurmft_costs_a_login_node_nothing(tmp_path):
    look = "import sys, slurmft; print({m.partition('.')[0] for m in sys.modules} & {'numpy', 'tenacity', 'aiohttp'})"
    result = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert result.stdout == "set()\n"


def test_editors_and_type_checkers_see_every_public_name():
    (block,) = [node for node in tree("__init__.py").body if isinstance(node, ast.If)]
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {"__version__", *seen} == set(slurmft.__all__)


def test_every_error_is_public():
    assert {name for name in vars(errors) if isinstance(vars(errors)[name], type) and name != "ClassVar"} <= set(
        slurmft.__all__
    )


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
    from slurmft.scheduler.own_jobs import RequeueDisabled

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
        pytest.param("from slurmft.compat import RerunMode, HealthChecker, PreemptionPlugin", id="slurmft.compat"),
        pytest.param(_MAIN.format(arguments=["--help"]), id="slurmft --help"),
        pytest.param(_MAIN.format(arguments=["schema"]), id="slurmft schema"),
        pytest.param(_MAIN.format(arguments=["exclude", "list"]), id="slurmft exclude list"),
        pytest.param(_MAIN.format(arguments=["status"]), id="slurmft status"),
        pytest.param(
            _MAIN.format(
                arguments=["submit", str(REPOSITORY / "configs/quickstart.yaml"), "--dry-run", "--cluster", "local"]
            ),
            id="slurmft submit --dry-run",
        ),
        pytest.param(
            "import slurmft.supervisor.run, slurmft.agent.agent, slurmft.agent.zygote", id="supervisor and agent"
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


def test_no_module_takes_part_in_a_circle():
    """By any import."""
    arrows = {module: set(targets) for module, targets in imports_within().items()}
    assert in_circles(arrows) == set()


def test_a_circle_is_found():
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}
    assert in_circles({"a": {"b"}, "b": {"c", "outside"}, "c": set()}) == set()


_NAMED = re.compile(r"``((?:[a-z_]+\.)+[A-Za-z_]+)(?:\(\))?``")


def _exists(name: str) -> bool:
    """Whether the code has a module, or something in a module, of that name below the package."""
    place, *rest = ROOT, *name.split(".")
    for index, part in enumerate(rest):
        if (place / part).is_dir():
            place = place / part
            continue
        module = place / f"{part}.py" if (place / f"{part}.py").is_file() else place / "__init__.py"
        inner = rest[index + 1 :] if module.stem == part else rest[index:]
        return all(re.search(rf"\b{each}\b", module.read_text(encoding="utf-8")) for each in inner)
    return True


def _is_a_key(name: str) -> bool:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "config").glob("*.py"))
    return all(re.search(rf"\b{part}\b", text) for part in name.split("."))


def test_modules_that_the_code_speaks_of_exist():
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    strays = [
        f"{module}: {name}" for module in MODULES
        for name in _NAMED.findall((ROOT / module).read_text(encoding="utf-8"))
        if name.split(".")[0] in packages and not _exists(name) and not _is_a_key(name)
    ]  # fmt: skip
    assert strays == []
