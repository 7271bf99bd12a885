"""The section ``notices`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from slurmft.config.types import Section, Words
from slurmft.policy import plain_values as plain


class NoticesConfig(Section):
    """Notices of a cloud that it will take a machine away: how each node looks for them."""

    enabled: Literal["auto", "off"] = "auto"
    """auto: every node asks the metadata service of the cloud that its firmware names, and none where it names none.
    off: no service is asked, and no plug-in is run."""

    poll_seconds: Annotated[float, Field(ge=0.1, le=60), BeforeValidator(plain.no_bool)] = 5.0
    """Seconds between two looks."""

    plugin: Words = ()
    """A command that runs on every node and prints one line for each notice:
    ``{"ends": true, "what": "evicted", "left_s": 90}``; started again poll_seconds after it has ended."""
