"""Recipes under packaging/: they ask for what setup.cfg asks for, and are read by the tools that they are for."""

import ast
import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from docs_pages import REPOSITORY

import slurmft

PACKAGING = REPOSITORY / "packaging"
SETUP = configparser.ConfigParser()
SETUP.read(REPOSITORY / "setup.cfg")
OTHER_NAMES = {"python-xxhash": "xxhash", "prometheus_client": "prometheus-client"}
"""Names in a channel of conda's that are not those of the package index."""


def wanted(extra: str = "") -> set[tuple[str, str]]:
    """Name and least version of each requirement."""
    text = SETUP["options.extras_require"][extra] if extra else SETUP["options"]["install_requires"]
    return {(name, least) for line in text.split() for name, _, least in [line.partition(">=")]}


def test_the_recipe_for_conda_asks_for_the_same() -> None:
    recipe = yaml.safe_load((PACKAGING / "conda/recipe.yaml").read_text())
    assert recipe["context"]["version"] == slurmft.__version__
    found = {line.partition(" >=")[::2] for line in recipe["requirements"]["run"] if not line.startswith("python >=")}
    assert {(OTHER_NAMES.get(name, name), least) for name, least in found} == wanted()


def test_the_recipe_for_spack_asks_for_the_same() -> None:
    text = (PACKAGING / "spack/slurmft/package.py").read_text()
    ast.parse(text)
    assert f'version("{slurmft.__version__}")' in text and 'depends_on("python@3.11:"' in text
    found = re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):", type=\("build", "run"\)(?:, when="\+(\w+)")?', text)
    for variant in ("", "train", "inference"):
        assert {(name, least) for name, least, when in found if when == variant} == wanted(variant), variant


def test_the_easyconfig_names_files_that_the_wheel_has() -> None:
    text = (PACKAGING / "easybuild/slurmft.eb").read_text()
    values = {node.targets[0].id: node.value for node in ast.parse(text).body
              if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}  # fmt: skip
    assert ast.literal_eval(values["version"]) == slurmft.__version__
    assert f"slurmft-{slurmft.__version__}.tar.gz" in text
    scripts = {Path(each).name for each in SETUP["options"]["scripts"].split()} | {"slurmft"}
    files = ast.literal_eval(values["sanity_check_paths"])["files"]
    assert {Path(each).name for each in files if each.startswith("bin/")} <= scripts
    assert "share/man/man1/slurmft.1" in files
    assert SETUP["options.data_files"]["share/man/man1"].split() == ["packaging/man/slurmft.1"]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_nothing_to_say_about_the_manual_page() -> None:
    page = PACKAGING / "man/slurmft.1"
    told = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", str(page)], capture_output=True, text=True, check=True
    )
    assert told.stderr == ""


LMOD = Path("/usr/share/lmod/lmod/init/bash")


@pytest.mark.skipif(not LMOD.exists(), reason="Lmod is not installed")
def test_lmod_loads_and_unloads_the_module(tmp_path: Path) -> None:
    (tmp_path / "slurmft").mkdir()
    shutil.copy(PACKAGING / "lmod/slurmft.lua", tmp_path / "slurmft/1.lua")
    script = (
        f'source {LMOD}; module use {tmp_path}; module load slurmft; echo "$PATH"; module unload slurmft; echo "$PATH"'
    )
    told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True,
                          env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})  # fmt: skip
    loaded, unloaded = told.stdout.splitlines()
    assert loaded.startswith("/opt/slurmft/bin:") and unloaded == loaded.removeprefix("/opt/slurmft/bin:")
