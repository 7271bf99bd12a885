"""What can be seen of a run's command before it is submitted: its interpreter, its script, and what that imports."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmft.config.run import RunConfig
from slurmft.errors import UsageError
from slurmft.policy.site import Finding, Level
from slurmft.system.files import read_bytes
from slurmft.system.processes import end_group, output_of

PYTHONS = ("python", "python3")
ASK_S = 30.0
_FIND = """\
import sys
sys.path = [each for each in sys.path if each]  # the script would import nothing of the current folder either
import importlib.util
sys.path.insert(0, sys.argv[1])
print("missing:", *[name for name in sys.argv[2:] if importlib.util.find_spec(name) is None])
"""


def with_the_shells_python(settings: RunConfig, environment: Mapping[str, str]) -> RunConfig:
    """The settings with ``python`` in the command as the path that the user's shell finds.

    Unchanged where that is slurmft's own, which workers are forked from, where there is none, and in a container, whose
    ``python`` is its own.
    """
    if not settings.command or settings.command[0] not in PYTHONS or settings.contained() is not None:
        return settings
    found = _found(settings, environment)
    if found is None or _is_own(found):
        return settings
    return settings.model_copy(update={"command": (found, *settings.command[1:])})


def refuse_unusable(settings: RunConfig, environment: Mapping[str, str]) -> None:
    """Return where nothing is wrong with the command, as far as this machine can see.

    Raises:
        UsageError: its program, its script or a package is not here; names what to do.
    """
    found = finding_of(settings, environment)
    if found is not None and found.level is Level.PROBLEM:
        raise UsageError(f"{found.check}: {found.text}", hint=f"{found.remedy}; --unchecked submits it all the same")


def finding_of(settings: RunConfig, environment: Mapping[str, str]) -> Finding | None:
    """The command's program, script and packages; None where a container has them, or where there is no command."""
    if not settings.command or settings.contained() is not None:
        return None
    where, (program, *rest) = settings.trainer_directory, settings.command
    if settings.launcher == "torchrun" and _missing(sys.executable, ["torch"], where=where):
        return _problem(
            f"launcher: torchrun is started by {sys.executable}, which does not have torch",
            "submit with a slurmft that is installed beside torch, or leave out the launcher",
        )
    found = sys.executable if program.endswith(".py") else _found(settings, environment)
    if found is None and program not in PYTHONS:
        return _problem(f"there is no program {program} in PATH",
                        "correct its name, or activate the environment that has it")  # fmt: skip
    is_python = program.endswith(".py") or re.fullmatch(r"python[\d.]*t?", Path(program).name) is not None
    script = program if program.endswith(".py") else _script_in(rest) if is_python else None
    module = _module_in(rest) if is_python and script is None else None
    if script is None and module is None:
        return Finding(check="command", level=Level.OK, text=f"{found or sys.executable}")
    if script is not None and not (where / script).exists():
        return _problem(f"there is no {script} in {where}",
                        "submit from the folder that it lies in, or give its whole path")  # fmt: skip
    interpreter = sys.executable if found is None or _is_own(found) else found
    own = settings.environment
    given = {**environment, **own} if interpreter != sys.executable or "PYTHONPATH" in own else None
    if script is None:
        what, wanted, beside = f"-m {module} needs", [str(module).partition(".")[0]], where
    else:
        what, wanted, beside = f"{script} imports", _imported(where / script), (where / script).parent
    if missing := _missing(interpreter, wanted, where=beside, environment=given):
        return _problem(
            f"{what} {' and '.join(missing)}, which {interpreter} does not have",
            "activate the environment that has it, install it there, or name the interpreter in command",
        )
    return Finding(check="command", level=Level.OK, text=f"{script or f'-m {module}'} with {interpreter}")


def _problem(text: str, remedy: str) -> Finding:
    return Finding(check="command", level=Level.PROBLEM, text=text, remedy=remedy)


def _found(settings: RunConfig, environment: Mapping[str, str]) -> str | None:
    path = settings.environment.get("PATH", environment.get("PATH"))
    found = shutil.which(str(settings.trainer_directory / settings.command[0]) if "/" in settings.command[0]
                         else settings.command[0], path=path)  # fmt: skip
    return None if found is None else os.path.abspath(found)  # noqa: PTH100 - the links of an environment are its names


def _is_own(found: str) -> bool:
    """Whether that is this interpreter, by any of the names that it has in its folder."""
    one, other = Path(found), Path(sys.executable)
    return os.path.realpath(one.parent) == os.path.realpath(other.parent) and one.resolve() == other.resolve()


_FLAGS = ("-u", "-O", "-OO", "-P", "-I", "-s", "-S", "-E", "-B")


def _script_in(words: Sequence[str]) -> str | None:
    """The script among an interpreter's words; None for ``-m`` and ``-c``, and where options hide it."""
    word = next((word for word in words if word not in _FLAGS), "-")
    return None if word.startswith("-") else word


def _module_in(words: Sequence[str]) -> str | None:
    """The module behind ``-m``; None where there is none, or options hide it."""
    rest = [word for word in words if word not in _FLAGS]
    return rest[1] if rest[:1] == ["-m"] and rest[1:] else None


def _imported(script: Path) -> list[str]:
    """Which of the packages that a worker needs the script needs as well: no import in a ``try`` counts."""
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(read_bytes(script)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level}
    return [name for name in ("torch", "slurmft") if name in {each.partition(".")[0] for each in found}]


def _missing(
    interpreter: str, names: Sequence[str], *, where: Path, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Those that the interpreter finds neither among its packages nor in the folder ``where``; none where it could not
    be asked. Without an ``environment`` this process looks itself.
    """
    if environment is None:
        beside = importlib.machinery.PathFinder
        return [
            name for name in names
            if importlib.util.find_spec(name) is None and beside.find_spec(name, [str(where)]) is None
        ]  # fmt: skip
    if not names:
        return []
    try:
        process = subprocess.Popen(
            [interpreter, "-c", _FIND, str(where), *names], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True, env=environment,
        )  # fmt: skip
    except OSError:
        return []
    try:
        (said,), code = output_of(process, ASK_S, 1 << 16)
    finally:
        end_group(process, 1.0)  # one that hangs, with what it has started
    _, asked, answer = said.decode(errors="replace").rpartition("missing:")
    return [name for name in names if name in answer.split()] if asked and code == 0 else []
