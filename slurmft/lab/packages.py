"""The Debian packages a lab needs: which are missing, and installing them as root."""

from __future__ import annotations

import os
import shutil

from slurmft.errors import LabError, LabUnavailable
from slurmft.lab.processes import SEARCH_PATH, run

BASE = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "useradd": "passwd",
}
"""One program of each package: its presence stands for the package's."""

ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}


def missing_packages(*, accounting: bool) -> tuple[str, ...]:
    """Packages whose programs are not installed, without duplicates."""
    programs = BASE | (ACCOUNTING if accounting else {})
    missing = [package for program, package in programs.items() if shutil.which(program, path=SEARCH_PATH) is None]
    return tuple(dict.fromkeys(missing))


def require_root() -> None:
    """Every command that touches a lab needs root.

    Raises:
        LabUnavailable: this is an ordinary user.
    """
    if os.geteuid() != 0:
        raise LabUnavailable("the Slurm lab needs root (network and mount namespaces)", hint="try sudo")


def why_unavailable(*, accounting: bool = False) -> str | None:
    """Why no lab can be built here right now, or None. Installs nothing, changes nothing."""
    if os.geteuid() != 0:
        return "the Slurm lab needs root (network and mount namespaces)"
    if missing := missing_packages(accounting=accounting):
        return f"Slurm's packages are missing: {' '.join(missing)} (`slurmft lab up` installs them on Debian)"
    try:
        run(["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"], doing="making namespaces")
    except LabError as error:
        return f"this machine does not allow namespaces: {error.what}"
    return None


def ensure_packages(*, accounting: bool) -> None:
    """Install what is missing with apt; returns at once when nothing is.

    Raises:
        LabUnavailable: no root, no apt, or the installation failed.
    """
    missing = missing_packages(accounting=accounting)
    if missing and os.geteuid() == 0:
        install(missing)
    if (reason := why_unavailable(accounting=accounting)) is not None:
        raise LabUnavailable(reason, hint="needs root on Debian 12 or newer; a container must be allowed namespaces")


def install(packages: tuple[str, ...]) -> None:
    """Install packages with apt, without what they recommend.

    Raises:
        LabUnavailable: there is no apt, or it failed.
    """
    if shutil.which("apt-get", path=SEARCH_PATH) is None:
        raise LabUnavailable(f"missing: {' '.join(packages)}, and there is no apt-get to install them")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": SEARCH_PATH}
    # Another apt run may hold the lock; dpkg's triggers of services that cannot start here are harmless.
    apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120"]
    try:
        run([*apt, "update"], doing="apt-get update", timeout_s=300, environment=environment)
        run(
            [*apt, "install", "--no-install-recommends", *packages],
            doing=f"installing {' '.join(packages)}",
            timeout_s=900,
            environment=environment,
        )
    except LabError as error:
        raise LabUnavailable(
            str(error), hint=f"as root: apt-get install --no-install-recommends {' '.join(packages)}"
        ) from error
