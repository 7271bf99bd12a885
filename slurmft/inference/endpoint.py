"""The files of an endpoint in its run folder, and the cluster of its routers. No aiohttp.

endpoints.json      the living routers, replaced atomically whenever one comes or goes
serving/            mode 0700
    token           what clients must show; mode 0600, as all of them
    job             for which the token was made: another job, or start of it, gets another one
    headers         the same as a header, for ``curl -H @headers``
    key             by which routers and replicas of the run know each other
    ca.pem          what clients trust, where the run makes its own certificates
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from slurmft.errors import StorageError
from slurmft.storage.patience import writing
from slurmft.system.authentication import token_in
from slurmft.system.files import read_as, read_bytes, read_text, replace_atomically, trusted_owners, write_json

# --- The files of an endpoint in its run folder, and the cluster of its routers ---

MAX_ADDRESSES = 16


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """Where one router listens."""

    number: int
    """Of the node in the run."""

    node: str
    hosts: tuple[str, ...]
    """Names and addresses of the node, best first."""

    port: int
    tls: bool = False

    @property
    def urls(self) -> list[str]:
        """All ways to it, best first."""
        scheme = "https" if self.tls else "http"
        return [f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
                for host in self.hosts]  # fmt: skip


@dataclass(frozen=True, slots=True)
class HighAvailabilityCluster:
    """The routers of an endpoint: all are active, know all replicas, and share no state that one's death loses.

    ``endpoints.json`` holds it. A client that meets a dead router goes on with another one.
    """

    routers: tuple[RouterAddress, ...] = ()

    @property
    def available(self) -> bool:
        """Whether a router lives."""
        return bool(self.routers)

    def with_router(self, router: RouterAddress) -> Self:
        """It lives, in the place of an earlier one of its node."""
        others = self.without_node(router.number).routers
        return type(self)(tuple(sorted((*others, router), key=lambda each: each.number)))

    def without_node(self, number: int) -> Self:
        """The router of this node is gone."""
        return type(self)(tuple(each for each in self.routers if each.number != number))

    @classmethod
    def read(cls, run_folder: Path) -> Self:
        """As the run's ``endpoints.json`` has it; empty where there is none yet.

        Raises:
            StorageError: the file cannot be read or believed.
        """
        return read_as(cls, run_folder / "endpoints.json", owners=trusted_owners(run_folder)) or cls()

    def write(self, run_folder: Path) -> None:
        """Replace ``endpoints.json``.

        Raises:
            StorageError: it cannot be written.
        """
        routers = [{**asdict(each), "urls": each.urls} for each in self.routers]
        with writing(run_folder / "endpoints.json"):
            write_json(run_folder / "endpoints.json", {"routers": routers})


def folder_of(run_folder: Path) -> Path:
    """Where the endpoint's secrets are."""
    return run_folder / "serving"


def headers_file(run_folder: Path) -> Path:
    """For ``curl -H @file``."""
    return folder_of(run_folder) / "headers"


def ca_file(run_folder: Path) -> Path:
    """The certificates that clients of an endpoint with certificates of its own trust."""
    return folder_of(run_folder) / "ca.pem"


def prepare(run_folder: Path, token_file: Path | None, *, job: str = "", goes_on: bool = False) -> None:
    """Make the secrets that are not there yet; a token of the user's is copied, so that routers and clients agree.

    Args:
        job: which is about to serve; a token of another one's is replaced.
        goes_on: the endpoint is served already, and keeps its token.

    Raises:
        UsageError: the user's token cannot be used.
        StorageError: the run folder cannot be written.
    """
    prepare_key(run_folder)
    folder = folder_of(run_folder)
    with writing(folder):
        note = folder / "job"
        is_new = bool(job) and not goes_on and note.exists() and read_text(note, owners={os.geteuid()}) != job
        if token_file is not None:
            token = token_in(token_file)
        elif (folder / "token").exists() and not is_new:
            token = token_of(run_folder)
        else:
            token = secrets.token_urlsafe(32)
        replace_atomically(folder / "token", f"{token}\n")
        if job:
            replace_atomically(note, job)
        replace_atomically(headers_file(run_folder), f"Authorization: Bearer {token}\n")


def prepare_key(run_folder: Path) -> None:
    """Make the key that is not there yet.

    Raises:
        StorageError: the run folder cannot be written.
    """
    folder = folder_of(run_folder)
    with writing(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (folder / "key").exists():
            replace_atomically(folder / "key", secrets.token_hex(32))


def key_of(run_folder: Path) -> bytes:
    """The key by which the run's routers and replicas, and the nodes of one engine, know each other.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        return read_bytes(folder_of(run_folder) / "key", limit_bytes=1024, owners={os.geteuid()})
    except OSError as error:
        raise StorageError(f"cannot read {folder_of(run_folder) / 'key'}: {error.strerror or error}") from error


def token_of(run_folder: Path) -> str:
    """What clients must show.

    Raises:
        UsageError: the file cannot be read or believed.
    """
    return token_in(folder_of(run_folder) / "token")


def is_local(environment: Mapping[str, str]) -> bool:
    """Whether the run lives on this machine alone, so that nothing of it listens to others."""
    return environment.get("SLURMD_NODENAME", "").startswith("127.")  # as ``supervisor.cluster`` sets it there
