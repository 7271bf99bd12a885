"""An endpoint from outside of its job: its secrets, and which router lives, as a client would find out."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from slurmft.config.config import RunConfig
from slurmft.errors import LaunchError
from slurmft.inference.serving.certificates import prepare_authority
from slurmft.inference.serving.endpoint import HighAvailabilityCluster, headers_file, prepare
from slurmft.storage.run_folder import RunFolder

TRY_S = 2.0
LOOK_S = 0.2


def prepare_endpoint(settings: RunConfig) -> Path:
    """Make the run folder and the secrets of the endpoint; returns the file with the header that has the token.

    Raises:
        UsageError: the user's token cannot be used, or no certificate be made.
        StorageError: the run folder cannot be written.
    """
    if settings.inference is None or settings.inference.serving is None:
        raise TypeError("this configuration has no section inference.serving")
    run = RunFolder(settings.run_folder)
    run.create()
    prepare(run.path, settings.inference.serving.token_file)
    if settings.inference.serving.tls_own:
        prepare_authority(run.path)
    return headers_file(run.path)


def living_url(run: RunFolder, *, within_s: float = 0.0) -> str:
    """The address of a router that takes connections.

    Raises:
        LaunchError: there is none within these seconds.
        StorageError: ``endpoints.json`` cannot be read or believed.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        cluster = HighAvailabilityCluster.read(run.path)
        for url in [url for router in cluster.routers for url in router.urls]:
            if _answers(url):
                return url
        if time.monotonic() >= deadline_s:
            names = ", ".join(each.node for each in cluster.routers)
            what = f"none of its routers answers ({names})" if names else "it has no router at the moment"
            raise LaunchError(f"the endpoint {run.path.name} cannot be reached: {what}",
                              hint=f"slurmft status {run.path}; slurmft explain {run.path}")  # fmt: skip
        time.sleep(LOOK_S)


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=TRY_S).close()
    except OSError:
        return False
    return True
