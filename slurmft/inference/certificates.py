"""The run's own certificates: an authority of the run folder, which signs a new one for a router at each of its starts.

serving/            mode 0700
    ca.pem          what clients trust; the same as long as the run folder is there
    ca.key          mode 0600

A router's key is made on its node in memory, and deleted once it is loaded.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slurmft.errors import UsageError
from slurmft.inference.endpoint import ca_file, folder_of
from slurmft.storage.patience import writing
from slurmft.system.files import read_bytes, replace_atomically
from slurmft.system.private_folder import shared_memory

AUTHORITY_DAYS, ROUTER_DAYS = 3650, 397
OPENSSL_S = 30.0
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
SETTINGS = """
[req]
distinguished_name = name
prompt = no
x509_extensions = authority
[name]
CN = {name}
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[router]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = {hosts}
authorityKeyIdentifier = keyid
"""


def prepare_authority(run_folder: Path) -> None:
    """Make the run's authority, where it is not there yet.

    Raises:
        UsageError: openssl is missing or cannot do it.
        StorageError: the run folder cannot be written.
    """
    if ca_file(run_folder).exists() and _key_of(run_folder).exists():
        return
    with _workplace(()) as folder:
        _openssl(folder, "req", "-x509", *NEW_KEY, "-days", str(AUTHORITY_DAYS), "-config", "settings", "-keyout",
                 "ca.key", "-out", "ca.pem")  # fmt: skip
        with writing(folder_of(run_folder)):
            for made, place in (("ca.key", _key_of(run_folder)), ("ca.pem", ca_file(run_folder))):
                replace_atomically(place, read_bytes(folder / made, owners={os.geteuid()}))


def context_for(run_folder: Path, hosts: Sequence[str]) -> ssl.SSLContext:
    """A router's side of TLS, with a new key and certificate.

    Args:
        hosts: names and addresses by which clients find the router.

    Raises:
        UsageError: openssl is missing or cannot do it.
    """
    with _workplace([*hosts, "localhost", "127.0.0.1", "::1"]) as folder:
        _openssl(folder, "req", "-new", *NEW_KEY, "-config", "settings", "-keyout", "router.key", "-out", "router.csr")
        _openssl(folder, "x509", "-req", "-in", "router.csr", "-CA", str(ca_file(run_folder).absolute()), "-CAkey",
                 str(_key_of(run_folder).absolute()), "-set_serial", f"0x{secrets.token_hex(16)}", "-days",
                 str(ROUTER_DAYS), "-extfile", "settings", "-extensions", "router", "-out", "router.pem")  # fmt: skip
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "router.pem", folder / "router.key")
    return context


def _key_of(run_folder: Path) -> Path:
    return folder_of(run_folder) / "ca.key"


@contextmanager
def _workplace(hosts: Sequence[str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"slurmft-tls-{os.geteuid()}-", dir=shared_memory()) as name:
        folder = Path(name)
        names = ", ".join(dict.fromkeys(_alternative(host) for host in hosts)) or "DNS:localhost"
        replace_atomically(folder / "settings", SETTINGS.format(name="slurmft endpoint", hosts=names), durable=False)
        yield folder


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _openssl(folder: Path, *arguments: str) -> None:
    try:
        done = subprocess.run(
            ["openssl", *arguments], cwd=folder, capture_output=True, text=True, timeout=OPENSSL_S, check=False,
            stdin=subprocess.DEVNULL, umask=0o077, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"inference.serving.tls_own: openssl cannot be run: {error}",
                         hint="install openssl, or give tls_certificate and tls_key") from error  # fmt: skip
    if done.returncode != 0:
        told = " ".join(done.stderr.split())[-500:]
        raise UsageError(f"inference.serving.tls_own: openssl {arguments[0]} failed: {told}")
