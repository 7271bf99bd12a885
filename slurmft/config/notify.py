"""The section ``notify`` of the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from slurmft.config.types import Seconds, Section, Text, Words
from slurmft.policy import plain_values as plain

DEFAULT_EVENTS = ("decision: stop", "decision: finish", "saves keep failing", "straggler detected", "not continued",
                  "supervisor lost", "replica down", "router down")  # fmt: skip
_EVENT = re.compile(r"[a-z_ ]{1,40}(: [a-z ]{1,40})?")


class NotifyConfig(Section):
    """Messages about chosen events of a run, without Prometheus. They never delay the training."""

    command: Words = ()
    """A command that is run for each message, on the node of the supervisor, with the message as one JSON object on its
    standard input: a list of arguments, or one string that is split as a shell would split it, without running one."""

    webhook_file: Annotated[Path, BeforeValidator(plain.usable_path)] | None = None
    """A file of mode 0600 with the URL that messages are posted to. The URL is a secret and shown nowhere."""

    webhook_variable: Text | None = None
    """The environment variable that holds that URL, instead of a file."""

    form: Literal["json", "slack"] = "json"
    """What is posted: the message as a JSON object, or the text of a message of Slack (Mattermost, Rocket.Chat)."""

    events: tuple[Text, ...] = DEFAULT_EVENTS
    """Events of the journal that are worth a message; ``decision: stop`` is a decision to stop, ``verdict: hang`` a
    verdict with that cause."""

    per_hour: Annotated[int, Field(ge=1, le=3600), BeforeValidator(plain.no_bool)] = 20
    """Most messages in an hour. Further ones are counted, and their number is in the next message."""

    timeout_s: Annotated[Seconds, Field(ge=0.1, le=300)] = 10.0
    """Seconds that one try may take."""

    retries: Annotated[int, Field(ge=0, le=10), BeforeValidator(plain.no_bool)] = 3
    """Further tries of a message that was not taken; the pause before each is twice as long as the one before."""

    last_s: Annotated[Seconds, Field(ge=0, le=60)] = 5.0
    """Seconds that the end of the job waits for messages about it, after all else is done. 0: they may be lost with
    the job's processes, or come with its next start."""

    @field_validator("events")
    @classmethod
    def _can_be_events(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not _EVENT.fullmatch(name):
                raise ValueError(f"{name[:60]!r} is not the name of an event, such as 'saves keep failing'")
        return value

    @field_validator("webhook_variable")
    @classmethod
    def _is_a_variable(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            # not repeated here: it may be the URL itself
            raise ValueError("webhook_variable is the name of an environment variable that holds the URL")
        return value

    @model_validator(mode="after")
    def _has_one_address(self) -> Self:
        if self.webhook_file is not None and self.webhook_variable is not None:
            raise ValueError("notify: give webhook_file or webhook_variable, not both")
        return self

    @property
    def is_on(self) -> bool:
        """Messages go somewhere."""
        return bool(self.command or self.webhook_file or self.webhook_variable)

    def with_paths(self, absolute: Callable[[Path | None], Path | None]) -> Self:
        """The same section with every path passed through ``absolute``."""
        return self.model_copy(update={name: absolute(getattr(self, name)) for name in ("webhook_file",)})
