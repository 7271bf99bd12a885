"""Where measured values go: a file for node_exporter's textfile collector, a port, and targets for Prometheus."""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.inference.serving.endpoint import HighAvailabilityCluster
from slurmft.policy.strangers import Strangers
from slurmft.storage.run_folder import RunFolder
from slurmft.system.exposition import Family, encoded, text
from slurmft.system.files import read_json, replace_atomically, write_json

PORT_FILE = "metrics.json"
REQUEST_S = 5.0
"""A scraper that is slower to send its request is cut off."""

MAX_SCRAPES, SCRAPES_PER_ADDRESS = 32, 8
"""Connections at one time; one more ends the oldest, of its own address first."""

log = logging.getLogger(__name__)


def write_textfile(path: Path, families: Iterable[Family]) -> None:
    """Replace the file, readable by all: the collector is another user.

    Raises:
        OSError: the old one is untouched.
    """
    replace_atomically(path, text(families), mode=0o644, durable=False)


def textfile_of(folder: Path, user: str, run: str) -> Path:
    """The file of one run, by a name that the collector takes."""
    return folder / f"slurmft-{re.sub(r'[^A-Za-z0-9_.-]', '_', f'{user}-{run}')[:200]}.prom"


class Scrapes:
    """``/metrics`` on a port, in threads of their own.

    Args:
        families: what is shown; called for each scrape, by one thread at a time.
        token: what scrapes must send as ``Authorization: Bearer``; empty: nothing.

    Raises:
        OSError: the address cannot be listened to.
    """

    def __init__(self, address: str, port: int, families: Callable[[], Iterable[Family]], *, token: str = "") -> None:
        lock, guard = threading.Lock(), threading.Lock()
        strangers: Strangers[socket.socket] = Strangers(MAX_SCRAPES, SCRAPES_PER_ADDRESS)
        expected = f"Bearer {token}".encode() if token else b""

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = REQUEST_S
            server_version, sys_version = "slurmft", ""

            def do_GET(self) -> None:
                given = self.headers.get("Authorization", "").encode(errors="replace")
                if expected and not hmac.compare_digest(given, expected):
                    self._answer(401, b"the token is missing or wrong\n", "text/plain")
                    return
                if expected:
                    with guard:
                        strangers.forget(self.connection)
                if self.path.partition("?")[0] != "/metrics":
                    self._answer(404, b"there is only /metrics\n", "text/plain")
                else:
                    with lock:
                        body, kind = encoded(families(), self.headers.get("Accept", ""))
                    self._answer(200, body, kind)

            def _answer(self, code: int, body: bytes, kind: str) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                log.debug("metrics: " + format, *arguments)

        class Server(http.server.ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            daemon_threads = True
            block_on_close = False

            def process_request(self, request: Any, client_address: Any) -> None:
                with guard:
                    for oldest in strangers.admit(request, str(client_address[0])):
                        with contextlib.suppress(OSError):
                            oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    with guard:
                        strangers.forget(request)

            def handle_error(self, request: Any, client_address: Any) -> None:
                log.debug("a scrape ended early", exc_info=True)

        self._server = Server((address, port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True, name="metrics").start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


def note_port(run: RunFolder, address: str, port: int) -> None:
    """Leave where the run is scraped, for ``targets``.

    Raises:
        OSError: the run folder cannot be written.
    """
    write_json(run.path / PORT_FILE, {"address": address, "host": socket.gethostname(), "port": port}, durable=False)


def forget_port(run: RunFolder) -> None:
    """Nothing is scraped there any more."""
    with contextlib.suppress(OSError):
        (run.path / PORT_FILE).unlink(missing_ok=True)


def targets(runs: Iterable[RunFolder]) -> list[dict[str, Any]]:
    """For Prometheus' ``file_sd_configs``: supervisors and routers of the caller's own ones of these runs. What listens
    on a loopback address is a target on its own machine alone.

    The owner of a run chooses its hosts, and Prometheus sends its token to all of them: those of other users' runs are
    left out.
    """
    found: list[dict[str, Any]] = []
    for run in runs:
        with contextlib.suppress(OSError):
            if run.path.stat().st_uid != os.geteuid():
                continue
        labels = {"run": run.path.name}
        with contextlib.suppress(StorageError, OSError):
            facts = read_json(run.path / PORT_FILE, owners={os.geteuid()}) or {}
            if (target := _target(facts)) is not None:
                found.append({"targets": [target], "labels": {**labels, "__meta_slurmft_kind": "supervisor"}})
        with contextlib.suppress(StorageError, OSError):
            for router in HighAvailabilityCluster.read(run.path).routers:
                for url in router.urls[:1]:
                    scheme, _, at = url.partition("://")
                    kind = {"__meta_slurmft_kind": "router", **({"__scheme__": scheme} if router.tls else {})}
                    found.append({"targets": [at], "labels": {**labels, **kind}})
    return found


def _target(facts: dict[str, Any]) -> str | None:
    address, host, port = str(facts.get("address", "")), str(facts.get("host", "")), facts.get("port")
    if type(port) is not int or not re.fullmatch(r"[A-Za-z0-9.:_-]{1,255}", address):
        return None
    if address.startswith("127.") or address == "::1":
        if host != socket.gethostname():
            return None
    elif address in ("0.0.0.0", "::"):  # noqa: S104 - compared with, not listened on
        address = host
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def write_targets(path: Path, runs: Iterable[RunFolder]) -> None:
    """Replace the file for ``file_sd_configs``.

    Raises:
        OSError: the old one is untouched.
    """
    replace_atomically(path, json.dumps(targets(runs), indent=1) + "\n", mode=0o644, durable=False)
