"""What the documentation tells users to write and to type is right: configurations, Python, command lines."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from docs_pages import PAGES, REPOSITORY, Block, blocks, commands, prose

from slurmft.cli.main import cli
from slurmft.config import run as configuration
from slurmft.config.health import HealthConfig
from slurmft.errors import ConfigError
from slurmft.policy.suspicion import Observation
from slurmft.policy.verdict import Kind
from slurmft.storage.exclusions import ExclusionList

DAY_S = 86_400.0

# ---- configurations and Python ---------------------------------------------------------------------------------------

LEAST = {"command": ["true"], "run_folder": "runs/least", "nodes": 4}


def as_configuration(text: str, folder: Path) -> configuration.RunConfig:
    """A block as a whole configuration: a part of one is put beside what every configuration needs."""
    given = yaml.safe_load(text)
    path = folder / "block.yaml"
    is_whole = {"command", "inference", "roles"} & set(given) or "callable" in given.get("trials", {})
    beside = {key: value for key, value in LEAST.items() if key not in given}
    path.write_text(text if is_whole else text + yaml.safe_dump(beside))
    return configuration.load(path)


def test_configurations_load(tmp_path: Path):
    wrong = []
    for block in blocks("yaml"):
        try:
            if "user_probes" in block.text:  # of health.yaml
                (tmp_path / "health.yaml").write_text(block.text)
                assert configuration.load_section(tmp_path / "health.yaml", HealthConfig).user_probes
                continue
            assert as_configuration(block.text, tmp_path).name
        except (ConfigError, AssertionError) as error:
            wrong.append(f"{block}: {error}")
    assert wrong == []


def test_a_wrong_configuration_does_not(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean"):
        as_configuration("checkpoint:\n  keep_lats_n: 3\n", tmp_path)


def test_python_compiles():
    for block in blocks("python"):
        if block.page != "docs/reference/public-names.md":  # those are signatures
            compile(textwrap.dedent(block.text), str(block), "exec")


# ---- command lines ---------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """A command line that slurmft would refuse."""


def check(words: list[str]) -> list[str]:
    """Parse the words behind ``slurmft`` as far as that needs no run and no file; the verbs that they name."""
    command: click.Command = cli
    verbs: list[str] = []
    context = click.Context(cli, info_name="slurmft")
    while True:
        try:
            given, left, _ = command.make_parser(context).parse_args(list(words))
        except click.UsageError as error:
            raise Wrong(error.format_message()) from error
        _check_values(command, given, context)
        if not isinstance(command, click.Group) or not left:
            return verbs
        try:  # some groups have a verb for what names none
            name, inner, words = command.resolve_command(context, list(left))
        except click.UsageError as error:
            raise Wrong(f"no verb {left[0]}") from error
        assert name is not None and inner is not None
        verbs, command = [*verbs, name], inner
        context = click.Context(command, info_name=verbs[-1], parent=context, **command.context_settings)


def _check_values(command: click.Command, given: dict[str, Any], context: click.Context) -> None:
    for parameter in command.params:
        value = given.get(parameter.name or "")
        if not isinstance(value, str):
            is_there = isinstance(value, tuple | list) and len(value) > 0
            needed = isinstance(parameter, click.Argument) and parameter.required and not given.get("help")
            if needed and not is_there:
                raise Wrong(f"{parameter.name} is missing")
        elif isinstance(parameter.type, click.Choice | click.IntRange | click.FloatRange):
            try:
                parameter.type.convert(value, parameter, context)
            except click.UsageError as error:
                raise Wrong(error.format_message()) from error


def words_of(line: str) -> list[str]:
    """The words of a command line, without comment and variables in front."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return words[1:] if words[:1] == ["sudo"] else words


LINES = [(str(block), line) for block in blocks("console") for line, _ in commands(block)]
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
BENCHES = {path.parent.name for path in (REPOSITORY / "bench").glob("*/__main__.py")}


def is_target(words: list[str]) -> bool:
    """Whether Make has it; of ``bench NAME=...``, whether there is such a one."""
    names = [word.removeprefix("NAME=") for word in words if word.startswith("NAME=")]
    return words[0] in TARGETS and set(names) <= {*BENCHES, "list"}


OTHERS = {"git", "cd", "source", "exit", "sinfo", "sbatch", "curl"}


def test_command_lines_are_some():
    wrong = []
    for where, line in LINES:
        program, *words = words_of(line)
        try:
            if program == "make":
                assert is_target(words)
            elif Path(program).name == "slurmft":
                check(words)
            else:
                assert program in OTHERS
        except (Wrong, AssertionError) as error:
            wrong.append(f"{where}: {line}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    ["submit", "submit a.yaml --nonsense", "nonsense", "inject run nonsense", "submit a.yaml --cluster mars",
     "lab slow-node n2 --cpus much", "exclude nonsense"],
)  # fmt: skip
def test_a_wrong_command_line_is_found(line: str):
    with pytest.raises(Wrong):
        check(line.split())


