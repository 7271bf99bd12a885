"""What the callback for Hugging Face's Trainer supports: versions, and the Trainer's settings."""

from __future__ import annotations

import logging
import os
from typing import Any

from slurmft.errors import UsageError

LOWEST, NEWEST = (4, 57), (5, 23)
"""Versions of transformers that are tested; newer ones are tried."""

INSTALL = "pip install 'slurmft[huggingface]'"

log = logging.getLogger(__name__)


def check_version(version: str) -> None:
    """Return when this version of transformers is supported.

    Raises:
        UsageError: it is too old, or no version.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < LOWEST:
        raise UsageError(
            f"transformers {version} is not supported: SlurmftCallback needs {LOWEST[0]}.{LOWEST[1]} or newer",
            hint=INSTALL,
        )
    if numbers > NEWEST:
        log.info("transformers %s is newer than those that were tested (up to %d.%d)", version, *NEWEST)


def check_settings(args: Any) -> None:
    """Raises UsageError for settings with which a stop could save nothing to resume from."""
    if args.save_only_model:
        raise UsageError("save_only_model=True: a stop would save nothing to resume from", hint="leave it out")
    if getattr(args, "enable_jit_checkpoint", False):
        raise UsageError("enable_jit_checkpoint=True: two would save at a stop", hint="leave it out under slurmft")


def check_engine_settings(args: Any) -> None:
    """Raises UsageError for settings of the Trainer that need its own files."""
    needs = {
        "load_best_model_at_end=True": args.load_best_model_at_end,
        "save_strategy='best'": str(getattr(args.save_strategy, "value", args.save_strategy)) == "best",
        "fsdp": bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1"),
        "deepspeed": bool(args.deepspeed),
        "auto_find_batch_size=True": args.auto_find_batch_size,
        "ignore_data_skip=True": args.ignore_data_skip,
    }
    if wrong := [name for name, is_set in needs.items() if is_set]:
        raise UsageError(
            f"{wrong[0]} needs the Trainer's own files: SlurmftCallback(engine='slurmft') writes none",
            hint="leave one of the two out",
        )
