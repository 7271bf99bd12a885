"""The section ``inference.serving`` of the configuration: an endpoint in front of the replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from slurmft.config.types import Count, Folder, Fraction, Positive, Seconds, Section, Text
from slurmft.policy import plain_values as plain


class ReplicasConfig(Section):
    """How many replicas are on: all, or as many as requests need."""

    min: Annotated[Count, Field(ge=0)] | None = None
    """The least; empty: all are always on. 0: with no request no engine runs, and the first one waits in its router
    until one is ready, which needs a ``request_timeout_s`` above the engine's start."""

    max: Positive | None = None
    """The most; empty: ``nodes`` times ``replicas_per_node``, which it cannot exceed."""

    idle_s: Annotated[Seconds, Field(gt=0)] = 300.0
    """Fewer replicas have to have been enough for so many seconds before one is stopped."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max is not None and self.min is None:
            raise ValueError("replicas.max: without replicas.min all replicas are always on; give it, 0 or more")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError(f"replicas.min ({self.min}) is above replicas.max ({self.max})")
        return self


class ServingConfig(Section):
    """An endpoint over HTTP: routers that clients talk to, in front of the replicas."""

    routers: Annotated[Positive, AfterValidator(plain.at_most(64))] = 2
    """Nodes with a router, the first ones of the job; each knows all replicas, and a client may use any of them."""

    replicas: ReplicasConfig = Field(default_factory=ReplicasConfig)
    """How many replicas are on."""

    port: Annotated[Count, AfterValidator(plain.at_most(65_535))] = Field(default=0, ge=0)
    """Port of every router; 0: a free one of each node, kept while its agent lives."""

    token_file: Folder | None = None
    """A file of mode 0600 with the token that clients must send as ``Authorization: Bearer``; empty: one is made in the
    run folder."""

    tls_certificate: Folder | None = None
    """A PEM file with the routers' certificate, and those that it depends on; empty: see ``tls_own``."""

    tls_key: Folder | None = None
    """Its private key, a PEM file of mode 0600."""

    tls_own: bool = True
    """Routers speak HTTPS with certificates that the run makes itself: an authority in its run folder, which clients
    trust (``serving/ca.pem``), and a new key and certificate for each start of a router, with the names and addresses
    of its node. Needs ``openssl`` on the nodes. Off where there is ``tls_certificate``; with false and none, routers
    speak plain HTTP, and any process at a dead one's port gets tokens and requests, and can forge answers."""

    max_queue: Count = Field(default=1024, ge=0)
    """Requests that may wait in a router for a free replica; more are refused at once with 429."""

    degraded_below: Fraction = 0.5
    """Share of the replicas: with fewer that are ready, each gets half as many requests at a time, time limits are
    doubled, and requests with ``X-Priority: low`` are refused with 503."""

    degraded_max_tokens: Positive | None = None
    """While the endpoint is degraded, completions and chats get at most so many tokens; empty: as they ask."""

    degraded_model: Text | None = None
    """While it is degraded, completions and chats are for this model, a smaller one that the engines have as well."""

    handover: bool = True
    """Before the time limit, at a preemption or a requeue, submit a successor job, which takes the endpoint over once
    its replicas are ready. It needs as many nodes again for a while. Not with ``preemption.continue_by: nothing``, and
    not without Slurm."""

    handover_lead_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Seconds before the time limit at which the successor is submitted; empty: ``preemption.signal_lead_s``, 1.5 times
    as long as the replicas took to become ready, and 90 s. Not in the first half of a job."""

    restart_window_s: Annotated[Seconds, Field(gt=0)] = 3600.0
    """``max_restarts`` counts the restarts of a replica, or of a router, within these seconds."""

    max_header_bytes: Annotated[Positive, AfterValidator(plain.at_most(1 << 20))] = 32_768
    """The longest header, and the longest request line, that a client may send."""

    max_body_bytes: Annotated[Positive, AfterValidator(plain.at_most(1 << 32))] = 67_108_864
    """The longest body that a client may send."""

    max_held_bytes: Annotated[Positive, AfterValidator(plain.at_most(1 << 40))] = 1 << 30
    """The most that bodies of all requests may take of a router's memory; beyond it 503 with ``Retry-After``, before
    the body is read. A single one is always taken."""

    client_timeout_s: Annotated[Seconds, Field(gt=0)] = 30.0
    """Seconds for a client to send its request, and to take each part of the answer; a slower one is cut off."""

    allow_origins: tuple[Text, ...] = ()
    """Origins, such as ``https://chat.example.org``, whose pages may send requests from a browser (CORS); ``*`` is any.
    Empty: what engines say of it themselves, and no preflight, as those show no token."""

    access_log: bool = True
    """One line of JSON for each request in ``serving/access-NODE.log`` of the run folder, of 64 MiB and one before."""

    @model_validator(mode="before")
    @classmethod
    def _own_unless_given(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("tls_certificate") is not None and "tls_own" not in value:
            return {**value, "tls_own": False}
        return value

    @model_validator(mode="after")
    def _has_both(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("give tls_certificate and tls_key, or neither")
        if self.tls_own and self.tls_certificate is not None:
            raise ValueError("give tls_own, or tls_certificate and tls_key")
        return self

    @property
    def is_https(self) -> bool:
        """Whether the routers speak HTTPS."""
        return self.tls_own or self.tls_certificate is not None

    def with_paths(self, absolute: Callable[[Path | None], Path | None]) -> Self:
        """The same section with every path passed through ``absolute``."""
        names = ("token_file", "tls_certificate", "tls_key")
        return self.model_copy(update={name: absolute(getattr(self, name)) for name in names})