def spoken(page: Path) -> list[str]:
    """What is named in the running text: `slurmft VERB --option`, and Make's targets."""
    return [re.sub(r"\s+", " ", code) for code in re.findall(r"`((?:slurmft|make) [^`]+)`", prose(page))]


def test_verbs_and_options_in_the_text_exist():
    assert [f"{page.name}: {code}" for page in PAGES for code in spoken(page) if not _exists(code)] == []


def _exists(code: str) -> bool:
    program, *words = code.replace("...", "").replace("|", " ").split()
    if program == "make":
        return is_target(words)
    command, options = cli, {option for each in cli.params for option in each.opts} | {"--help", "-h", "--version"}
    context = click.Context(cli)
    for word in words:
        if word == "--":
            return True
        if word.startswith("-"):
            if word.partition("=")[0] not in options:
                return False
        elif isinstance(command, click.Group):
            inner = command.get_command(context, word)
            if inner is None and not word.isupper() and "/" not in word:
                return False
            command = inner or command
            options |= {option for each in command.params for option in each.opts}
    return True


def test_a_wrong_verb_in_the_text_is_found():
    assert [_exists(f"slurmft {words}") for words in ("nonsense", "stop --nonsense", "stop RUN", "lab up", "lab upp",
            "exclude list --json", "VERB --help")] == [False, False, True, True, False, True, True]  # fmt: skip
    assert [_exists(f"make bench{words}") for words in ("", " NAME=recovery", " NAME=none", "-sweep")] == [
        True, True, False, False,
    ]  # fmt: skip


# ---- output ----------------------------------------------------------------------------------------------------------

PROMPT = [sys.executable, "-P", "-m", "slurmft"]
RUNS = (
    r"(-h|--help|--version|schema|hooks show|inject --help|exclude (list|add|why).*|"
    r"advise configs/\S+.*|submit configs/\S+ .*--dry-run.*)"
)
"""What needs no Slurm, trains nothing and takes seconds."""


def shape(line: str) -> str:
    """A line without what differs between two days and two machines."""
    line = re.sub(r"\b\S+@\S+?(?=[,)]|$)", "someone", line)
    line = re.sub(r"/\S*/(bin/|runs/)", r"/\1", line)
    line = re.sub(r"\bpython[\d.]+", "python", line)
    return " ".join(re.sub(r"\d+(ms|[smhd])\b|\d+", "9", line).split())


def runnable(line: str) -> bool:
    program, *words = words_of(line)
    return Path(program).name == "slurmft" and re.fullmatch(RUNS, " ".join(words)) is not None


RUNNABLE = [block for block in blocks("console") if all(runnable(line) for line, _ in commands(block))]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's home, and evidence such as the documentation shows."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    now = time.time()
    seen = [
        Observation(Kind.RERUN_UNDECIDED, "gpu-07", 0.6, now - 2.05 * DAY_S, "1", source="4711.0.0", run="my-gpt",
                    job="4711", evidence="loss is NaN, the same again in place"),
        Observation(Kind.RERUN_PERSISTENT, "gpu-07", 2.0, now - 2.0 * DAY_S, "2", source="4711.1.0", run="my-gpt",
                    job="4711", evidence="not reproduced on gpu-21"),
        Observation(Kind.STRAGGLER, "gpu-31", 0.5, now - 0.86 * DAY_S, "3", run="another"),
    ]  # fmt: skip
    ExclusionList(tmp_path / "state/slurmft/exclusions-local.json").observe(seen)
    return tmp_path


@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_what_a_command_prints_is_what_is_shown(block: Block, home: Path):
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))},
        "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "COLUMNS": "200", "PATH": "/nowhere",
    }  # fmt: skip
    for line, shown in commands(block):
        done = subprocess.run(
            [*PROMPT, *words_of(line)[1:]], capture_output=True, text=True, timeout=60, cwd=home, env=environment,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        expected = [shape(each) for each in shown if each.strip()]
        whole = "..." not in expected
        expected = expected if whole else expected[: expected.index("...")]
        printed = [shape(each) for each in done.stdout.splitlines() if each.strip()]
        if expected:
            assert printed[: None if whole else len(expected)] == expected


def test_there_are_blocks_to_look_at():
    """Else a change of the Markdown could switch these tests off."""
    assert len(blocks("yaml")) > 8 and len(blocks("python")) > 12 and len(LINES) > 40 and len(RUNNABLE) >= 3
