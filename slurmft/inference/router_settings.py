"""What an agent tells the router that it starts; without aiohttp, which agents need not have."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

SETTINGS_VARIABLE = "SLURMFT_ROUTER"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """What the agent tells a router."""

    socket: str
    config: str
    """The run's configuration."""

    node: str
    hosts: tuple[str, ...]
    """Names and addresses of the node, for a certificate of the run's own."""

    port: int
    """0: a free one."""

    def as_text(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """As ``as_text`` wrote it."""
        found = json.loads(text)
        return cls(**{**found, "hosts": tuple(found["hosts"])})
