"""A token in a file that its owner alone can read: never on a command line."""

from __future__ import annotations

import os
import re
from pathlib import Path

from slurmft.errors import UsageError
from slurmft.system.files import read_text

MAX_TOKEN_BYTES = 4096


def token_in(path: Path, *, at_least: int = 16) -> str:
    """The token in a file that its owner alone can read.

    Raises:
        UsageError: others can, it is another user's, it cannot be read, or holds no token.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise UsageError(f"others may read the token in {path}", hint=f"chmod 600 {path}")
        token = read_text(path, owners={os.geteuid()}, limit_bytes=MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token in {path}: {error}") from error
    if len(token) < at_least or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise UsageError(f"{path} must hold one token of at least {at_least} printable characters without spaces")
    return token
