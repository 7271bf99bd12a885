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
from collections.abc import Iterator, Mapping, Sequence
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
    for finding in findings_of(settings, environment):
        if finding.level is Level.PROBLEM:
            raise UsageError(
                f"{finding.check}: {finding.text}", hint=f"{finding.remedy}; --unchecked submits it all the same"
            )


def findings_of(settings: RunConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The command's program, script and packages; nothing where a container has them, or where there is no command."""
    if not settings.command or settings.contained() is not None:
        return
    if settings.launcher == "torchrun" and _missing(sys.executable, ["torch"], where=settings.trainer_directory):
        yield Finding(
            check="command", level=Level.PROBLEM,
            text=f"launcher: torchrun is started by {sys.executable}, which does not have torch",
            remedy="submit with a slurmft that is installed beside torch, or leave out the launcher",
        )  # fmt: skip
        return
    program, rest = settings.command[0], settings.command[1:]
    where = settings.trainer_directory
    found = sys.executable if program.endswith(".py") else _found(settings, environment)
    if found is None and program not in PYTHONS:
        yield Finding(
            check="command", level=Level.PROBLEM, text=f"there is no program {program} in PATH",
            remedy="correct its name, or activate the environment that has it",
        )  # fmt: skip
        return
    is_python = program.endswith(".py") or re.fullmatch(r"python[\d.]*t?", Path(program).name) is not None
    script = program if program.endswith(".py") else _script_in(rest) if is_python else None
    if script is None:
        yield Finding(check="command", level=Level.OK, text=f"{found or sys.executable}")
        return
    if not (path := where / script).exists():
        yield Finding(
            check="command", level=Level.PROBLEM, text=f"there is no {script} in {where}",
            remedy="submit from the folder that it lies in, or give its whole path",
        )  # fmt: skip
        return
    interpreter = sys.executable if found is None or _is_own(found) else found
    own = settings.environment
    given = {**environment, **own} if interpreter != sys.executable or "PYTHONPATH" in own else None
    if missing := _missing(interpreter, _imported(path), where=path.parent, environment=given):
        yield Finding(
            check="command", level=Level.PROBLEM,
            text=f"{script} imports {' and '.join(missing)}, which {interpreter} does not have",
            remedy="activate the environment that has it, install it there, or name the interpreter in command",
        )  # fmt: skip
        return
    yield Finding(check="command", level=Level.OK, text=f"{path} with {interpreter}")


def _found(settings: RunConfig, environment: Mapping[str, str]) -> str | None:
    path = settings.environment.get("PATH", environment.get("PATH"))
    found = shutil.which(str(settings.trainer_directory / settings.command[0]) if "/" in settings.command[0]
                         else settings.command[0], path=path)  # fmt: skip
    return None if found is None else os.path.abspath(found)  # noqa: PTH100 - the links of an environment are its names


def _is_own(found: str) -> bool:
    """Whether that is this interpreter, by any of the names that it has in its folder."""
    one, other = Path(found), Path(sys.executable)
    return os.path.realpath(one.parent) == os.path.realpath(other.parent) and one.resolve() == other.resolve()


def _script_in(words: Sequence[str]) -> str | None:
    """The script among an interpreter's words; None for ``-m`` and ``-c``, and where options hide it."""
    for word in words:
        if word in ("-u", "-O", "-OO", "-P", "-I", "-s", "-S", "-E", "-B"):
            continue
        return None if word.startswith("-") else word
    return None


def _imported(script: Path) -> list[str]:
    """Which of the packages that a worker cannot do without the script imports whatever happens: not in a ``try``."""
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
