"""Nested state as one flat mapping and back, with the very keys of torch.distributed.checkpoint. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]
"""From the outermost key to the value: a string in a dict, a number in a list."""


def key_of(path: Path) -> str:
    """``optimizer.param_groups.0.lr``"""
    return ".".join(map(str, path))


def flatten(path: Path, value: Any, is_tensor: Callable[[Any], bool]) -> Iterator[tuple[Path, Any]]:
    """Each leaf below ``value`` with its path.

    Dicts are entered, and lists that hold a tensor or a dict somewhere; everything else is a leaf. Beyond torch's own
    rule, a dict that is empty, or has a key that is no string, is a leaf: it comes back as it was.
    """
    if isinstance(value, Mapping) and value and all(type(key) is str for key in value):
        for key, each in value.items():
            yield from flatten((*path, key), each, is_tensor)
    elif isinstance(value, list) and any(_opens(each, is_tensor) for each in value):
        for place, each in enumerate(value):
            yield from flatten((*path, place), each, is_tensor)
    else:
        yield path, value


def _opens(value: Any, is_tensor: Callable[[Any], bool]) -> bool:
    if isinstance(value, list):
        return any(_opens(each, is_tensor) for each in value)
    return isinstance(value, Mapping) or is_tensor(value)


def unflatten(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """The reverse of ``flatten``.

    Raises:
        ValueError: two paths contradict each other, or a list has gaps.
    """
    root: dict[str, Any] = {}
    for path, value in leaves.items():
        container: Any = root
        for step, following in itertools.pairwise(path):
            container = _below(container, step, {} if isinstance(following, str) else [])
        if _below(container, path[-1], value) is not value:
            raise ValueError(f"{key_of(path)} is there twice")
    return root


def _below(container: Any, step: str | int, absent: Any) -> Any:
    if isinstance(container, dict) and isinstance(step, str):
        found = container.setdefault(step, absent)
    elif isinstance(container, list) and isinstance(step, int) and step <= len(container):
        if step == len(container):
            container.append(absent)
        found = container[step]
    else:
        raise ValueError(f"{step!r} does not lead on in a {type(container).__name__}")
    if absent is not found and type(found) is not type(absent):
        raise ValueError(f"{step!r} is two things")
    return found
