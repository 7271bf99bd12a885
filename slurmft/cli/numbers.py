"""The numbers that options take: each has a lowest and a highest value, and NaN is none."""

from __future__ import annotations

import math
from typing import Any

import click

from slurmft.storage.checkpoint_names import MAX_STEP


class Amount(click.FloatRange):
    """A finite number between two limits; click itself lets NaN through every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number of some size.", param, ctx)
        return number


RANK = click.IntRange(0, 999_999)
STEP = click.IntRange(0, MAX_STEP)
LINES = click.IntRange(0, 999_999_999)
