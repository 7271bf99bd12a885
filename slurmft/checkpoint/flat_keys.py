"""Nested state as one flat mapping and back, with the very keys of torch.distributed.checkpoint. No torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

KeyPath = tuple[str | int, ...]
"""From the outermost key to the value: a string in a dict, a number in a list."""


@functools.lru_cache(maxsize=1 << 16)
def key_of(path: KeyPath) -> str:
    """``optimizer.param_groups.0.lr``"""
    return ".".join(map(str, path))


def flatten(path: KeyPath, value: Any, is_tensor: Callable[[Any], bool]) -> Iterator[tuple[KeyPath, Any]]:
    """Each leaf below ``value`` with its path.

    Dicts are entered, and lists that hold a tensor or a dict somewhere; everything else is a leaf. Beyond torch's own
    rule, a dict that is empty, or has a key that is not a string, is a leaf: it comes back as it was.
    """
    if is_tensor(value):  # first: there are thousands, and the training loop waits
        yield path, value
    elif isinstance(value, Mapping) and value and all(type(key) is str for key in value):
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


class _Node(dict[str | int, Any]):
    """A dict or list that is being put together; list items may come in any order."""


def unflatten(leaves: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The reverse of ``flatten``, for leaves in any order.

    Raises:
        ValueError: two paths contradict each other, or a list has gaps.
    """
    root = _Node()
    for path, value in leaves.items():
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, _Node())
            if not isinstance(node, _Node):
                raise ValueError(f"{step!r} of {key_of(path)} is a value and holds values")
        if path[-1] in node:
            raise ValueError(f"{key_of(path)} is there twice")
        node[path[-1]] = value
    return {str(key): _closed(value) for key, value in root.items()}


def _closed(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    kinds = {type(key) for key in value}
    if kinds == {str}:
        return {key: _closed(each) for key, each in value.items()}
    if kinds != {int} or value.keys() != set(range(len(value))):
        raise ValueError(f"{sorted(map(str, value))[:5]} are the keys of neither a dict nor a list")
    return [_closed(value[place]) for place in range(len(value))]
