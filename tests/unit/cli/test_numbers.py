"""Numbers, times, names and paths that cannot be right: refused at once, everywhere, also by --dry-run."""

import math
import os
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each
from pydantic import BaseModel

from slurmft.cli.main import HIDDEN_VERBS, VERBS, cli
from slurmft.config import run as configuration
from slurmft.config.health import HealthConfig
from slurmft.config.run import RunConfig
from slurmft.errors import ConfigError, SlurmftError, UsageError
from slurmft.policy.sbatch import SBATCH_OPTIONS, unusable_value
from slurmft.scheduler.slurm import parse_limit_s
from slurmft.scheduler.submission import parse_sbatch_options
from slurmft.worker.session import Session

NINES = "9" * 309
"""Beyond any float, and short enough for Python to read."""

# ---- options of the command line -------------------------------------------------------------------------------------


def parameters(command: click.Command, name: str) -> Iterator[tuple[str, click.Parameter]]:
    yield from ((f"{name} {one.name}", one) for one in command.params)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            inner = command.get_command(context, each)
            assert inner is not None
            yield from parameters(inner, f"{name} {each}")


def number_options() -> dict[str, click.Parameter]:
    context = click.Context(cli)
    verbs = {name: cli.get_command(context, name) for name in [*VERBS, *HIDDEN_VERBS]}
    found = [one for name, verb in verbs.items() if verb is not None for one in parameters(verb, name)]
    kinds = (click.types.IntParamType, click.types.FloatParamType)
    return {name: one for name, one in found if isinstance(one.type, kinds)}


OPTIONS = number_options()


def test_options_with_numbers_are_found():
    assert {
        "sweep limit",
        "stop timeout",
        "logs rank",
        "checkpoint rm steps",
        "lab slow-node seconds",
    } <= OPTIONS.keys()


@of_each(name=OPTIONS, text=["nan", "inf", "-inf", "1e400", NINES, "9" * 5000, "", "x", "-1", "true"])
def test_every_number_option_refuses_what_is_none(name, text):
    with pytest.raises(click.BadParameter):
        OPTIONS[name].type.convert(text, OPTIONS[name], None)


# ---- keys of the configuration ---------------------------------------------------------------------------------------


def leaves(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        sections = [one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)]
        if sections and not typing.get_args(field.annotation):
            yield from leaves(sections[0], (*prefix, name))
        else:
            yield (*prefix, name), field


KEYS = {".".join(path): (RunConfig, path) for path, _ in leaves(RunConfig)} | {
    f"health: {'.'.join(path)}": (HealthConfig, path) for path, _ in leaves(HealthConfig)
}
VALUES = ["nan", "inf", "-inf", "-1", "-0.5", NINES, f"-{NINES}", "9" * 5000, "true", "1.0e+308", "1e400", "[1]",
          "{a: 1}", "''", '"a\\0b"', '"a\\x1bb"', '"a\\u202eb"', "x" * 5000, str(2**63), ".nan", "."]  # fmt: skip


def loaded(folder: Path, model: type[BaseModel], text: str) -> BaseModel:
    path = folder / "c.yaml"
    path.write_text(text)
    return configuration.load(path) if model is RunConfig else configuration.load_section(path, model)


@of_each(key=KEYS)
def test_every_key_takes_a_value_or_names_it(tmp_path, key):
    model, path = KEYS[key]
    base = "command: x\nrun_folder: r\n" if model is RunConfig else ""
    base = "".join(f"{line}\n" for line in base.splitlines() if not line.startswith(path[0]))
    for value in VALUES:
        text = value
        for part in reversed(path):
            text = f"{{{part}: {text}}}"
        try:
            found: Any = loaded(tmp_path, model, f"{base}{text[1:-1]}\n")
        except ConfigError as error:
            assert "problem" in str(error) or "YAML" in str(error), value
            continue
        for part in path:
            found = getattr(found, part)
        if isinstance(found, float):
            assert math.isfinite(found) and value != "true", value
        if isinstance(found, int):
            assert abs(found) < 2**63, value
        if isinstance(found, Path):
            assert len(os.fsencode(found.name)) <= 255 and found.name.isprintable() and value != "''", value
        if isinstance(found, str):
            assert found.isprintable(), value


@of_each(
    text__is_good=[
        ("30", True), ("90:30", True), ("1:30:00", True), ("1-0", True), ("1-12:30", True), ("7-00:00:00", True),
        ("UNLIMITED", True), ("infinite", True), ("-1", True), ("0", True), ("yesterday", False), ("-5", False),
        ("../..", False), ("nan", False), ("inf", False), ("2.5", False), ("1:2:3:4", False), ("1-", False),
        ("1:99:99", False), ("1:60", False), ("1-0:60", False), ("0-48:00", True), ("90:59", True),
        ("1h", False), (NINES, False), ("9" * 5000, False), ("٣٠", False), ("1 - 0", False), ("now", False),
    ],
    option=["time", "time-min"],
)  # fmt: skip
def test_what_a_time_limit_is(option, text, is_good):
    assert (unusable_value(option, text) == "") is is_good
    if not is_good:
        with pytest.raises(UsageError, match=f"--{option}"):
            parse_sbatch_options([f"--{option}={text}"])
        with pytest.raises(ConfigError, match=r"slurm\."):
            configuration.validate(
                {"command": "x", "run_folder": "r", "slurm": {option.replace("-", "_"): text}}, source="c"
            )


