"""Two thousand configurations, good, nearly good and nonsense: settings that can be written, or one clear error."""

import contextlib
import copy
import os
import threading
from pathlib import Path
from typing import Any

import odd_files
import pytest
import yaml
from drawn import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmft.config import run as configuration
from slurmft.config.run import RunConfig, load
from slurmft.errors import ConfigError, UsageError
from slurmft.scheduler import submission

SETTINGS = {"deadline": None, "derandomize": True, "database": None,
            "suppress_health_check": list(HealthCheck)}  # fmt: skip
VALID, NEARLY, NONSENSE = map(examples, (500, 900, 600))  # together 2,000 in `make soak`

# what people, editors and templates put into a file
ODD_TEXTS = st.sampled_from(
    ["", " ", "~", "null", "yes", "no", "on", "010", "0x1F", "1_000", "1e3", "1:30:00", "2026-11-20", ".inf", "nan",
     "inf", "-0", "=", "<<", "!", "&a", "*a",
     "- a", "a: b", "#", "'", '"', "it's", 'say "x"', "$(id)", "`id`", "a\nb", "a\tb",
     "a\x00b", "\x1b[31m", "\x7f", "\x85", "\u2028", "\ufeff", "ü", "日本語", "👩\u200d🚀", "e\u0301", "%j", "%",
     "../..", "/", ".", "..", "~nobody-here/x", "a" * 300, "9" * 5000,
     "-1", "0", "None", "true", "SIGTERM", "11-20", "300"]
)  # fmt: skip
TEXTS = ODD_TEXTS | st.text(max_size=20) | st.text(st.characters(), max_size=8)
NUMBERS = st.integers(-3, 5) | st.sampled_from([2**31, 2**63, 2**64, 10**18, 10**400]) | st.floats()
SCALARS = TEXTS | NUMBERS | st.booleans() | st.none() | st.dates() | st.binary(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SCALARS, inner, max_size=4), max_leaves=12
)

# words that are what they look like, for configurations that must be accepted
WORDS = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=15)
ARGUMENTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=15)
PLACES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,9}(,[a-z]{1,9})?", fullmatch=True)
NODES = WORDS.filter(lambda word: not {"[", "]"} & set(word)) | st.sampled_from(["n[1-3,7],m[01-20]", "./a["])
VARIABLES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)
NAMES = WORDS.map(str.strip).filter(lambda name: name.strip(".~/ ") and "%" not in name and not name.startswith("~"))


