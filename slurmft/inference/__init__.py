"""Inference on a pool of replicas: a batch of requests from files, every one answered exactly once, or an endpoint.

In the supervisor: ``coordinator`` (who answers what) and ``ledger`` (what is answered). In the agent: ``pool`` (the
node's replicas). In each replica's process: ``driver``, which owns one engine. Shared: ``requests`` and ``segments``.
``serving`` has what an endpoint needs beside them, and ``client`` its Python client, ``slurmft.inference.Client``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from slurmft.inference.client import Client as Client
    from slurmft.inference.client import EndpointAnswer as EndpointAnswer
    from slurmft.inference.client import RequestFailed as RequestFailed

__all__ = ["Client", "EndpointAnswer", "RequestFailed"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'slurmft.inference' has no attribute {name!r}")
    from slurmft.inference import client  # aiohttp is there where it is needed, and not before

    return getattr(client, name)