@pytest.mark.parametrize("text", [NINES, "9" * 5000, f"1-{NINES}", f"{NINES}:00"])
def test_a_limit_beyond_any_number_cannot_be_read(text):
    assert parse_limit_s(text) is None


VALUES_OF_OPTIONS = [
    ("begin", ["now", "now+1hour", "now+60", "16:00", "tomorrow", "2030-01-31", "2030-01-31T18:00", "midnight",
               "010230", "4:30pm"], ["yesterday", "-5", "../..", "soon", "now+x", NINES, "99:99", "24:00", "2030-13-01",
                                  "2030-01-32", "1331", "31/12"]),
    ("partition", ["gpu", "gpu,long", "gpu-a100_80.x"], ["../..", "-5", "a b", "", "..", "a;b", "x" * 2000]),
    ("account", ["proj-1", "größe"], ["../..", "-x", "a\u202eb", ""]),
    ("qos", ["high"], ["a/b", ""]),
    ("mem", ["64G", "0", "500", "1T", "64GB"], ["-5", "a lot", "1.5G", "nan", ""]),
    ("gpus-per-node", ["4", "a100:4", "a100:2,h100:2"], ["-1", "four and a half", "2.5", "nan", ""]),
    ("cpus-per-gpu", ["4", 4], ["-1", -1, 2.5, "nan", 10**20]),
    ("nice", [-100, "100"], [10**20]),
    ("job-name", ["a run"], ["", "a\x1b[2J", "x" * 2000]),
    ("comment", ["anything, really: 5 %", ""], ["a\nb"]),
]  # fmt: skip


@of_each(
    option__value__is_good=[
        (option, value, value in good) for option, good, bad in VALUES_OF_OPTIONS for value in (*good, *bad)
    ]
)
def test_what_other_options_take(option, value, is_good):
    assert (unusable_value(option, value) == "") is is_good


@given(
    st.sampled_from(sorted(SBATCH_OPTIONS)), st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none())
)
def test_any_value_is_judged(option, value):
    assert isinstance(unusable_value(option, value), str)


# ---- a dry run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    (tmp_path / "c.yaml").write_text(f"command: [{sys.executable}, --version]\nrun_folder: run\n")
    return tmp_path


def submit(*words: str) -> SlurmftError | None:
    """What ``submit`` refuses, here on this machine."""
    result = CliRunner().invoke(
        cli, ["submit", "c.yaml", "--cluster", "local", *words], standalone_mode=False, catch_exceptions=True
    )
    if result.exception is not None and not isinstance(result.exception, SlurmftError):
        raise result.exception
    return result.exception


IMPOSSIBLE = [
    "run_folder=../..", "run_folder=file/run", "run_folder=dangling", "run_folder=/proc/run", "run_folder=/sys/a/b",
    "run_folder=/dev/null/x",
    f"run_folder={'x' * 256}", f"run_folder={'x/' * 2100}y", "run_folder=file", "checkpoint.directory=file",
    "checkpoint.directory=file/x", "checkpoint.directory=/proc/x", "checkpoint.directory=''", 'run_folder="a\\u202eb"',
    "slurm.time=yesterday", "slurm.time=-5", "slurm.time=../..", f"slurm.time={NINES}", f"nodes={NINES}",
    "slurm.partition=../..", "slurm.mem=-5",
]  # fmt: skip


@of_each(change=IMPOSSIBLE)
def test_a_dry_run_refuses_what_a_submission_refuses_and_makes_nothing(place, change):
    before = sorted(place.rglob("*"))
    dry = submit("--dry-run", "--set", change)
    assert dry is not None, "the dry run calls it good"
    assert sorted(place.rglob("*")) == before
    real = submit("--set", change)
    assert real is not None and (real.what, real.exit_code) == (dry.what, dry.exit_code)


def test_a_dry_run_of_a_finished_run_says_so(place):
    (place / "run").mkdir(mode=0o700)
    (place / "run" / "done.json").write_text('{"format": 1, "reason": "all steps are done"}')
    before = sorted(place.rglob("*"))
    refused = submit("--dry-run")
    assert refused is not None and "is finished" in refused.what and sorted(place.rglob("*")) == before


def test_a_dry_run_that_is_good_makes_nothing(place):
    before = sorted(place.rglob("*"))
    assert submit("--dry-run") is None
    assert submit("--dry-run", "--set", "run_folder=a/b/c", "--set", "checkpoint.directory=d/e") is None
    assert sorted(place.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_refused(place):
    (place / "closed").mkdir(mode=0o555)
    dry = submit("--dry-run", "--set", "run_folder=closed/run")
    assert dry is not None and "cannot create the run folder" in dry.what


# ---- the session -----------------------------------------------------------------------------------------------------


@of_each(number=[2.5, 2.0, math.inf, -math.inf, math.nan, None, "3", True, -1, 10**15, [3]], name=["start", "until"])
def test_steps_are_whole_numbers(session, name, number):
    with pytest.raises(ValueError, match=f"{name}=.* is not a number of completed steps"):
        next(session.steps(**{"start": 0, "until": 3, name: number}, save=lambda step: None))


@pytest.mark.parametrize("until", [3, np.int64(3), torch.tensor(3)], ids=repr)
def test_steps_may_be_counted_in_other_integers(session, until):
    assert list(session.steps(start=0, until=until, save=lambda step: None)) == [0, 1, 2]


@pytest.fixture
def session(monkeypatch, tmp_path) -> Iterator[Session]:
    monkeypatch.chdir(tmp_path)
    from slurmft.worker.session import start_session

    with start_session() as session:
        yield session