def some(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


GOOD = st.fixed_dictionaries(
    {"command": st.tuples(WORDS.filter(str.strip), ARGUMENTS, ARGUMENTS).map(list), "run_folder": NAMES},
    optional={
        "nodes": st.integers(1, 65_536),
        "nproc_per_node": st.integers(1, 1024) | st.integers(1, 9).map(str),
        "environment": st.dictionaries(VARIABLES, ARGUMENTS, max_size=3),
        "working_directory": NAMES,
        "slurm": some(
            partition=PLACES, time=st.sampled_from(["1:30:00", "2-0", "UNLIMITED"]) | st.integers(1, 999),
            mem=st.from_regex(r"[0-9]{1,9}[KMGT]?", fullmatch=True), exclude=NODES, comment=WORDS,
            gpus_per_node=st.integers(0, 8),
            cpus_per_task=st.integers(1, 999),
            requeue=st.booleans(), no_kill=st.booleans(), hold=st.booleans(),
            nice=st.integers(-99, 99), srun_args=st.lists(ARGUMENTS, max_size=2),
        ),
        "checkpoint": some(
            directory=NAMES, interval_steps=st.integers(0, 10**15 - 1), interval=st.sampled_from(["steps", "auto"]),
            keep_last_n=st.integers(1, 99), keep_every=st.integers(0, 10**15 - 1), save_best=st.booleans(),
            best_metric=WORDS.filter(lambda word: word.strip() and word.isprintable()),
            best_mode=st.sampled_from(["min", "max"]), async_save=st.booleans(),
            when_busy=st.sampled_from(["skip", "wait"]), max_failed_saves=st.integers(1, 99),
            just_in_time=st.booleans(), bandwidth=st.integers(1, 10**15 - 1) | st.sampled_from(["500M", "1.5 GiB/s"]),
            local_directory=NAMES.map(lambda name: f"/local/{name}"), stall_timeout_s=st.floats(1, 3e8),
        ),
        "fault_tolerance": some(
            launch_timeout_s=st.floats(0.001, 3e8),
            preload=st.booleans() | st.lists(st.sampled_from(["transformers.trainer", "_x9.Y"]), max_size=2),
        ),
        "preemption": some(signal=st.sampled_from(["SIGTERM", "SIGUSR1"]), signal_lead_s=st.integers(1, 65535)),
        "nccl": some(step_timeout_minutes=st.floats(0.001, 5e6) | st.integers(1, 99)),
        "exit_actions": st.sampled_from([{"COMPLETE": "0", "FAIL": "3-9,17"}, {"RESCHEDULE": 11}, {}]),
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the configurations lie, and where relative paths start."""
    path = tmp_path_factory.mktemp("configurations")
    before = Path.cwd()
    os.chdir(path)
    yield path
    os.chdir(before)


def check(folder: Path, content: str | bytes) -> RunConfig | None:
    """Load it: valid settings that survive being written and read, or an error that says what is wrong."""
    path = folder / "config.yaml"
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    try:
        config = load(path)
    except ConfigError as error:
        assert str(path) in error.what
        assert len(error.what) > len(str(path)) + 10
        assert len(error.what) < 20_000
        return None
    with pytest.raises(ValueError, match="frozen"):
        config.nodes = 2  # type: ignore[misc]
    (folder / "again.yaml").write_text(config.as_yaml(), encoding="utf-8")
    assert load(folder / "again.yaml") == config
    assert config.name and config.run_folder.is_absolute()
    return config


@settings(max_examples=VALID, **SETTINGS)
@given(raw=GOOD)
def test_a_valid_configuration_is_accepted_and_survives_being_written(folder, raw):
    config = check(folder, yaml.safe_dump(raw))
    assert config is not None, "refused"
    assert config.command == tuple(raw["command"])
    assert config.run_folder == Path(os.path.abspath(raw["run_folder"]))
    for key in ("environment", "nodes"):
        assert getattr(config, key) == raw.get(key, getattr(RunConfig(command=("x",), run_folder=Path("x")), key))


@st.composite
def nearly_good(draw: Any) -> str:
    """A valid configuration with one to three things wrong, or odd but right."""
    raw = copy.deepcopy(draw(GOOD))
    for _ in range(draw(st.integers(1, 3))):
        sections = [raw, *(value for value in raw.values() if isinstance(value, dict))]
        section = draw(st.sampled_from(sections))
        known = [*configuration.RunConfig.model_fields, *configuration.SlurmConfig.model_fields, *map(str, section)]
        section[draw(st.sampled_from(known) | SCALARS)] = draw(VALUES)
    text = dumped(raw)
    match draw(st.integers(0, 5)):
        case 0:  # a key twice
            lines = text.splitlines(keepends=True)
            text += draw(st.sampled_from(lines))
        case 1:  # cut off, as by a full disk
            text = text[: draw(st.integers(0, len(text)))]
        case 2:
            text = draw(st.sampled_from(["%YAML 1.2\n---\n", "\ufeff", "---\n", "? ", "- ", "\t"])) + text
        case _:
            pass
    return text


def dumped(raw: Any) -> str:
    return yaml.dump(raw, allow_unicode=True, default_flow_style=None, Dumper=yaml.SafeDumper)


@settings(max_examples=NEARLY, **SETTINGS)
@given(text=nearly_good())
def test_a_nearly_valid_configuration_is_accepted_or_refused_clearly(folder, text):
    check(folder, text)


PIECES = st.lists(
    st.sampled_from(
        ["command", "run_folder", "slurm", "nodes", "environment", ": ", ": ", ":\n  ", "\n", "\n", "\n- ", "[", "]",
         "{", "}", ", ", "&a ", "*a", "<<: *a", "<<: [*a, *a]", "? ", "!!int ", "!!int 0x" + "f" * 6000,
         "!!float ", "!!bool ",
         "!!timestamp ", "!!binary ", "!!set ", "!!omap ", "!!null ", "!!str ", "!!python/name:os.system ", "! ",
         "!<x> ", "|\n", ">\n", "'", '"', "\\", "#", "---\n", "...\n", "%TAG ! x\n",
         "\t", " ", "\x00", "\ud800", "=", "1",
         "9" * 5000, "[" * 2000, "{a: " * 500, '"\\ud800"', '"\\0"', "2026-99-99", "é"]
    )
    | TEXTS,
    max_size=30,
).map("".join)  # fmt: skip


@settings(max_examples=NONSENSE, **SETTINGS)
@given(content=PIECES | st.binary(max_size=60) | PIECES.map("command: [a]\nrun_folder: r\n".__add__))
def test_nonsense_is_refused_clearly(folder, content):
    check(folder, content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("nodes: 2\nnodes: 3\n", "the key 'nodes' is there twice (first in line 3)", id="a key twice"),
        pytest.param("slurm: {time: 1, mem: 2, time: 3}\n", "the key 'time' is there twice", id="twice in a section"),
        pytest.param("nodes: true\n", "nodes: a number is needed, not true or false", id="a boolean for a number"),
        pytest.param("nodes: 1000000\n", "nodes: 1e+06 is too much; at most 65536", id="too many nodes"),
        pytest.param("nproc_per_node: 99999\n", "nproc_per_node: 99999 is too much; at most 1024", id="workers"),
        pytest.param("nodes: " + "9" * 5000 + "\n", "is not YAML: one of its values is not what its tag", id="digits"),
        pytest.param("nodes: !!int ''\n", "is not YAML: one of its values is not what its tag says", id="a false tag"),
        pytest.param("nccl: {step_timeout_minutes: inf}\n", "step_timeout_minutes: Input should be a finite number"),
        pytest.param("nccl: {step_timeout_minutes: 1e300}\n", "is too much; at most 5.256e+06", id="for ever"),
        pytest.param("checkpoint: {interval_steps: 1e300}\n", "checkpoint.interval_steps: ", id="steps"),
        pytest.param('environment: {A: "a\\0b"}\n', "environment.A: 'a\\x00b' holds a character that is not text"),
        pytest.param('environment: {A: "\\ud800"}\n', "holds a character that is not text", id="half a character"),
        pytest.param("environment: {A: !!timestamp 2026-11-20}\n", "A: a date is not a setting", id="a date"),
        pytest.param("slurm: {gres: [gpu, 2]}\n", "slurm: gres must be one text, number, true or false", id="a list"),
        pytest.param("slurm: {gres: {gpu: 2}}\n", "slurm: gres must be one text, number, true or false", id="a map"),
        pytest.param('slurm: {comment: "a\\nb"}\n', "comment: 'a\\nb' holds a line break", id="a line break"),
        pytest.param("working_directory: ~nobody-here/x\n", "home folder of a user who does not exist", id="~"),
        pytest.param("slurm: &a {gres: *a}\n", "too many values, or nested too deeply", id="itself"),
        pytest.param("environment: &a {A: *a}\n", "too many values, or nested too deeply", id="a variable itself"),
        pytest.param("a: " + "[" * 3000, "is nested too deeply", id="brackets"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(folder, text, message):
    (folder / "config.yaml").write_text("command: [python]\nrun_folder: runs/a\n" + text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(folder / "config.yaml")
    assert message in caught.value.what
    assert str(folder / "config.yaml") in caught.value.what


@pytest.mark.parametrize(
    ("run_folder", "message"),
    [
        pytest.param('"a\\nb"', "'a\\nb' holds a line break or control character", id="line break"),
        pytest.param('"a\\e[31m"', "holds a line break or control character", id="escape"),
        pytest.param('"a\\0b"', "a character that is not text", id="nul"),
        pytest.param("''", "name a folder of this run's own", id="empty"),
        pytest.param("/", "name a folder of this run's own", id="root"),
        pytest.param("runs/%j", "%j, which stands for a job's number", id="job number"),
        pytest.param("~nobody-here/x", "home folder of a user who does not exist", id="unknown home"),
        pytest.param("5", "run_folder: ", id="a number"),
    ],
)
def test_a_run_folder_that_cannot_be_one_is_refused_wherever_the_run_goes(folder, run_folder, message):
    (folder / "config.yaml").write_text(f"command: [python]\nrun_folder: {run_folder}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(folder / "config.yaml")
    assert message in caught.value.what


def test_a_key_without_a_value_is_not_given(folder):
    (folder / "config.yaml").write_text("command: [a]\nrun_folder: r\nslurm:\nnodes:\n", encoding="utf-8")
    config = load(folder / "config.yaml", ["slurm.time=3"])
    assert (config.nodes, config.slurm.time) == (1, "3")


def test_merge_keys_may_be_overridden(folder):
    text = "command: [a]\nrun_folder: r\nslurm: &s {time: 1, mem: 2}\nenvironment: {<<: {A: x, B: y}, B: z}\n"
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    assert load(folder / "config.yaml").environment == {"A": "x", "B": "z"}


def bomb(levels: int) -> str:
    lists = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, levels))
    return "x0: &x0 [1]\n" + lists


def merge_bomb(levels: int) -> str:
    maps = "".join(f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}\n" for n in range(1, levels))
    return "x0: &x0 {a: 1}\n" + maps


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", [bomb(30), merge_bomb(30)], ids=["aliases", "merges"])
def test_a_short_file_that_means_billions_of_values_is_refused_at_once(folder, text):
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="too many"):
        load(folder / "config.yaml")


@pytest.mark.timeout(20)
def test_a_file_without_an_end_is_refused(folder):
    with pytest.raises(ConfigError, match="it is a device, not a regular file"):
        load(Path("/dev/zero"))
    with pytest.raises(ConfigError, match="is longer than 1048576 bytes"):
        load(odd_files.put("endless", folder / "endless.yaml"))


SOUND = b"command: [a]\nrun_folder: r\n"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(SOUND, "", id="sound"),
        pytest.param(b"#" * (1 << 21), "is longer than 1048576 bytes", id="long"),
        pytest.param(b"", "must hold keys and values", id="empty"),
        pytest.param(None, "the pipe did not end within 0 s", id="endless"),
    ],
)
def test_a_pipe_of_the_shells_is_a_configuration(monkeypatch, text, problem):
    reading, writing = os.pipe()
    writer = threading.Thread(
        target=_fill, args=(writing, SOUND if text is None else text, text is not None), daemon=True
    )
    writer.start()
    if text is None:
        monkeypatch.setattr(configuration, "PIPE_S", 0.2)
    try:
        with pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext():
            assert load(Path(f"/dev/fd/{reading}")).command == ("a",)
    finally:
        os.close(reading)
        writer.join()
        if text is None:
            os.close(writing)


def _fill(pipe: int, text: bytes, to_its_end: bool) -> None:
    with contextlib.suppress(BrokenPipeError):
        while text:
            text = text[os.write(pipe, text) :]
    if to_its_end:
        os.close(pipe)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", odd_files.NO_FILES)
def test_what_is_no_file_is_no_configuration(folder, kind):
    with pytest.raises(ConfigError, match="not a regular file"):
        load(odd_files.put(kind, folder / f"{kind}.yaml"))


def test_a_wrong_override_is_named_and_nothing_odd_is_suggested(folder):
    (folder / "config.yaml").write_text("command: [a]\nrun_folder: r\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(folder / "config.yaml", ["nonsense=1"])
    assert "--set nonsense=1" in caught.value.what
    assert "did you mean" not in caught.value.what


def test_a_thousand_problems_are_not_a_thousand_lines(folder):
    (folder / "config.yaml").write_text("".join(f"k{n}: 1\n" for n in range(1000)), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(folder / "config.yaml")
    assert "1001 problems" in caught.value.what
    assert len(str(caught.value).splitlines()) < 30


@settings(max_examples=examples(300), **SETTINGS)
@given(words=st.lists(TEXTS | st.sampled_from(["--partition", "-p", "--time=1", "--", "-", "--=", "-N2"]), max_size=5))
def test_options_behind_the_dashes_are_taken_or_refused(words):
    with contextlib.suppress(UsageError):
        for name, value in submission.parse_sbatch_options(words).items():
            assert name in submission.SBATCH_OPTIONS
            assert value is True or not any(ord(character) < 32 for character in value)
