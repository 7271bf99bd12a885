"""The section ``exclusions`` of the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from slurmft.config.types import Folder, Section, Text
from slurmft.policy import plain_values as plain
from slurmft.policy.nodes.suspicion import HALF_LIFE_HOURS, Rules

MAX_HOURS = 10 * 365 * 24.0
_Hours = Annotated[float, Field(gt=0), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MAX_HOURS))]
_Score = Annotated[float, Field(gt=0), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(1000))]
_Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(plain.no_bool)]


class ExclusionsConfig(Section):
    """The exclusion list: where it is, and when suspicion becomes exclusion."""

    path: Folder | None = None
    """The list; a folder that a group shares makes it the group's. ``{cluster}`` stands for the cluster's name. One per
    cluster and user, in the user's state folder, when empty."""

    mode: Text = "0600"
    """Permissions of the list's files, in octal: 0600 for one user, 0660 for a group."""

    threshold: _Score = 1.0
    """Score from which on a node is excluded: a proven persistent error has 2, and for half an hour a node that
    its cloud takes away is above 1; anything else alone is below."""

    probation: _Score = 0.25
    """Score from which on a node is on probation; below it, it is free."""

    half_life_hours: dict[str, _Hours] = Field(default_factory=dict)
    """Hours in which half of the suspicion fades, by kind of observation, where the default is to be another one."""

    max_excluded_fraction: _Share = 0.5
    """Share of a partition's nodes that the list may exclude at most; the weakest suspicion is dropped first."""

    @field_validator("path")
    @classmethod
    def _path_names_a_file(cls, value: Path | None) -> Path | None:
        if value is not None and not value.name:
            raise ValueError(f"{str(value)!r} does not name a file")
        return value

    @field_validator("mode")
    @classmethod
    def _mode_is_one(cls, value: str) -> str:
        if not re.fullmatch(r"0?[67][0-7][0145]", value):
            raise ValueError(f"{value!r} must be octal, writable for the owner and not for others: '0660'")
        return value

    @field_validator("half_life_hours", mode="before")
    @classmethod
    def _kinds_are_known(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = {str(key).replace("_", " "): hours for key, hours in value.items()}
        for name in names:
            if name not in HALF_LIFE_HOURS:
                raise ValueError(
                    f"unknown kind {plain.shown(name)}{plain.did_you_mean(name, list(HALF_LIFE_HOURS))} "
                    f"(kinds: {', '.join(HALF_LIFE_HOURS)})"
                )
        return names

    @model_validator(mode="after")
    def _probation_comes_first(self) -> Self:
        if self.probation > self.threshold:
            raise ValueError(f"probation {self.probation:g} is above the threshold {self.threshold:g}")
        return self

    def rules(self) -> Rules:
        """What these settings mean to the policy."""
        return Rules(threshold=self.threshold, probation=self.probation, half_life_hours=self.half_life_hours)

    def mode_bits(self) -> int:
        """The mode as a number."""
        return int(self.mode, 8)
