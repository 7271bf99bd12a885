"""An endpoint in its run folder: its files, its routers, handovers and updates of it, and its own certificates. No
aiohttp.

endpoints.json      the living routers, replaced atomically whenever one comes or goes
serving/            mode 0700
    token           what clients must show; mode 0600, as all of them
    job             for which the token was made: another job, or start of it, gets another one
    headers         the same as a header, for ``curl -H @headers``
    key             by which routers and replicas of the run know each other
    ca.pem          what clients trust, where the run makes its own certificates
weights.json        the newest weights that a trainer has published, replaced atomically under a lock
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Self

from slurmft.errors import Fenced, StorageError, UsageError
from slurmft.storage.checkpoint_names import GENERATION_VARIABLE, RUN_FOLDER_VARIABLE
from slurmft.storage.patience import SoftLock, patiently, translated, write_state, writing
from slurmft.storage.queue import PATIENCE_S, QUEUES_VARIABLE
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import (
    MOVE_AWAY,
    read_as,
    read_bytes,
    read_text,
    replace_atomically,
    shared_memory,
    token_in,
    trusted_owners,
    write_json,
)
from slurmft.system.processes import birth_of

if TYPE_CHECKING:
    import ssl

    from slurmft.policy.serving import Served

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


# --- ``handover.json`` of a run folder: the job to which the owner wants to hand an endpoint over ---
# While it names a predecessor that owns the run, the successor is a candidate: it may start agents and replicas beside
# the owner, and becomes the owner by a newer generation alone. Removing the file calls the handover off. It is read and
# changed with the run's lock held.

HANDOVER_FILE = "handover.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """One handover."""

    predecessor: str
    """Job that owns the run."""

    successor: str = ""
    """Job that is to take it over; empty while sbatch has not answered, and no job has presented itself."""

    reason: str = ""
    tries: int = 1
    waits: str = ""
    """Why the successor has no nodes yet, in words; empty once it has."""


def read_handover(run_folder: Path) -> Handover | None:
    """The handover that is under way, or was the last one; None where there is none.

    Raises:
        StorageError: the file cannot be read or believed.
    """
    return read_as(Handover, run_folder / HANDOVER_FILE)


def write_handover(run_folder: Path, handover: Handover) -> None:
    """Begin one, or note what has become of it.

    Raises:
        StorageError: the run folder cannot be written.
    """
    write_state(run_folder / HANDOVER_FILE, asdict(handover))


def call_off(run_folder: Path) -> None:
    """A candidate may not take the run over any more.

    Raises:
        StorageError: the run folder cannot be written.
    """
    path = run_folder / HANDOVER_FILE
    with writing(path):
        path.unlink(missing_ok=True)


# --- ``updates/`` of a run folder: the rolling update that is asked for, under way, or was the last one ---
# state.json       its number and what has become of it
# update-3.yaml    the whole configuration of update 3; never changed once it is there
#
# ``config.yaml`` of the run is replaced by it when the last replica is ready, and only then: it decides what the next
# start uses. State and configuration are changed with the run's lock held.

OWN_CONFIG = "config.yaml"
"""The run's configuration, as a path in its folder."""


class State(StrEnum):
    """What has become of an update."""

    ASKED = "asked for"
    ROLLING = "rolling"
    DONE = "done"
    BACK = "went back"


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One update."""

    number: int
    state: State
    reason: str = ""
    """Why it went back."""

    renewed: int = 0
    total: int = 0
    """Replicas with the new engine, and all."""

    @property
    def is_open(self) -> bool:
        """Whether it is neither done nor undone."""
        return self.state in (State.ASKED, State.ROLLING)


def read_update(run: RunFolder) -> Update | None:
    """The newest update; None before the first.

    Raises:
        StorageError: the file cannot be read or believed.
    """
    return read_as(Update, _folder(run) / "state.json")


def write_update(run: RunFolder, update: Update) -> None:
    """Note what has become of it. Call with the lock held.

    Raises:
        StorageError: the run folder cannot be written.
    """
    write_state(_folder(run) / "state.json", asdict(update))


def ask(run: RunFolder, text: str) -> Update:
    """Ask the run for an update to the configuration ``text``.

    Raises:
        UsageError: there is one already.
        StorageError: the run folder cannot be read or written.
    """
    with run.lock():
        before = read_update(run)
        if before is not None and before.is_open:
            raise UsageError(f"update {before.number} of {run.path.name} is {before.state.value}",
                             hint=f"slurmft status {run.path}")  # fmt: skip
        update = Update(number=before.number + 1 if before else 1, state=State.ASKED)
        with writing(_folder(run)):
            _folder(run).mkdir(mode=0o700, exist_ok=True)
            replace_atomically(run.path / config_name(update.number), text)
        write_update(run, update)
        return update


def config_name(number: int) -> str:
    """The configuration of an update, as a path in the run folder."""
    return f"updates/update-{number}.yaml"


def is_config_name(name: str) -> bool:
    """Whether it is one, or the run's own."""
    return name == OWN_CONFIG or re.fullmatch(r"updates/update-[0-9]{1,9}\.yaml", name, re.ASCII) is not None


def _folder(run: RunFolder) -> Path:
    return run.path / "updates"


