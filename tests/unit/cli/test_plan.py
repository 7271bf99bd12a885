"""``slurmft plan`` from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from slurmft.cli.report import plan
from slurmft.config.run import load_section
from slurmft.errors import ConfigError, UsageError
from slurmft.planning.plan import PlanConfig

SITE = Path(__file__).parents[3] / "configs" / "plan.yaml"
SMALL = ("--set", "work_days=1", "--seeds", "2")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(f"command: [python, train.py]\nrun_folder: {tmp_path}/run\nnodes: 64\n")
    return path


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(plan, [*map(str, words), *SMALL], catch_exceptions=True)


def test_the_file_of_the_repository_shows_the_defaults():
    shown = load_section(SITE, PlanConfig)
    assert shown.model_copy(update={"alternatives": {}}) == PlanConfig()
    commented = re.sub(r"^(\s*)# (nodes|save_cost_s|durable_s): ", r"\1\2: ", SITE.read_text(), flags=re.MULTILINE)
    for section, known in yaml.safe_load(commented).items():
        if isinstance(known, dict) and section != "alternatives":
            assert set(known) == set(type(getattr(shown, section)).model_fields)


def test_alternatives_are_compared_and_drawn(config: Path, tmp_path: Path):
    done = run(config, "--site", SITE, "--vary", "spare_nodes=1,2", "--vary", "cluster.repair_hours=1,100", "--svg",
               tmp_path / "plan.svg", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    names = [each["name"] for each in found["alternatives"]]
    assert names[:4] == ["as configured", "two spares", "no exclusions", "hourly saves"]
    assert names[4:] == [
        f"spare_nodes={spares}, cluster.repair_hours={hours}" for spares in (1, 2) for hours in (1, 100)
    ]
    for each in found["alternatives"]:
        assert sum(each["shares"].values()) == pytest.approx(1)
        assert 0 < each["ettr"]["mean"] <= each["goodput"]["mean"] <= 1
    picture = (tmp_path / "plan.svg").read_text()
    assert picture.startswith("<svg") and all(name.split(",")[0] in picture for name in names[:4])


def test_names_with_markup_are_escaped_in_the_picture(config: Path, tmp_path: Path):
    site = tmp_path / "site.yaml"
    site.write_text("alternatives: {'<script>': {spare_nodes: 1}}\n")
    assert run(config, "--site", site, "--svg", tmp_path / "plan.svg").exit_code == 0
    assert "<script>" not in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["--vary", "spare_nodes"], UsageError, "key=value,value"),
        (["--vary", "spare_nodes=1,,2"], UsageError, "key=value,value"),
        (["--vary", "spare_nodes=" + ",".join(map(str, range(60)))], UsageError, "too many"),
        (["--vary", "spare_nods=1,2"], ConfigError, "did you mean"),
        (["--set", "cluster.repair_ours=1"], ConfigError, "did you mean"),
        (["--set", "failures.named_right=2"], ConfigError, "named_right"),
        (["--set", "failures.per_1000_node_days={finished: 1}"], ConfigError, "finished"),
    ],
)
def test_what_is_wrong_is_named(config: Path, words: list[str], error: type[Exception], says: str):
    done = run(config, *words)
    assert isinstance(done.exception, error)
    assert says in str(done.exception)
