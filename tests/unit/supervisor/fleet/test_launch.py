"""The command of an agent: outside and inside of a container, with srun and without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmft.config.run import RunConfig, validate
from slurmft.errors import LaunchError, UsageError
from slurmft.storage.run_folder import Attempt
from slurmft.supervisor.cluster import agents_argv, environment_for, launch_of

ATTEMPT = Attempt(job="7", restart=1)
AGENT = ["agent", "RUN/config.yaml", "7.1.0"]


def configured(path: Path, **container: Any) -> RunConfig:
    raw = {"command": "x", "run_folder": str(path), "working_directory": str(path.parent), "container": container,
           "slurm": {"srun_args": ["--own"]}}  # fmt: skip
    return validate(raw, source="test")


def argv(config: RunConfig, *, with_srun: bool = True) -> list[str]:
    launch = launch_of(config, ATTEMPT, with_srun=with_srun)
    return [word.replace(str(config.run_folder), "RUN") for word in (*launch.srun_options, "|", *launch.argv)]


def test_without_a_container_it_is_this_python(tmp_path: Path):
    expected = ["|", sys.executable, "-P", "-u", "-m", "slurmft", *AGENT]
    config = configured(tmp_path / "run")
    assert argv(config) == argv(config, with_srun=False) == expected


def test_a_command_starts_behind_a_process_outside(tmp_path: Path):
    config = configured(
        tmp_path / "run", runtime="command", command=["box", "{mounts}", "--"], image="img", python="/p"
    )
    words = argv(config)
    outside, inner = words[: words.index("box")], words[words.index("box") :]
    assert outside == ["|", sys.executable, "-P", "-u", "-m", "slurmft.agent.container_outside", "box img", "", "--"]
    assert inner[inner.index("--") + 1 : inner.index("--") + 3] == ["/p", "-c"] and inner[-3:] == AGENT
    assert words == argv(config, with_srun=False)
    assert (tmp_path / "run/checkpoints").is_dir(), "a mount needs its source"


def test_pyxis_has_no_process_outside(tmp_path: Path):
    words = argv(configured(tmp_path / "run", runtime="pyxis", image="some#image"))
    options, inner = words[: words.index("|")], words[words.index("|") + 1 :]
    assert options[0] == "--container-image=some#image" and all(word.startswith("--") for word in options)
    assert inner[:2] == ["python3", "-c"] and inner[-3:] == AGENT


def test_sruns_own_options_come_first_and_the_program_last(tmp_path: Path):
    config = configured(tmp_path / "run", runtime="pyxis", image="i")
    words = agents_argv(config, {"SLURM_CPUS_PER_TASK": "4"}, 1, ATTEMPT, host="n2")
    order = ["--nodelist", "--own", "--container-image=i", "python3"]
    assert [words.index(word) for word in order] == sorted(words.index(word) for word in order)
    assert words[words.index("--nodelist") + 1] == "n2"


@pytest.mark.parametrize("runtime", ["pyxis", "oci"])
def test_what_srun_starts_is_refused_without_slurm(tmp_path: Path, runtime: str):
    with pytest.raises(UsageError, match=f"container.runtime {runtime} is started by srun"):
        launch_of(configured(tmp_path / "run", runtime=runtime, image="/i"), ATTEMPT, with_srun=False)


def test_slurm_is_given_a_bundle_of_the_runs_own(tmp_path: Path):
    image, run = tmp_path / "image", tmp_path / "run"
    for folder in (image, run):
        folder.mkdir()
    (image / "config.json").write_text(json.dumps({"root": {"path": "tree"}, "mounts": []}))
    config = configured(run, runtime="oci", image=str(image))
    for _ in range(2):  # each agent that is started again makes it anew
        assert argv(config)[0] == "--container=RUN/container"
    made = json.loads((run / "container/config.json").read_text())
    assert str(run) in {each["destination"] for each in made["mounts"]}
    assert (run / "container/rootfs").readlink() == image / "tree"
    assert sorted(path.name for path in (run / "container").iterdir()) == ["config.json", "rootfs"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is no OCI bundle"), ("{", "cannot be used"), ("[]", "not an object"), ("{}", "no root.path")],
    ids=["missing", "damaged", "a list", "empty"],
)
def test_an_image_that_is_no_bundle(tmp_path: Path, content: str | None, words: str):
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(LaunchError, match=words):
        launch_of(configured(tmp_path / "run", runtime="oci", image=str(tmp_path)), ATTEMPT, with_srun=True)


@pytest.mark.parametrize(
    ("container", "left_out"),
    [({}, set()), ({"runtime": "pyxis", "image": "i"}, {"PYTHONHOME"}),
     ({"runtime": "oci", "image": "i"}, {"PYTHONHOME", "SLURM_NODEID", "SLURMD_NODENAME"})],
    ids=["none", "pyxis", "oci"],
)  # fmt: skip
def test_variables_that_are_wrong_inside(tmp_path: Path, container: dict[str, str], left_out: set[str]):
    given = {name: "x" for name in ("PYTHONHOME", "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_JOB_ID", "PATH")}
    assert set(given) - set(environment_for(configured(tmp_path / "run", **container), given)) == left_out
