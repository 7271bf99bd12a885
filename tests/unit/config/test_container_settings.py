"""The section ``container`` of a configuration: what is taken, and what is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmft.config.run import RunConfig, load
from slurmft.errors import ConfigError
from slurmft.policy.container import Mount

BWRAP = {"runtime": "command", "command": "bwrap {mounts} --"}


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def make(container: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
        raw = {"command": "x", "run_folder": "runs/r", **changes, "container": container or {}}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
        return load(tmp_path / "c.yaml")

    return make


def test_by_default_there_is_none(loaded: Any):
    assert loaded().contained() is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param("/data", ("/data", "/data", False), id="a path"),
        pytest.param("/data:/in", ("/data", "/in", False), id="elsewhere"),
        pytest.param("/data:/in:ro", ("/data", "/in", True), id="read-only"),
        pytest.param("/data:/in:rw", ("/data", "/in", False), id="read and write"),
        pytest.param("data", ("HERE/data", "HERE/data", False), id="relative"),
        pytest.param("../data:/in", ("ABOVE/data", "/in", False), id="relative, upwards"),
        pytest.param({"source": "/a:b", "target": "/c"}, ("/a:b", "/c", False), id="with a colon"),
        pytest.param({"source": "/a b", "read_only": True}, ("/a b", "/a b", True), id="with a blank"),
    ],
)
def test_a_mount(loaded: Any, tmp_path: Path, given: Any, expected: tuple[str, str, bool]):
    plan = loaded({**BWRAP, "mounts": [given]}).contained()
    here = [text.replace("HERE", str(tmp_path)).replace("ABOVE", str(tmp_path.parent)) for text in expected[:2]]
    assert Mount(source=here[0], target=here[1], read_only=expected[2]) in plan.mounts


def test_the_runs_folders_are_mounted_in_any_case(loaded: Any, tmp_path: Path):
    plan = loaded(BWRAP, checkpoint={"directory": "/big/c", "local_directory": "/ssd/l"}).contained()
    assert {each.target for each in plan.mounts} == {
        str(tmp_path), str(tmp_path / "runs/r"), "/big/c", "/ssd/l", "/dev/shm"
    }  # fmt: skip
    assert plan.workdir == str(tmp_path)


def test_a_working_directory_inside_is_the_trainers(loaded: Any, tmp_path: Path):
    config = loaded({**BWRAP, "workdir": "/code"})
    assert config.trainer_directory == Path("/code")
    assert str(tmp_path) not in {each.target for each in config.contained().mounts}


@pytest.mark.parametrize(
    ("container", "words"),
    [
        pytest.param({"runtime": "docker"}, "container.runtime", id="an unknown runtime"),
        pytest.param({"image": "x"}, "image without container.runtime", id="no runtime"),
        pytest.param({"runtime": "pyxis"}, "runtime: pyxis needs container.image", id="no image"),
        pytest.param({"runtime": "command"}, "runtime: command needs container.command", id="no command"),
        pytest.param({"runtime": "oci", "image": "/i", "command": "x"}, "for runtime: command, not oci",
                     id="a command"),
        pytest.param({**BWRAP, "options": ["-x"]}, "belong into container.command", id="options"),
        pytest.param({**BWRAP, "imgae": "x"}, "did you mean image", id="a typo"),
        pytest.param({**BWRAP, "workdir": "code"}, "absolute, and without ..", id="a relative workdir"),
        pytest.param({**BWRAP, "mounts": ["/a:b"]}, "absolute, and without ..", id="a relative target"),
        pytest.param({**BWRAP, "mounts": ["/a:/b/../c"]}, "absolute, and without ..", id="a target upwards"),
        pytest.param({**BWRAP, "mounts": ["/a:/b:/c"]}, "is not SOURCE, SOURCE:TARGET", id="three paths"),
        pytest.param({**BWRAP, "mounts": ["/a:/b:ro:x"]}, "is not SOURCE, SOURCE:TARGET", id="too many parts"),
        pytest.param({**BWRAP, "mounts": [":/b"]}, "is not SOURCE, SOURCE:TARGET", id="no source"),
        pytest.param({**BWRAP, "mounts": [""]}, "is not SOURCE, SOURCE:TARGET", id="nothing"),
        pytest.param({**BWRAP, "mounts": ["/x:/dev/shm"]}, "hides what the run needs in /dev/shm", id="memory"),
        pytest.param({**BWRAP, "command": "bwrap"}, "container.command: one of its words must be", id="no mounts"),
        pytest.param({"runtime": "pyxis", "image": "x", "mounts": [{"source": "/a,b"}]}, "container.mounts: pyxis",
                     id="a comma"),
    ],
)  # fmt: skip
def test_what_is_refused(loaded: Any, container: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as refused:
        loaded(container)
    assert words in str(refused.value)


def test_a_run_folder_that_the_runtime_cannot_be_given(loaded: Any):
    with pytest.raises(ConfigError, match="takes ',' in"):
        loaded({"runtime": "apptainer", "image": "/i.sif"}, run_folder="/scratch/a,b")
    assert loaded(BWRAP, run_folder="/scratch/a,b").contained() is not None


def test_it_is_written_down_and_read_back(loaded: Any, tmp_path: Path):
    config = loaded({**BWRAP, "mounts": ["/a:/b:ro", {"source": "/c:d"}], "python": "/p"})
    (tmp_path / "again.yaml").write_text(config.as_yaml())
    assert load(tmp_path / "again.yaml") == config