# The run's own certificates: an authority of the run folder, which signs a new one for a router at each of its
# starts.
# serving/            mode 0700
#     ca.pem          what clients trust; the same as long as the run folder is there
#     ca.key          mode 0600
#
# A router's key is made on its node in memory, and deleted once it is loaded.

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
    import ssl  # a router's alone: verbs of a login node start without it

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


# --- Which weights the engines are to serve: the newest that a trainer has published ---
# A trainer that begins again from a checkpoint begins a new branch: its versions may be lower, and weights of the
# branch before count no more, also with a higher version.

WEIGHTS_FILE = "weights.json"
WEIGHTS_BYTES = 1 << 16
WEIGHTS_LOCK_S = 30.0
WEIGHTS_LOOK_S = 0.25
"""Between two looks of a router or a replica."""

MOST = 2**53
"""Above it JSON's readers do not agree on a number."""

_ROLE = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One publication."""

    path: str
    version: int
    branch: int
    """Grows with each trainer that begins, or begins again, to publish; versions grow within one."""

    writer: str
    run: str
    """Run folder of the writer, and ..."""

    generation: int
    """... of its attempt there."""

    at: str
    """When, in UTC."""

    @property
    def served(self) -> Served:
        """As an engine that has them says it."""
        from slurmft.policy.serving import Served  # `slurmft status` needs none

        return Served(self.branch, self.version)


def read_published(run_folder: Path) -> Published | None:
    """The newest publication for this endpoint; None before the first.

    Raises:
        StorageError: the file cannot be read or believed.
    """
    path = run_folder / WEIGHTS_FILE
    try:
        found = read_as(Published, path, limit_bytes=WEIGHTS_BYTES, owners=trusted_owners(run_folder))
    except OSError as error:
        raise translated(f"cannot read {path}", error) from error
    if found is not None and not (
        0 <= found.version < MOST and 0 < found.branch < MOST and found.path.startswith("/") and "\0" not in found.path
    ):
        raise StorageError(f"{path} is damaged: no weights are at {found.path!r} with the version {found.version}",
                           hint=MOVE_AWAY)  # fmt: skip
    return found


def publish_weights(path: str | Path, *, version: int, to: str | Path, patience_s: float = PATIENCE_S) -> None:
    """Have the engines of an endpoint take the weights at ``path``, which are whole; returns once that is durable.

    Rank 0 publishes; on other ranks nothing happens. Engines take them soon after, and each that starts later before
    its first request: keep the files until a newer publication was taken. A trainer that has loaded a checkpoint
    publishes what it has loaded: until then engines serve the weights of steps that are not done any more.

    Args:
        path: a file or folder on the shared filesystem.
        version: grows within one trainer's life, as its steps do; from 0 on.
        to: a role of this job that is an endpoint; or the run folder of an endpoint, where it is a ``Path`` or has a
            ``/``.
        patience_s: how long a filesystem that is full or away is waited for, in seconds.

    Raises:
        UsageError: nothing is at ``path``, the version does not grow, or ``to`` is no endpoint's.
        Fenced: a newer attempt of this run has published.
        StorageUnavailable: the filesystem was full or away for longer than ``patience_s``.
        StorageError: what was published before cannot be believed, or the folder cannot be written.
    """
    if type(version) is not int or not 0 <= version < MOST:
        raise UsageError(f"the version of weights is a whole number from 0 on, not {version!r}")
    folder, where = _endpoint(to), Path(path).absolute()
    if os.environ.get("RANK", "0") != "0":
        return
    if not where.exists():
        raise UsageError(f"there are no weights at {where}", hint="write them first, then publish them")
    writer = f"{os.uname().nodename}/{os.getpid()}/{birth_of(os.getpid())}"
    run, generation = os.environ.get(RUN_FOLDER_VARIABLE, ""), int(os.environ.get(GENERATION_VARIABLE) or 0)

    def publish() -> None:
        with SoftLock(folder / f"{WEIGHTS_FILE}.lock").hold(WEIGHTS_LOCK_S):
            before = read_published(folder)
            if before is not None and before.run == run and before.generation > generation:
                raise Fenced(f"a newer attempt of {run or 'this program'} has published weights to {folder}")
            is_mine = before is not None and before.writer == writer
            branch = 1 if before is None else before.branch + (not is_mine)
            if before is not None and is_mine and before.version >= version:
                if (before.version, before.path) == (version, str(where)):
                    return  # tried again after an error
                raise UsageError(f"version {version} of weights does not follow {before.version}",
                                 hint="versions grow while a trainer lives")  # fmt: skip
            new = Published(path=str(where), version=version, branch=branch, writer=writer, run=run,
                            generation=generation, at=datetime.now(UTC).isoformat())  # fmt: skip
            write_state(folder / WEIGHTS_FILE, asdict(new))

    patiently(publish, patience_s=patience_s)


def _endpoint(to: str | Path) -> Path:
    if isinstance(to, Path) or os.sep in to:
        folder = Path(to).absolute()
    elif not _ROLE.fullmatch(to):
        raise UsageError(f"{to!r} is no name of a role")
    elif not (queues := os.environ.get(QUEUES_VARIABLE)):
        raise UsageError(f"the role {to!r} belongs to a job of roles, and this process to none",
                         hint="give the run folder of the endpoint")  # fmt: skip
    else:
        folder = Path(queues).absolute().parent / "roles" / to
    if not (folder / "config.yaml").exists():
        raise UsageError(f"no endpoint has begun in {folder}", hint="name its role in needs")
    return folder
