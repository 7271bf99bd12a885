"""``slurmft exclude``, as one types it."""

import json
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurmft.cli.nodes import exclude
from slurmft.policy.suspicion import WEIGHTS, Observation
from slurmft.policy.verdict import Kind
from slurmft.storage.exclusions import ExclusionList

HOUR = 3600.0


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "list.json"


def seen(node: str, kind: Kind, *, ago: float = HOUR, **more: str) -> Observation:
    at = time.time() - ago
    return Observation(kind=kind, node=node, weight=WEIGHTS[kind], at=at, id=f"{node}{kind}{at}", **more)


def typed(path: Path, *words: str) -> Result:
    return CliRunner().invoke(exclude, [*words, "--file", str(path)])


def said(path: Path, *words: str) -> str:
    result = typed(path, *words)
    assert result.exception is None, result.exception
    return result.stdout


def as_json(path: Path, *words: str) -> dict[str, object]:
    value = json.loads(said(path, *words, "--json"))
    assert (value["format"], value["path"]) == (1, str(path))
    return value


def test_nodes_go_in_and_out_as_hostlists(path):
    assert said(path, "list").startswith("no node is excluded")
    assert said(path, "list", "--nodes") == "\n"
    assert said(path, "add", "gpu-[08-10],n1", "--reason", "fans", "--for", "7d").startswith(
        "excluded gpu-[08-10],n1 until"
    )
    assert said(path, "list", "--nodes") == "gpu-[08-10],n1\n"
    assert said(path, "remove", "gpu-[09-11]") == "removed gpu-[09-10]\nnothing was held against gpu-11\n"
    table = said(path, "list")
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [["gpu-08", "excluded"], ["n1", "excluded"]]
    assert "fans (by " in table


@pytest.mark.parametrize(
    ("words", "seconds"),
    [((), 30 * 86_400), (("--for", "90m"), 5400), (("--for", "1.5h"), 5400), (("--for", "2w"), 14 * 86_400),
     (("--for", "5s"), 5), (("--for", "ever"), None)],
)  # fmt: skip
def test_an_exclusion_by_hand_ends(path, words, seconds):
    said(path, "add", "n1", "--reason", "x", *words)
    (entry,) = ExclusionList(path).read().manual
    assert (entry.until and round(entry.until - entry.at)) == seconds
    assert "@" in entry.who


def test_until_is_a_date_here(path):
    until = datetime.now() + timedelta(days=2)
    said(path, "add", "n1", "--reason", "x", "--until", f"{until:%Y-%m-%dT%H:%M:%S}")
    assert ExclusionList(path).read().manual[0].until == pytest.approx(until.timestamp(), abs=1)
    assert f"{until:%Y-%m-%d %H:%M}" in said(path, "list")


@pytest.mark.parametrize(
    "words",
    [("add", "n[1-", "--reason", "x"), ("add", "", "--reason", "x"), ("add", "n1", "--reason", "x", "--for", "soon"),
     ("add", "n1", "--reason", "x", "--for", "0d"), ("add", "n1", "--reason", "x", "--for", "99999999w"),
     ("add", "n1", "--reason", "x", "--until", "2001-01-01"), ("add", "n1", "--reason", "x", "--until", "tomorrow"),
     ("add", "n1", "--reason", "x", "--for", "1d", "--until", "2999-01-01"), ("remove", "a;b")],
)  # fmt: skip
def test_what_cannot_be_understood_changes_nothing(path, words):
    result = typed(path, *words)
    assert result.exception.exit_code == 2
    assert result.exception.hint
    assert not path.exists()


