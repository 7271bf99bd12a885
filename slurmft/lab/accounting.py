"""Accounting for the lab: MariaDB and slurmdbd, both inside the controller's namespaces, reached by no network."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
from pathlib import Path

from slurmft.errors import LabError
from slurmft.lab.daemons import log_on_failure, run_inside
from slurmft.lab.members import Member, enter_argv
from slurmft.lab.processes import make_folder, run, wait_until
from slurmft.lab.settings import LabSettings
from slurmft.lab.slurm_conf import DATABASE, DATABASE_USER, LabPaths, slurmdbd_conf_text

DATABASE_ACCOUNT = "mysql"


def create_database(paths: LabPaths, inside: Member | None = None) -> None:
    """Make an empty database folder of the mysql user. Needs no namespace, so it may run before the network stands.

    Args:
        inside: the controller, where the database server is that of another release.
    """
    make_folder(paths.database)
    shutil.chown(paths.database, DATABASE_ACCOUNT, DATABASE_ACCOUNT)
    argv = [
        # its temporary tables have numbered names, which would clash between two labs in /tmp
        "env",
        f"TMPDIR={paths.database}",
        "mariadb-install-db",
        "--no-defaults",
        f"--user={DATABASE_ACCOUNT}",
        f"--datadir={paths.database}/data",
        "--auth-root-authentication-method=socket",
        "--skip-test-db",
    ]
    words = [] if inside is None else enter_argv(inside)
    run([*words, *argv], doing="creating the accounting database", timeout_s=120)


def start_accounting(controller: Member, paths: LabPaths, settings: LabSettings) -> None:
    """Start MariaDB, give slurmdbd its database, start slurmdbd; return when slurmdbd answers.

    Raises:
        LabError: one of them did not start; quotes its log.
    """
    password = secrets.token_hex(16)
    _write_private(paths.etc / "slurmdbd.conf", slurmdbd_conf_text(settings, password))
    with log_on_failure(paths.log / "mariadbd.log"):
        _start_database(controller, paths, password)
    with log_on_failure(paths.log / "slurmdbd.log"):
        run_inside(controller, paths, ["slurmdbd"], doing="starting slurmdbd")
        wait_until(lambda: _accounting_answers(controller, paths), doing="waiting for slurmdbd", within_s=30)


def _start_database(controller: Member, paths: LabPaths, password: str) -> None:
    # The grant happens while the server starts, by the server itself: no root login, no password in an argv.
    grants = paths.database / "grants.sql"
    owner = f"'{DATABASE_USER}'@'localhost'"
    _write_private(
        grants,
        f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
        f"CREATE USER IF NOT EXISTS {owner} IDENTIFIED BY '{password}';\n"
        f"GRANT ALL ON {DATABASE}.* TO {owner};\n",
    )
    entry = pwd.getpwnam(DATABASE_ACCOUNT)
    os.chown(grants, entry.pw_uid, entry.pw_gid)
    log = paths.log / "mariadbd.log"
    log.touch(mode=0o640)
    os.chown(log, entry.pw_uid, entry.pw_gid)
    argv = [
        "setsid",
        "--fork",
        "mariadbd",
        "--no-defaults",
        f"--user={DATABASE_ACCOUNT}",
        f"--datadir={paths.database}/data",
        f"--socket={paths.database_socket}",
        f"--tmpdir={paths.database}",
        "--pid-file=mariadbd.pid",
        f"--log-error={log}",
        f"--init-file={grants}",
        "--skip-networking",
        "--innodb-log-file-size=64M",
        "--innodb-flush-log-at-trx-commit=0",
        # slurmdbd warns below these
        "--innodb-buffer-pool-size=128M",
        "--innodb-lock-wait-timeout=900",
    ]
    run_inside(controller, paths, argv, doing="starting MariaDB")
    wait_until(paths.database_socket.exists, doing="waiting for MariaDB", within_s=30)


def _accounting_answers(controller: Member, paths: LabPaths) -> bool:
    try:
        run_inside(controller, paths, ["sacctmgr", "-n", "show", "cluster"], doing="asking slurmdbd", timeout_s=10)
    except LabError:
        return False
    return True


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
