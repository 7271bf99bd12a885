"""``slurmft init`` and ``slurmft examples``: a configuration that loads, and the files that come with slurmft."""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurmft.cli import submit as module
from slurmft.cli.main import cli
from slurmft.config import run as configuration
from slurmft.errors import ConfigError, UsageError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURMFT_RUNS", raising=False)
    return tmp_path


def slurmft(*words: str, answers: str | None = None) -> Result:
    result = CliRunner().invoke(cli, words, input=answers, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_flags_make_a_configuration_that_loads(here):
    slurmft(
        "init", "--nodes", "2", "--gpus", "8", "--partition", "low", "--time", "1:00:00", "train.py", "--lr", "1e-3"
    )
    settings = configuration.load(here / "train.yaml", known_here=lambda options: options)
    assert settings.command == ("python", "train.py", "--lr", "1e-3")
    assert (settings.nodes, settings.nproc_per_node, settings.run_folder) == (2, 8, here / "runs/train")
    assert (settings.slurm.partition, settings.slurm.time) == ("low", "1:00:00")
    assert (here / "train.yaml").read_text().count("#") >= 6


def test_a_terminal_is_asked_for_what_no_option_says(here, monkeypatch):
    monkeypatch.setattr(module.sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())
    given = iter(["train.py --a 'b c'", "4", "low", "30", str(here / "elsewhere")])
    monkeypatch.setattr(module.click, "prompt", lambda *_args, **_rest: next(given))
    module.init.callback(command=(), output=None, run_folder=None, nodes=3, gpus=None, partition=None, limit=None,
                         yes=False)  # fmt: skip
    settings = configuration.load(here / "train.yaml", known_here=lambda options: options)
    assert (settings.nodes, settings.nproc_per_node, settings.run_folder) == (3, 4, here / "elsewhere")
    assert settings.command == ("python", "train.py", "--a", "b c")


def test_a_file_that_is_there_stays(here):
    (here / "train.yaml").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"there is train.yaml already"):
        slurmft("init", "--yes", "train.py")
    assert not (here / "nowhere").exists()


@pytest.mark.parametrize("word", ["--partition=a\nb: c", "--time=\x1b[2J", '--run-folder="]{'])
def test_odd_words_stay_values(here, word):
    try:
        slurmft("init", "--yes", word, "train 'a'.py", "x: y", "# z")
    except ConfigError:
        assert not (here / "train-a-.yaml").exists()
        return
    settings = configuration.load(here / "train-a-.yaml", known_here=lambda options: options)
    assert settings.command[1:] == ("train 'a'.py", "x: y", "# z")


def test_a_shell_script_is_run_by_bash_and_a_batch_script_as_it_is(here):
    Path("run.sh").write_text("#!/bin/bash\npython x.py\n")
    slurmft("init", "--yes", "run.sh")
    assert configuration.load(here / "run.yaml", known_here=lambda options: options).command == ("bash", "run.sh")
    Path("my job.slurm").write_text("#!/bin/bash\n#SBATCH -N1\nsrun python x.py\n")
    with pytest.raises(UsageError, match=r"slurmft sbatch 'my job\.slurm'"):
        slurmft("init", "--yes", "my job.slurm")
    assert not Path("my-job.yaml").exists()


@pytest.mark.parametrize(
    ("script", "file"),
    [
        ("/", "run.yaml"),
        (".py", "py.yaml"),
        ("-x.py", "x.yaml"),
        ("\u8bad\u7ec3.py", "\u8bad\u7ec3.yaml"),
        ("a\n;b.py", "a-b.yaml"),
    ],
)
def test_an_odd_name_becomes_one_that_can_be_typed(here, script, file):
    assert slurmft("init", "--yes", "--", script).output.endswith(f"slurmft submit {shlex.quote(file)}\n")
    settings = configuration.load(here / file, known_here=lambda options: options)
    assert settings.run_folder == here / "runs" / file.removesuffix(".yaml")


def test_where_it_cannot_write_it_says_so(here):
    with pytest.raises(UsageError, match="there is no folder"):
        slurmft("init", "--yes", "--output", str(here / "nowhere" / "x.yaml"), "train.py")
    assert "slurmft submit 'my run.yaml'" in slurmft("init", "--yes", "--output", "my run.yaml", "train.py").output


def test_without_a_script_and_a_terminal_it_says_what_to_type(here):
    with pytest.raises(UsageError, match="which script") as caught:
        slurmft("init")
    assert caught.value.hint.startswith("slurmft init ")
    assert list(here.iterdir()) == []


def test_every_file_is_listed_and_printed(here):
    listed = dict(line.split(maxsplit=1) for line in slurmft("examples", "--path").output.splitlines())
    assert {"reference.yaml", "health.yaml", "slurmft.rules.yml", "run.json", "train.sh", "byte_gpt.py"} <= set(listed)
    assert all(len(line.split()) > 2 for line in slurmft("examples").output.splitlines())
    for name, path in listed.items():
        assert slurmft("examples", name).output == Path(path).read_text()


def test_a_misspelt_name_is_answered_with_the_nearest(here):
    with pytest.raises(UsageError, match=r"did you mean reference\.yaml"):
        slurmft("examples", "refrence.yaml")
