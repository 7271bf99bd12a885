"""An option that no list of ours has is looked for in the site's own ``sbatch --help``, once and for a limited time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmft.config import run as config_run
from slurmft.errors import ConfigError, UsageError
from slurmft.operations.run_configuration import load_given
from slurmft.scheduler import slurm
from slurmft.scheduler.submission import parse_sbatch_options

HELP = "Usage: sbatch\\n      --of-a-plugin=text   from spank\\n      --plugin-flag        from spank\\n"


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Puts an sbatch on the PATH that runs this line of shell; returns the file that has a line for each call."""
    calls = tmp_path / "calls"
    calls.touch()

    def put(line: str) -> Path:
        script = tmp_path / "bin" / "sbatch"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/bash\necho "$@" >> {calls}\n{line}\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
        return calls

    slurm.options_of_site.cache_clear()
    yield put
    slurm.options_of_site.cache_clear()


def configuration(tmp_path: Path, **section: object) -> Path:
    path = tmp_path / "run.yaml"
    lines = "".join(f"  {key}: {value}\n" for key, value in section.items())
    path.write_text(f"command: [python, train.py]\nrun_folder: {tmp_path}/run\nnodes: 1\nslurm:\n{lines}")
    return path


def test_an_option_of_a_plug_in_is_taken_in_a_configuration(sbatch: Callable[[str], Path], tmp_path: Path) -> None:
    calls = sbatch(f"printf '{HELP}'")
    path = configuration(tmp_path, of_a_plugin="x", partition="low")
    settings = load_given(path)
    assert settings.slurm.model_extra == {"of_a_plugin": "x"}
    assert load_given(path) == settings
    assert calls.read_text() == "--help\n", "asked once"
    with pytest.raises(ConfigError, match="of_a_plugni is not an option of sbatch"):
        load_given(configuration(tmp_path, of_a_plugni="x"))


def test_known_options_ask_nothing(sbatch: Callable[[str], Path], tmp_path: Path) -> None:
    calls = sbatch("exit 1")
    load_given(configuration(tmp_path, partition="low", spread_segments="true", mem_update="1"))
    parse_sbatch_options(["--container-type=x", "--consolidate-segments"])
    assert calls.read_text() == ""


def test_behind_the_dashes_of_submit(sbatch: Callable[[str], Path]) -> None:
    sbatch(f"printf '{HELP}'")
    assert parse_sbatch_options(["--of-a-plugin=x", "--plugin-flag"]) == {"of-a-plugin": "x", "plugin-flag": True}
    with pytest.raises(UsageError, match="needs a value"):
        parse_sbatch_options(["--of-a-plugin"])
    with pytest.raises(UsageError, match="not an option of sbatch"):
        parse_sbatch_options(["--of-no-plugin=x"])


@pytest.mark.parametrize("line", ["exit 1", "exec sleep 60"], ids=["fails", "hangs"])
def test_an_sbatch_without_an_answer_knows_nothing_more(
    sbatch: Callable[[str], Path], tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "ASK_S", 0.5)
    calls = sbatch(line)
    for _ in range(2):
        with pytest.raises(ConfigError, match="of_a_plugin is not an option of sbatch"):
            load_given(configuration(tmp_path, of_a_plugin="x"))
    assert calls.read_text() == "--help\n", "a slow answer is waited for once"


def test_what_was_submitted_is_read_on_a_machine_without_sbatch(
    sbatch: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch(f"printf '{HELP}'")
    settings = load_given(configuration(tmp_path, of_a_plugin="x"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(settings.as_yaml())
    (run / "owner.json").write_text("{}")
    slurm.options_of_site.cache_clear()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert load_given(run / "config.yaml").slurm == settings.slurm
    with pytest.raises(ConfigError):
        config_run.load(run / "config.yaml")
