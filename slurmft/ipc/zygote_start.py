"""How a node's zygote is begun: by its agent, or before the agent itself has imported anything.

What a zygote imports takes longer than all other parts of a start together, and an agent takes 0.2 s until it has read
its configuration. So the supervisor, which has read it, passes on what the zygote needs, in a variable of the agent's
process. Imports next to nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variables that say where compilers keep what they have made, and their folders below that of the node."""

VARIABLE = "SLURMFT_ZYGOTE"
MAX_BYTES = 64 * 1024
"""The kernel takes 128 KiB for one variable; where the run has more, the agent begins its zygote itself."""


def shared_environment(base: Mapping[str, str], *, name: str, per_node: int, own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a zygote and all its workers.

    One OpenMP thread each unless the user says otherwise, as torchrun does: more would fight for the same cores.

    Args:
        base: that of the agent.
        name: the run's.
        per_node: workers on each node.
        own: the run's own variables, which beat all others.
    """
    # a name that stays the same over all restarts, so that an experiment tracker continues one experiment
    defaults = {"WANDB_RUN_ID": name, "WANDB_RESUME": "allow", **node_caches(base)}
    if per_node > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    return {**defaults, **base, **own}


def node_caches(base: Mapping[str, str]) -> dict[str, str]:
    """Variables that put the caches of Triton and Inductor into a folder of this user's on the node's own disk; none
    where no safe one can be made.

    By default they lie in the home. On a network filesystem a node's new file is another one's stale handle, which ends
    one rank and hangs the others.
    """
    folder = os.path.join(base.get("TMPDIR") or "/tmp", f"slurmft_caches_{os.geteuid()}")  # noqa: S108, PTH118
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)  # noqa: PTH102 - no pathlib here, which takes as long as all of this module
        status = os.lstat(folder)  # what is in it is run, so nobody else may have made it
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            return {variable: f"{folder}/{name}" for variable, name in CACHES.items()}
    return {}


def as_variable(preload: Sequence[str], *, name: str, per_node: int, own: Mapping[str, str]) -> dict[str, str]:
    """What a supervisor adds to the environment of an agent; nothing where it would be too long."""
    text = json.dumps({"preload": list(preload), "name": name, "per_node": per_node, "own": dict(own)})
    return {VARIABLE: text} if len(text.encode()) <= MAX_BYTES else {}


def zygote_arguments(command: Sequence[str]) -> list[str] | None:
    """The arguments after the interpreter in ``command`` when a fork of ours can run it, else None.

    It can when the command is this very interpreter with a script or ``-m module`` and no option but ``-u``.
    """
    import shutil  # agents that were told what to begin do without it

    program = command[0]
    if program.endswith(".py"):
        return list(command)
    found = shutil.which(program)
    # the unresolved names must agree: all virtual environments link to one interpreter
    same = found is not None and os.path.abspath(found) == os.path.abspath(sys.executable)  # noqa: PTH100
    rest = [word for index, word in enumerate(command[1:]) if not (word == "-u" and index == 0)]
    if not (same or program in ("python", "python3")) or not rest:
        return None
    if rest[0] == "-m":
        return rest if len(rest) > 1 else None
    return None if rest[0].startswith("-") else rest


def useful(preload: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """``preload``, or nothing where no worker of ``command`` would be forked from what has imported it.

    Args:
        command: a worker's; empty where workers are drivers of ours.
    """
    return tuple(preload) if not command or zygote_arguments(command) is not None else ()


class Zygote:
    """A zygote's process, and the agent's end of the socket that it takes requests from."""

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        self.environment, self.preload = dict(environment), tuple(preload)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-P", "-m", "slurmft.agent.zygote", str(theirs.fileno()), *self.preload]
            self.process = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], env=self.environment, stdin=subprocess.DEVNULL
            )
        self.socket.setblocking(False)

    def is_as(self, environment: Mapping[str, str], preload: Sequence[str]) -> bool:
        """Whether it was begun with just these."""
        return (self.environment, self.preload) == (dict(environment), tuple(preload))

    def end(self, within_s: float = 0.0) -> None:
        """Kill it, and with it its children; one that is ready does so itself, and cleans up, in so many seconds."""
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        self.process.kill()
        self.process.wait()


def begun_for(arguments: Sequence[str], environment: MutableMapping[str, str]) -> Zygote | None:
    """The zygote of the agent that this process is about to become; None where it is not to be an agent, or was told
    nothing. The variable is removed.

    Args:
        arguments: the command line, the program first.
    """
    told = environment.pop(VARIABLE, None)
    if told is None or list(arguments[1:2]) != ["agent"]:
        return None
    try:
        facts = json.loads(told)
        preload = [str(name) for name in facts["preload"]]
        own = {str(name): str(value) for name, value in facts["own"].items()}
        shared = shared_environment(environment, name=str(facts["name"]), per_node=int(facts["per_node"]), own=own)
        return Zygote(shared, preload)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:  # the agent will begin it
        sys.stderr.write(f"slurmft: no zygote ahead of the agent: {error!r}\n")
        return None


def begun() -> Zygote | None:
    """As ``begun_for``, for this very process."""
    return begun_for(sys.argv, os.environ)
