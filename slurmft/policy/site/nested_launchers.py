"""A command that is a launcher itself: torchrun, or nvidia-resiliency-ext's, inside of a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

PROGRAMS = frozenset({"torchrun", "ft_launcher"})
MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})


def second_owner(command: Sequence[str]) -> str:
    """Why ``command`` cannot be run; empty where it can: a launcher that decides on the number of nodes by itself.

    With a range of nodes torch's c10d rendezvous waits for nodes and admits them, so two would decide: it waits for
    ones that the supervisor will not start, and takes ranks up again that the supervisor has stopped.
    """
    words = _words(command)
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in PROGRAMS or (word in MODULES and index and words[index - 1] == "-m"):
            asked = _nnodes(words[index + 1 :])
            least, colon, most = asked.partition(":")
            if colon and least != most:
                return (
                    f"{name} --nnodes={asked} would decide on its nodes by itself (c10d rendezvous), and so does "
                    f"the supervisor: write nodes: {most} and elastic: {{min_nodes: {least}}}, with the script as the "
                    "command; launcher: torchrun starts it through torchrun"
                )
    return ""


def _words(command: Sequence[str]) -> Sequence[str]:
    """The command's words; those of the text behind ``sh -c``, as far as they can be told without a shell."""
    if command[0].rpartition("/")[2] in _SHELLS and len(command) > 2:
        try:
            return shlex.split(command[-1])
        except ValueError:
            return command
    return command


def _nnodes(words: Sequence[str]) -> str:
    """The value of the launcher's ``--nnodes``; empty where there is none before the script."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--nnodes":
            return value if equals else "".join(words[index + 1 : index + 2])
        if word.endswith(".py"):
            return ""
    return ""
