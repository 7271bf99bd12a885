"""``slurmft doctor`` and a run's container: programs on PATH stand in for the runtimes."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from of_each import of_each

import slurmft
from slurmft.config.run import RunConfig, validate
from slurmft.operations.site import look_at_container
from slurmft.policy.site import ContainerFacts, Finding, Level, judge_container
from slurmft.scheduler.slurm import names_option

# parts of the output of srun --help, of 22.05 and of one with pyxis
SRUN = """Parallel run options:
  -c, --cpus-per-task=ncpus   number of cpus required per task
      --container             Path to OCI container bundle
  -d, --dependency=type:jobid[:time] defer job until condition on jobid is satisfied
"""
WITH_PYXIS = (
    SRUN
    + """
Options provided by plugins:
      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH
                              [pyxis] the image to use for the container filesystem.
      --container-mounts=SRC:DST[:FLAGS][,SRC:DST...]
                              [pyxis] bind mount[s] inside the container.
"""
)

Stub = Callable[[str, str], None]


@of_each(text__option__expected=[(SRUN, "--container", True), (SRUN, "--container-image", False),
     (WITH_PYXIS, "--container-image", True), (WITH_PYXIS, "--container", True),
     ("--container-image is not known", "--container", False), ("", "--x", False)])  # fmt: skip
def test_the_options_that_srun_has(text: str, option: str, expected: bool):
    assert names_option(text, option) is expected


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Puts programs on the PATH, which has the shell's own otherwise."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)

    return put


def configured(tmp_path: Path, **container: Any) -> RunConfig:
    raw = {"command": "x", "run_folder": str(tmp_path / "run"), "working_directory": str(tmp_path),
           "container": {"python": sys.executable, **container}}  # fmt: skip
    return validate(raw, source="test")


def judged(tmp_path: Path, **container: Any) -> dict[str, Finding]:
    facts = look_at_container(configured(tmp_path, **container), os.environ)
    assert facts is not None
    return {each.check: each for each in judge_container(facts)}


def levels(found: dict[str, Finding]) -> dict[str, Level]:
    return {check: each.level for check, each in found.items()}


SHIFTED = 'while [[ $1 != -- ]]; do shift; done; shift; exec "$@"'


def test_a_python_inside_that_will_do(tmp_path: Path, stub: Stub):
    stub("box", SHIFTED)
    found = judged(tmp_path, runtime="command", command=["box", "{mounts}", "--"])
    assert levels(found) == {"container python": Level.OK}
    assert f"slurmft {slurmft.__version__}, torch " in found["container python"].text
    assert not (tmp_path / "run").exists(), "nothing is made"


@pytest.mark.parametrize(
    ("container", "check", "words"),
    [
        pytest.param({"command": ["no-such-box", "{mounts}"]}, "container", "there is no no-such-box on this machine",
                     id="no runtime"),
        pytest.param({"command": ["box", "{mounts}", "--"], "mounts": ["/no/such/data"]}, "container mounts",
                     "not on this machine: /no/such/data", id="no data"),
        pytest.param({"command": ["box", "{mounts}", "--"], "python": "/no/such/python"}, "container python",
                     "/no/such/python", id="no python"),
        pytest.param({"command": ["failing", "{mounts}"]}, "container python", "container failing: out of order",
                     id="a runtime that fails"),
        pytest.param({"command": ["old", "{mounts}"]}, "container python", "needs Python 3.11", id="an old one"),
        pytest.param({"runtime": "apptainer", "image": "/no/such.sif"}, "container image", "there is no /no/such.sif",
                     id="no image"),
        pytest.param({"runtime": "oci", "image": "/etc"}, "container image", "/etc/config.json", id="no bundle"),
        pytest.param({"runtime": "pyxis", "image": "some#image"}, "container", "srun has no option --container-image",
                     id="no pyxis"),
    ],
)  # fmt: skip
def test_what_will_not_work(tmp_path: Path, stub: Stub, container: dict[str, Any], check: str, words: str):
    stub("box", SHIFTED)
    stub("apptainer", "exit 9")
    stub("failing", "echo out of order >&2; exit 3")
    stub("old", 'echo "slurmft: container old: slurmft needs Python 3.11 or newer" >&2; echo more >&2; exit 1')
    stub("srun", f"cat <<'END'\n{SRUN}END")
    found = judged(tmp_path, **{"runtime": "command", **container})
    assert found[check].level is Level.PROBLEM and words in found[check].text
    assert found[check].remedy


def test_what_srun_starts_can_be_tried_in_a_job_only(tmp_path: Path, stub: Stub):
    stub("srun", f"cat <<'END'\n{WITH_PYXIS}END")
    found = judged(tmp_path, runtime="pyxis", image="some#image")
    assert levels(found) == {"container python": Level.NOTE}
    assert found["container python"].remedy.startswith("salloc ")


@pytest.mark.parametrize("works", [True, False])
def test_in_a_job_srun_tries_it(tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, works: bool):
    says = (
        "echo Python 3.12, slurmft 1, torch 2"
        if works
        else ("echo 'slurmft: container pyxis some#image: there is no torch for x' >&2; echo srun: error >&2; exit 1")
    )
    stub(
        "srun",
        f"if [[ $1 = --help ]]; then cat <<'END'\n{WITH_PYXIS}END\nelse echo \"$@\" > {tmp_path}/asked; {says}; fi",
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = judged(tmp_path, runtime="pyxis", image="some#image")["container python"]
    assert found.level is (Level.OK if works else Level.PROBLEM)
    assert ("torch 2" if works else "container pyxis some#image: there is no torch for x") in found.text
    asked = (tmp_path / "asked").read_text()
    assert "--nodes=1 --ntasks=1" in asked and "--container-image=some#image" in asked


def test_a_run_without_one_has_no_findings(tmp_path: Path):
    assert look_at_container(configured(tmp_path, runtime="none"), os.environ) is None


def test_a_trial_that_does_not_end_is_a_problem():
    facts = ContainerFacts(
        name="box", runtime="command", starter="box", has_starter=True, error="not ended within 300 s"
    )
    (found,) = judge_container(facts)
    assert (found.level, found.text) == (Level.PROBLEM, "not ended within 300 s")
