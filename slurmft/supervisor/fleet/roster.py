"""Which of a job's nodes are usable, over all attempts of its start; decided by ``policy.nodes.membership``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slurmft.policy.nodes.membership import (
    Agent,
    Members,
    Node,
    Size,
    Standing,
    TooFew,
    Wait,
    growth,
    lost_after_s,
    next_members,
)
from slurmft.supervisor.fleet.agents import AgentLink, AgentPool

REVIVAL_S = 20.0
"""How long the next attempt waits for an agent that is being started again, where it would be smaller without it."""


class Roster:
    """Reads the pool; holds no connection of its own."""

    def __init__(self, pool: AgentPool, size: Size) -> None:
        self._pool, self.size = pool, size
        self.returning: set[int] = set()
        """Nodes whose agent is being started again."""

        self._names: dict[int, str] = {}
        self._last: tuple[str, ...] = ()

    def next(self, allowed: Collection[str], *, waited_s: float) -> Members | Wait | TooFew:
        """The members of the next attempt; ``allowed`` are the hosts of the job that may take part, empty for all."""
        return next_members(
            self._nodes(allowed), self._last, self.size, waited_s=waited_s, patience_s=REVIVAL_S
        )  # fmt: skip

    def take(self, members: Members) -> list[AgentLink]:
        """Remember that they take part; returns their agents in the order of their ranks."""
        by_name = {self._name(link): link for link in self._pool.links.values()}
        self._last = members.nodes
        return [by_name[name] for name in members.nodes]

    def can_go_on(self, without: Collection[str] = ()) -> bool:
        """Whether another attempt is possible with the nodes that are left, ``without`` these hosts."""
        allowed = {link.host for link in self._pool.links.values()}.difference(without)
        return bool(allowed) and not isinstance(self.next(allowed, waited_s=0.0), TooFew)

    def patience_s(self, link: AgentLink, timeout_s: float) -> float:
        """Seconds that this agent may be silent."""
        is_needed = link in self._pool.members and not self.can_go_on({link.host})
        return lost_after_s(timeout_s, replaceable=not is_needed)

    def newcomers(self, allowed: Collection[str]) -> tuple[str, ...]:
        """Nodes that the next attempt would take in; empty when the run is as large as it should be."""
        ready = {self._name(link) for link in self._pool.links.values() if link.ready or link in self._pool.members}
        return growth([node for node in self._nodes(allowed) if node.name in ready], self._last, self.size)

    def _nodes(self, allowed: Collection[str]) -> list[Node]:
        return [self._node(link, allowed) for _, link in sorted(self._pool.links.items())]

    def _node(self, link: AgentLink, allowed: Collection[str]) -> Node:
        agent = Agent.LOST
        if link.channel is not None:
            agent = Agent.LIVING
        elif link.node in self.returning or not link.dropped:  # it has disconnected, and may be back at once
            agent = Agent.RETURNING
        is_barred = bool(allowed) and link.host not in allowed and not link.lender
        return Node(
            name=self._name(link),
            agent=agent,
            standing=Standing.BARRED if is_barred else Standing.CLEAN,
            warm=link.ready or not self._last,  # at first all are cold, and the allocation's order counts
            joined=bool(link.lender),
            leaving=link.leaving,
        )

    def _name(self, link: AgentLink) -> str:
        # all nodes of a local run have one host; the name of the first is plain
        if link.node not in self._names:
            taken = link.host in self._names.values()
            self._names[link.node] = f"{link.host}:{link.node}" if taken else link.host
        return self._names[link.node]


def named(nodes: Sequence[str]) -> str:
    """A few names, in words."""
    return ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
