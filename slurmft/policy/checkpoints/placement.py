"""Which nodes hold copies of which node's part of a snapshot.

The placement of GEMINI (Wang et al., SOSP 2023, section 4, "mixed" strategy): groups of m nodes, in which each node's
part lies on all m. Where m does not divide the number of nodes, the last group has between m + 1 and 2m - 1 of them,
each with its copies on the m - 1 nodes that follow it in the group, seen as a ring. Any m - 1 lost nodes lose nothing.
"""

from __future__ import annotations


def copy_holders(nodes: int, copies: int) -> tuple[tuple[int, ...], ...]:
    """For each node, by its place in the run, the other nodes that hold a copy of its part.

    Args:
        copies: of each part beside the node's own: GEMINI's m - 1. Fewer where there are not that many other nodes.

    Raises:
        ValueError: there is no node, or a negative number of copies.
    """
    if type(nodes) is not int or type(copies) is not int or nodes < 1 or copies < 0:
        raise ValueError(f"{copies!r} copies on {nodes!r} nodes make no sense")
    size = copies + 1
    whole = nodes // size if nodes % size == 0 else nodes // size - 1
    holders: list[tuple[int, ...]] = []
    for first in range(0, max(whole, 0) * size, size):
        holders += _ring(first, size, copies)
    if rest := nodes - len(holders):
        holders += _ring(len(holders), rest, min(copies, rest - 1))
    return tuple(holders)


def _ring(first: int, size: int, copies: int) -> list[tuple[int, ...]]:
    return [tuple(first + (place + step) % size for step in range(1, copies + 1)) for place in range(size)]
