"""The section ``metrics`` of the configuration."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from slurmft.config.types import Count, Folder, Section, Text
from slurmft.policy import plain_values as plain


class MetricsConfig(Section):
    """Measured values of a running job for Prometheus: a file, a port, or both. Neither: ``slurmft metrics`` writes
    them from outside."""

    textfile_folder: Folder | None = None
    """Folder of node_exporter's textfile collector on the node of the supervisor, which must let you write there. The
    file is removed when the job ends."""

    port: Annotated[Count, Field(ge=0, le=65_535)] | None = None
    """Port of ``/metrics`` beside the supervisor; 0: a free one. null: none."""

    address: Text = "127.0.0.1"
    """IP address on which it listens. Any other than that of the machine itself needs token_file."""

    token_file: Annotated[Path, BeforeValidator(plain.usable_path)] | None = None
    """A file of mode 0600 with the token that scrapes send as ``Authorization: Bearer``."""

    interval_s: Annotated[float, Field(ge=1, le=3600), BeforeValidator(plain.no_bool)] = 15.0
    """Seconds between two writes of the file."""

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        try:
            ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f"{value[:60]!r} is not an IP address") from None
        return value

    @model_validator(mode="after")
    def _is_not_open_to_all(self) -> Self:
        if self.port is not None and self.token_file is None and not ipaddress.ip_address(self.address).is_loopback:
            raise ValueError(f"metrics.address: {self.address} lets others read the metrics; it needs token_file")
        return self

    @property
    def is_on(self) -> bool:
        """Something is to be written or served."""
        return self.textfile_folder is not None or self.port is not None

    def with_paths(self, absolute: Callable[[Path | None], Path | None]) -> Self:
        """The same section with every path passed through ``absolute``."""
        return self.model_copy(
            update={name: absolute(getattr(self, name)) for name in ("textfile_folder", "token_file")}
        )
