"""What works where torch is not installed: a login node has slurmft, and no trainer."""

import subprocess
import sys
from pathlib import Path

import pytest
from of_each import of_each

from slurmft.cli.main import VERBS
from slurmft.cli.submit import CONFIG

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # import torch: ModuleNotFoundError
from importlib import util
found = util.find_spec
util.find_spec = lambda name, *rest: None if name.partition(".")[0] == "torch" else found(name, *rest)
sys.argv[0] = "slurmft"
from slurmft.cli.main import main
main()
"""

HERE = [
    ["--version"],
    ["status"],
    ["status", "--json"],
    ["schema"],
    ["exclude", "list"],
    ["doctor"],
    ["health", "--level", "1"],
    ["hooks", "show"],
    ["requeue", "--rescue"],
    ["submit", str(CONFIG), "--dry-run", "--cluster", "local"],
    ["advise", str(CONFIG)],
]
"""Verbs of a login node that need nothing but a folder."""


def slurmft(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_TORCH, *arguments], cwd=folder, capture_output=True, text=True,
        timeout=120, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@of_each(verb=sorted(VERBS))
def test_every_verb_has_its_help(verb, tmp_path):
    done = slurmft(tmp_path, verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", HERE, ids=" ".join)
def test_verbs_of_a_login_node_work(arguments, tmp_path):
    done = slurmft(tmp_path, *arguments)
    assert "torch" not in done.stderr and "Traceback" not in done.stderr and done.returncode in (0, 1, 2, 69), (
        done.stderr
    )


def test_the_quickstart_says_what_it_needs(tmp_path):
    done = slurmft(tmp_path, "quickstart")
    assert done.returncode == 2
    assert done.stderr == (
        "slurmft: the quickstart trains with torch, which is not installed here\n  hint: pip install torch\n"
    )
    assert list(tmp_path.iterdir()) == []
