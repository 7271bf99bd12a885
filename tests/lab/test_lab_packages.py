"""When no lab can be built: the reason, and what is done about it. Nothing is installed here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slurmft
from slurmft.errors import LabUnavailable
from slurmft.lab import settings
from slurmft.lab.cluster import Lab


@pytest.fixture
def only_util_linux(monkeypatch):
    present = {"nsenter", "setpriv", "apt-get"}
    monkeypatch.setattr(settings.shutil, "which", lambda name, path: f"/bin/{name}" if name in present else None)


def test_missing_packages_are_named_once(only_util_linux):
    assert settings.missing_packages(accounting=False) == (
        "slurmctld",
        "slurmd",
        "slurm-client",
        "munge",
        "iproute2",
        "passwd",
    )
    assert settings.missing_packages(accounting=True)[-2:] == ("slurmdbd", "mariadb-server")


def test_missing_packages_are_a_reason_to_skip(only_util_linux, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert Lab.availability().startswith("Slurm's packages are missing: slurmctld slurmd")


def test_root_installs_what_is_missing_without_recommendations(only_util_linux, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    calls = []
    monkeypatch.setattr(settings, "run", lambda argv, **options: calls.append(list(argv)) or "")
    with pytest.raises(LabUnavailable, match="packages are missing"):  # nothing was really installed
        settings.ensure_packages(accounting=False)
    assert [call[0] for call in calls] == ["apt-get", "apt-get"]
    assert calls[0][-1] == "update"
    assert calls[1][-8:-6] == ["install", "--no-install-recommends"]


def test_an_ordinary_user_is_told_so_and_installs_nothing(only_util_linux, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in Lab.availability()
    with pytest.raises(LabUnavailable, match="needs root"):
        settings.ensure_packages(accounting=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize("words", [["up"], ["down"], ["status"], ["exec", "true"], ["kill-node", "n1"]], ids=" ".join)
def test_the_command_line_exits_69_without_root(words, tmp_path):
    # loaded before root is dropped: a checkout may lie in a folder that only its owner may enter
    launch = "import os, sys; import slurmft.cli.lab, slurmft.system.processes; from slurmft.cli.main import main; "
    launch += "os.setgid(65534); os.setuid(65534); main()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", launch, "lab", "--folder", "/var/lib/slurmft-lab-nobody", *words],
        capture_output=True,
        text=True,
        cwd=Path(slurmft.__file__).parent.parent,
        timeout=30,
        check=False,
    )
    if words == ["down"]:  # there is nothing there, so nothing needs root
        assert done.returncode == 0
        return
    assert done.returncode == 69, done.stderr
    assert done.stderr.startswith("slurmft: the Slurm lab needs root")
