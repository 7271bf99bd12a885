"""An option that no list of ours has is looked for in the site's own ``sbatch --help``, once and for a limited time."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from drawn import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from of_each import of_each

from slurmft.config import run as config_run
from slurmft.errors import ConfigError, UsageError
from slurmft.operations.run_configuration import load_given
from slurmft.scheduler import slurm
from slurmft.scheduler.slurm import compress, expand, is_usable, parse_nodes
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


# --- Nodes as sinfo shows them, and hostlists in and out ---


@of_each(state=["idle", "mixed", "allocated", "completing", "allocated+", "idle~", "idle#", "idle%", "idle@", "idle^",
     "mixed-", "reserved", "planned", "IDLE", "powered_down", "idle!", "rebooted"])  # fmt: skip
def test_a_node_that_takes_jobs_sooner_or_later_is_usable(state):
    assert is_usable(state)


@of_each(state=["down", "down*", "drained", "draining", "draining*", "drained~", "idle*", "fail", "failing", "error",
              "unknown", "future", "maint", "idle$", "inval", "blocked", "unknown*", "", "*", " down "])  # fmt: skip
def test_a_node_that_does_not_is_not(state):
    assert not is_usable(state)


def test_the_output_of_sinfo_becomes_values():
    text = "n1|low*|idle\nn1|high|idle\nslurm_load_partitions: a warning\n n2|low*|drained*\nn3|a|b|c\n|low*|idle\n"
    found = [(each.node, each.partition, each.is_default, each.usable) for each in parse_nodes(text)]
    assert found == [("n1", "low", True, True), ("n1", "high", False, True), ("n2", "low", True, False)]
    assert parse_nodes("") == []


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n1"], "n1"),
        (["n1", "n3", "n2", "n2"], "n[1-3]"),
        (["n1", "n3"], "n[1,3]"),
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["n8", "n9", "n10", "n11"], "n[8-11]"),
        (["n1", "n01", "n001"], "n[1,01,001]"),
        (["n0"], "n0"),
        (["n0", "n00"], "n[0,00]"),
        (["rack1-blade2", "rack1-blade3", "rack2-blade2"], "rack1-blade[2-3],rack2-blade2"),
        (["n1-ib", "n2-ib"], "n1-ib,n2-ib"),
        (["login", "n1"], "n1,login"),
        (["n12345678901", "n12345678902"], "n12345678901,n12345678902"),
        (["n[1-2]"], "n[1-2]"),
        (["1", "2"], "1,2"),
        (["n099", "n100", "n0099"], "n[099-100,0099]"),
        ([], ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_become_a_short_hostlist(names, text):
    assert compress(names) == text


name = st.from_regex(r"[a-z]([a-z]|[0-9]{1,3}|-){0,4}[0-9]{0,11}", fullmatch=True)


@settings(deadline=None, max_examples=examples(150))
@given(st.frozensets(name, max_size=20))
@example(frozenset({"a09", "a10", "a9", "a009", "a99", "a100", "a0", "a00"}))
def test_a_hostlist_stands_for_exactly_its_names(names):
    assert sorted(expand(compress(names))) == sorted(names)
    assert len(compress(names)) <= max(1, len(",".join(names)) + 2 * len(names))


def test_ten_thousand_nodes_are_short_and_fast():
    names = [f"gpu-{rack:02}-{number:03}" for rack in range(20) for number in range(500)]
    began = time.process_time()
    text = compress(names)
    assert expand(text) == sorted(names)
    assert time.process_time() - began < 2
    assert len(text) < 20 * 20


@of_each(
    text__names=[
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,3],login", ["n08", "n09", "n10", "n3", "login"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("n1,n1,n[1-2]", ["n1", "n2"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        (" n1 , n2 ", ["n1", "n2"]),
        ("", []),
    ]
)
def test_a_hostlist_is_taken_apart(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    ["n[1-", "n]1[", "n[]", "n[a-b]", "n[1-2", "n[[1]]", "n[3-1]", "n[0-99999999]", "n[1-1000]m[1-1000]o[1-1000]",
     "n[1-99999999999999999999999]", "a;b", "-w", "$(x)", "n[1,]", "n[1--2]", "a\x00b", "n\u0661", "n[\u0661-\u0662]"],
    ids=ascii,
)  # fmt: skip
def test_what_is_no_hostlist_is_refused(text):
    began = time.process_time()
    with pytest.raises(ValueError, match=r"is not a hostlist|more than|not the name"):
        expand(text)
    assert time.process_time() - began < 1