def test_why_shows_every_observation_with_its_age_weight_and_evidence(path):
    proven = {"run": "gpt", "job": "7", "gpu": "GPU-1", "evidence": "/v/7.json"}
    held = [seen("n1", Kind.RERUN_PERSISTENT, ago=30 * 24 * HOUR, **proven), seen("n1", Kind.CRASH, run="a"),
            seen("n1", Kind.CRASH, run="a", ago=2 * HOUR), seen("n2", Kind.CRASH)]  # fmt: skip
    shared = ExclusionList(path)
    shared.observe(held)
    value = as_json(path, "why", "n1")
    assert value["standing"]["state"] == "excluded"
    told = [(each["kind"], round(each["now"], 2), each["counts"], each["evidence"]) for each in value["observations"]]
    assert told == [("rerun persistent", 1.0, True, "/v/7.json"), ("crash", 0.24, False, ""), ("crash", 0.24, True, "")]
    text = said(path, "why", "n1")
    assert text.startswith("n1 is excluded, score 1.24 (excluded from 1, on probation from 0.25) until ")
    for words in ("4w", "+2.00", "+1.00", "same run", "gpt", "GPU-1", "/v/7.json"):
        assert words in text
    said(path, "add", "n1", "--reason", "fan", "--for", "ever")
    assert "by hand: fan" in said(path, "why", "n1")
    said(path, "remove", "n1")
    text = said(path, "why", "n1")
    assert text.startswith("n1 is free, score 0.00")
    assert "forgiven" in text
    forgiving = as_json(path, "why", "n1")["observations"][-1]
    assert (forgiving["evidence"], round(forgiving["now"], 2)) == ("removed from the list by hand", -1.24)
    assert said(path, "why", "n3").startswith("nothing is known of n3")
    assert as_json(path, "why", "n3")["standing"] is None


def test_the_list_for_programs(path):
    ExclusionList(path).observe(
        [seen("n10", Kind.RERUN_PERSISTENT, gpu="GPU-1"), seen("n2", Kind.RERUN_PERSISTENT), seen("n3", Kind.NODE_LOST)]
    )
    said(path, "add", "n4", "--reason", "fan", "--for", "ever")
    value = as_json(path, "list")
    assert value["excluded"] == "n[2,4,10]"
    assert [(each["node"], each["state"]) for each in value["nodes"]] == [
        ("n4", "excluded"), ("n2", "excluded"), ("n10", "excluded"), ("n3", "probation"),
    ]  # fmt: skip
    assert value["nodes"][0]["until"] == "removed"
    assert list(value["suspect_gpus"]) == ["GPU-1"]
    assert "suspect GPU GPU-1 (2.00)" in said(path, "list")


def test_free_nodes_are_shown_when_asked_for(path):
    ExclusionList(path).observe([seen("n1", Kind.OUT_OF_MEMORY)])
    assert "no node" in said(path, "list")
    assert "free" in said(path, "list", "--all")


def test_gc_says_what_it_forgot(path):
    ExclusionList(path).observe([seen("n1", Kind.CRASH, ago=9000 * HOUR), seen("n2", Kind.RERUN_PERSISTENT)])
    assert said(path, "gc").startswith(
        "forgot 1 observations, 0 expired exclusions by hand and 0 left-over files; 1 are kept"
    )
    value = as_json(path, "gc")
    assert (value["observations"], value["kept"]) == (0, 1)


def test_words_of_others_cannot_move_the_cursor(path):
    ExclusionList(path).observe([seen("n\x1b[2J", Kind.RERUN_PERSISTENT, evidence="\x1b]0;x\x07\ud800", gpu="G\nx")])
    for words in (("list",), ("why", "n\x1b[2J")):
        assert not {"\x1b", "\x07"} & set(said(path, *words))


def test_a_list_keeps_its_mode(path):
    ExclusionList(path, 0o660).exclude()
    said(path, "add", "n1", "--reason", "x")
    assert path.stat().st_mode & 0o777 == 0o660


def test_a_configuration_names_the_list_and_its_rules(tmp_path):
    path = tmp_path / "group" / "x.json"
    config = tmp_path / "c.yaml"
    config.write_text(
        f"command: x\nrun_folder: r\nexclusions: {{path: {path}, mode: '0660', threshold: 0.2, probation: 0.1}}\n"
    )
    ExclusionList(path, 0o660).observe([seen("n1", Kind.CRASH)])
    result = CliRunner().invoke(exclude, ["list", "--nodes", "--config", str(config)])
    assert result.stdout == "n1\n"


def slurmft(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slurmft", "exclude", *words]
    bare = {"PATH": "/nonexistent", "XDG_STATE_HOME": str(folder), "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=bare)


def test_without_slurm_it_is_the_local_list_and_damage_is_one_clear_error(tmp_path):
    assert slurmft("add", "n1", "--reason", "x", folder=tmp_path).stderr == ""
    path = tmp_path / "slurmft" / "exclusions-local.json"
    path.write_text("{")
    result = slurmft("list", folder=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"slurmft: {path} is damaged")
    assert "is ignored, and set aside at the next change" in result.stderr
    assert slurmft("add", "n2", "--reason", "x", folder=tmp_path).returncode == 0
    assert slurmft("list", folder=tmp_path).stderr == ""
    assert [each.read_text() for each in path.parent.glob("*.damaged-*")] == ["{"]
