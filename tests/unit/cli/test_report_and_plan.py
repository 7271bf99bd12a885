"""``slurmft report`` as a user calls it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from generated_journals import write_run

from slurmft.cli.report import plan
from slurmft.config.run import load_section
from slurmft.errors import ConfigError, UsageError
from slurmft.planning.plan import PlanConfig


def slurmft(*arguments: str, runs: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "slurmft", *arguments], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "SLURMFT_RUNS": str(runs), "COLUMNS": "160"},
    )  # fmt: skip
    assert result.returncode == code, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for number in range(3):
        write_run(root / f"run-{number}", attempts=4 + number, seed=number)
    return root


def test_a_table_of_one_run_and_of_two(runs: Path) -> None:
    one = slurmft("report", "run-0", runs=runs).stdout
    assert all(word in one for word in ("training", "ETTR", "goodput", "between failures", "checkpoints: one"))
    two = slurmft("report", "run-0", "--compare", "run-1", runs=runs).stdout
    assert "run-0" in two and "run-1" in two and "lemon" not in two


def test_json_has_sums_and_the_names_of_googles_library(runs: Path) -> None:
    told = json.loads(slurmft("report", "run-0", "--json", runs=runs).stdout)
    assert told["format"] == 1 and sum(told["seconds"].values()) == pytest.approx(told["wall_s"], rel=1e-3)
    names = told["ml_goodput"]
    assert names["GoodputType"]["TOTAL"] == told["seconds"]["training"]
    assert sum(names["BadputType"].values()) + names["GoodputType"]["TOTAL"] == pytest.approx(told["wall_s"], rel=1e-3)
    assert {"WASTED_PROGRESS_FROM_DISRUPTION", "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME"} <= set(names["BadputType"])


def test_all_runs_are_a_fleet_and_a_damaged_one_hides_no_other(runs: Path, tmp_path: Path) -> None:
    bad = runs / "damaged"
    bad.mkdir()
    (bad / "journal.jsonl").write_text("{")
    (bad / "config.yaml").write_text("")
    result = slurmft("report", runs=runs)
    assert all(f"run-{number}" in result.stdout for number in range(3)) and "lemon nodes" in result.stdout
    assert "slurmft: damaged:" in result.stderr
    told = json.loads(slurmft("report", "--json", runs=runs).stdout)
    assert len(told["runs"]) == 3 and list(told["unreadable"]) == ["damaged"] and told["lemons"]
    page = tmp_path / "fleet.html"
    assert slurmft("report", "--html", str(page), runs=runs).stdout == f"written: {page}\n"
    assert "Lemon nodes" in page.read_text() and "Could not be read" in page.read_text()
    (bad / "journal.jsonl").unlink()
    (bad / "config.yaml").unlink()
    bad.rmdir()


def test_roles_have_lines_of_their_own(tmp_path: Path) -> None:
    for name in ("rl", "rl/roles/rollout", "rl/roles/trainer"):
        write_run(tmp_path / name, attempts=2, seed=1)
        (tmp_path / name / "config.yaml").write_text("command: x\n")
    (tmp_path / "rl/roles/a file").write_text("")
    names = ["rl/rollout", "rl/trainer"]
    told = json.loads(slurmft("report", "rl", "--json", runs=tmp_path).stdout)
    assert [each["run"] for each in told["runs"]] == names
    verdict = {"cause": "preempted", "reason": "", "exit_code": 0, "first_step": 0, "last_step": 0}
    lines = [("attempt started", {}), ("workers started", {"world_size": 1}), ("verdict", verdict),
             ("decision", {"action": "continue"}), ("left to slurm", {"reason": "its job"})]  # fmt: skip
    (tmp_path / names[0].replace("/", "/roles/") / "journal.jsonl").write_text("".join(
        json.dumps({"format": 1, "at": "2026-11-20T10:00:00+00:00", "attempt": "7.0.0", "event": event, **facts}) + "\n"
        for event, facts in lines))  # fmt: skip
    walls = [json.loads(slurmft("report", "rl", "--json", runs=tmp_path).stdout)["runs"][0]["wall_s"]]
    (tmp_path / "rl/done.json").write_text(json.dumps({"format": 1}))
    os.utime(tmp_path / "rl/done.json", (0, 1795168800 + 60))
    walls += [json.loads(slurmft("report", "--json", runs=tmp_path).stdout)["runs"][0]["wall_s"]]
    assert walls[0] > 3600 and walls[1] == pytest.approx(60, abs=1)
    refused = slurmft("report", "rl", "--compare", "rl", runs=tmp_path, code=2).stderr
    assert "name a role" in refused
    shown = [json.loads(line)["run"] for line in slurmft("status", "rl", "--json", runs=tmp_path).stdout.splitlines()]
    assert shown == ["rl", *names]
    assert all(name in slurmft("watch", "rl", "--once", runs=tmp_path).stdout for name in names)


def test_since_counts_the_newest_part_alone(runs: Path) -> None:
    old = json.loads(slurmft("report", "run-0", "--json", "--since", "5m", runs=runs).stdout)
    assert old["wall_s"] == 0 and old["ettr"] is None
    assert slurmft("report", "run-0", "--since", "5m", runs=runs).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [(["--since", "soon"], 2, "no age"), (["--since", "0d"], 2, "no age"), (["missing"], 2, "missing"),
     (["--compare", "run-1"], 2, "exactly one RUN"), (["run-0", "run-2", "--compare", "run-1"], 2, "exactly one RUN"),
     (["run-0", "--html", "/proc/none/x.html"], 2, "/proc/none")],
)  # fmt: skip
def test_what_it_cannot_do_it_says_once(runs: Path, arguments: list[str], code: int, words: str) -> None:
    result = slurmft("report", *arguments, runs=runs, code=code)
    assert words in result.stderr and "Traceback" not in result.stderr


def test_no_runs_at_all(tmp_path: Path) -> None:
    assert "there are no runs" in slurmft("report", runs=tmp_path, code=2).stderr


def test_what_cannot_be_written_or_read_says_what_to_do(runs: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "gone" / "page.html", Path("-")):
        refused = slurmft("report", "run-0", "--html", str(place), runs=runs, code=2).stderr
        assert "name a file in a folder that exists" in refused and ".tmp" not in refused, refused
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("")
    assert "slurmft submit CONFIG" in slurmft("report", "new", runs=tmp_path, code=1).stderr


def test_a_run_that_waits_for_its_first_start_has_a_report(tmp_path: Path) -> None:
    write_run(tmp_path / "waits", attempts=1)
    journal = tmp_path / "waits" / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]))
    told = slurmft("report", "waits", runs=tmp_path).stdout
    assert "the job waits in Slurm's queue" in told and "cause first start: 1 end," in told, told


# --- ``slurmft plan`` from the command line ---


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
    optional = r"^(\s*)# (nodes|save_cost_s|durable_s|role_restart_s): "
    commented = re.sub(optional, r"\1\2: ", SITE.read_text(), flags=re.MULTILINE)
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
