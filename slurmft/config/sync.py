"""The section ``sync`` of the configuration: folders of the nodes that are kept at an address."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from slurmft.config.types import Folder, Positive, Seconds, Section, Text
from slurmft.policy import plain_values as plain

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SECRETS = re.compile(r"AWS_SECRET_ACCESS_KEY|AWS_SESSION_TOKEN|AZURE_STORAGE_(KEY|CONNECTION_STRING|SAS_TOKEN)")


def _as_seconds(value: Any) -> Any:
    """``30s``, ``5m``, ``1.5h`` or a number of seconds."""
    if not isinstance(value, str):
        return value
    if (found := _DURATION.fullmatch(value.strip())) is None:
        raise ValueError(f"{value!r} is not a duration such as 30s, 5m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def _own_folder(value: Any) -> Any:
    path = PurePosixPath(str(value))
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 3:
        raise ValueError(f"{str(value)!r}: an absolute path without .., of a folder of its own such as /tmp/models")
    return value


def address(value: str) -> str:
    """``value``, unless it is no address, or holds a secret.

    Raises:
        ValueError: says why; the address itself is not repeated where it may hold a secret.
    """
    try:
        parts = urlsplit(value)
    except ValueError:
        raise ValueError("it is not an address such as file:///shared/saves or s3://bucket/saves") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "user names, passwords, ? and # do not belong into an address, which is stored in the run folder; "
            "credentials come from the environment or from the usual files, such as ~/.aws/credentials"
        )
    if not parts.scheme or "::" in value or parts.scheme in ("memory", "local"):
        raise ValueError(f"{value!r} is not an address such as file:///shared/saves or s3://bucket/saves")
    if parts.scheme == "file" and (parts.netloc or len(PurePosixPath(parts.path).parts) < 2 or ".." in value):
        raise ValueError(f"{value!r}: file:/// and the absolute path of a folder")
    return value.rstrip("/")


class SyncConfig(Section):
    """One folder of the nodes that is kept at an address, for scripts that save there by themselves."""

    path: Annotated[Folder, AfterValidator(_own_folder)]
    """The folder on the nodes, absolute; the script saves into it, and looks there when it starts."""

    url: Annotated[Text, AfterValidator(address)]
    """Where it is kept: ``file:///shared/saves``, ``s3://bucket/saves``, or any other address of fsspec
    (``pip install 'slurmft[sync]'``). Without user name and password."""

    frequency: Annotated[Seconds, BeforeValidator(_as_seconds), Field(ge=1)] = 300.0
    """Seconds between two uploads, or ``30s``, ``5m``, ``1h``; also when the workers have ended."""

    each_node: bool = False
    """false: what the first node has is kept, and every node gets it. true: each node has its own, by its place among
    the nodes; versions of different nodes may be of different moments."""

    keep: Positive = 3
    """Versions that are kept."""

    exclude: tuple[Text, ...] = ()
    """Patterns of files that are left out, such as ``*.log``; of names, or of paths below the folder."""

    bandwidth_mb_s: Annotated[float, Field(ge=0), BeforeValidator(plain.no_bool)] = 0.0
    """Most megabytes (10^6 bytes) per second that a node sends for this folder; 0: as fast as it can."""

    restore_timeout_s: Annotated[Seconds, Field(ge=1)] = 900.0
    """Seconds that a node may take to fetch it before the workers start; after that the start has failed."""

    upload_timeout_s: Annotated[Seconds, Field(ge=1)] = 300.0
    """Seconds that the last upload may take after the workers have ended. At a stop it is at most what the stop has
    left."""


def problem_of(folders: tuple[SyncConfig, ...], run_folder: str, names: tuple[str, ...]) -> str:
    """Why these folders cannot be kept together, or the run's environment (``names``) holds a secret; else nothing."""
    paths = [PurePosixPath(each.path) for each in folders]
    for index, path in enumerate(paths):
        others = [*paths[:index], PurePosixPath(run_folder)]
        others += [PurePosixPath(urlsplit(each.url).path) for each in folders if each.url.startswith("file:")]
        if found := next((each for each in others if path.is_relative_to(each) or each.is_relative_to(path)), None):
            return f"sync: {path} and {found} lie in each other; each needs a folder of its own"
    if folders and (found_name := next((name for name in names if _SECRETS.fullmatch(name)), None)):
        return (
            f"environment.{found_name}: credentials are not stored in the run folder; set it where you submit, "
            "or use ~/.aws/credentials"
        )
    return ""
