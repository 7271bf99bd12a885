"""What an agent and the router that it starts tell each other; without aiohttp, which agents need not have."""

from __future__ import annotations

from slurmft.ipc.channel import Count, Fields, OpenPort, PortNumber, written

SETTINGS_VARIABLE = "SLURMFT_ROUTER"


class RouterSettings(Fields, frozen=True, kw_only=True):
    """What the agent tells a router at its start; later ``Members``, as the supervisor sends them."""

    socket: str
    config: str
    """The run's configuration."""

    node: str
    hosts: tuple[str, ...]
    """Names and addresses of the node, for a certificate of the run's own."""

    port: PortNumber
    """0: a free one."""


class RouterLives(Fields, frozen=True, kw_only=True):
    """What a router tells its agent, first when it listens."""

    port: OpenPort
    answered: Count = written(0)
    """Requests in its life."""

    load: Count = written(0)
    """Requests that wait in it, or that it has given to replicas."""
