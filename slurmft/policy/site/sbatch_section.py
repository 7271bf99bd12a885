"""The options of sbatch in a configuration: which there are, and what their values may be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from slurmft.policy.plain_values import CONTROL, did_you_mean, shown
from slurmft.policy.site.sbatch_options import OWNED_OPTIONS, SBATCH_OPTIONS
from slurmft.policy.site.sbatch_values import unusable_value

FLAGS = frozenset(
    """
    contiguous exclusive get-user-env hold ignore-pbs nice overcommit oversubscribe propagate quiet reboot spread-job
    spread-segments consolidate-segments stepmgr use-min-nodes verbose x11
    """.split()  # noqa: SIM905 - as in sbatch_options
)
"""Options that may stand without a value; any other one would take the next line of the script for it."""


def option_value(key: Any, value: Any) -> Any:
    """The value of one option; fractions become text again.

    Raises:
        ValueError: it is none.
    """
    if key == "srun_args":
        return value
    if not isinstance(value, (str, int, float, type(None))):
        raise ValueError(f"{shown(key)} must be one text, number, true or false")
    option = shown(key).replace("_", "-")
    if value is True and option in SBATCH_OPTIONS - FLAGS and option not in OWNED_OPTIONS:
        raise ValueError(f"{shown(key)} needs a value, not true")
    if isinstance(value, str) and CONTROL.search(value):
        raise ValueError(f"{shown(key)}: {value!r} holds a line break or control character")
    return str(value) if type(value) is float else value


def unknown_options(
    section: Any, ours: Sequence[str], known_here: Callable[[frozenset[str]], Collection[str]]
) -> list[str]:
    """The problems with the keys of the section.

    Args:
        ours: keys that have a meaning beside sbatch's.
        known_here: asked which of these options, of no sbatch that we know, this site's has.
    """
    if not isinstance(section, Mapping):
        return []
    problems = []
    known = [name.replace("-", "_") for name in SBATCH_OPTIONS] + list(ours)
    strange = frozenset(shown(key).replace("_", "-") for key in section if key not in ours)
    strange -= SBATCH_OPTIONS | OWNED_OPTIONS.keys()
    strange -= frozenset(known_here(strange) if strange else ())
    for key in section:
        option = shown(key).replace("_", "-")
        if key in ours:
            continue
        if option in OWNED_OPTIONS:
            problems.append(f"slurm.{shown(key)} is set by slurmft: {OWNED_OPTIONS[option]}")
        elif option in strange:
            problems.append(f"slurm.{shown(key)} is not an option of sbatch{did_you_mean(shown(key), known)}")
    return [*problems, *_unusable_values(section)]


def _unusable_values(section: Mapping[Any, Any]) -> Iterator[str]:
    for key, value in section.items():
        is_one = key != "srun_args" and isinstance(value, str | int | float)
        if is_one and (problem := unusable_value(shown(key).replace("_", "-"), value)):
            yield f"slurm.{shown(key)}: {problem}"
