"""What ``fault_tolerance`` may say about hangs, and what it means."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slurmft.config import run as configuration
from slurmft.config.run import validate
from slurmft.config.sections import DEFAULTS, OUT_OF_SECTION_S, START_UP_S, FaultToleranceConfig
from slurmft.errors import ConfigError


def settings(**given: object) -> FaultToleranceConfig:
    return validate({"command": "x", "run_folder": "r", "fault_tolerance": given}, source="test").fault_tolerance


@pytest.mark.parametrize(
    "given",
    [
        "setup:600,step:180,checkpointing:420",
        " setup : 600 , step:180.0,checkpointing:420 ,",
        {"setup": 600, "step": 180, "checkpointing": 420},
        {"setup": "600", "step": "1.8e2", "checkpointing": 420.0},
    ],
)
def test_limits_are_a_mapping_or_a_text(given: object):
    found = settings(rank_section_timeouts=given)
    assert found.limits().sections == {**DEFAULTS, "setup": 600, "step": 180, "checkpointing": 420}
    assert found.given_sections() == {"setup", "step", "checkpointing"}


@pytest.mark.parametrize("given", [None, 0, "null", "off", 0.0])
def test_a_limit_can_be_switched_off(given: object):
    found = settings(
        rank_section_timeouts={"step": given}, rank_out_of_section_timeout=given, initial_rank_heartbeat_timeout=given,
        rank_heartbeat_timeout=given,
    )  # fmt: skip
    limits = found.limits()
    assert (limits.sections["step"], limits.out_of_section_s, limits.start_up_s, limits.heartbeat_s) == (0, 0, 0, 0)
    assert found.start_up_is_given


def test_as_text_a_limit_can_be_switched_off_too():
    assert settings(rank_section_timeouts="step:null").limits().sections["step"] == 0


def test_the_defaults_are_nobodys_own():
    found = settings()
    assert (found.given_sections(), found.start_up_is_given) == (frozenset(), False)
    assert found.limits().sections == DEFAULTS
    assert (found.limits().out_of_section_s, found.limits().start_up_s) == (OUT_OF_SECTION_S, START_UP_S)


def test_names_may_be_anything_that_can_be_shown():
    found = settings(rank_section_timeouts={"load: data, 'x'": 3, "\u00fcber": 4, 7: 5})
    assert {"load: data, 'x'", "\u00fcber", "7"} <= set(found.limits().sections)
    assert settings(rank_section_timeouts="a:b:5").limits().sections["a:b"] == 5


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rank_section_timeouts", "step", "name:seconds"),
        ("rank_section_timeouts", ":5", "name:seconds"),
        ("rank_section_timeouts", "step:5,step:6", "twice"),
        ("rank_section_timeouts", "step:soon", "number"),
        ("rank_section_timeouts", "step:-1", "greater"),
        ("rank_section_timeouts", "step:nan", "finite"),
        ("rank_section_timeouts", "step:1e300", "too much"),
        ("rank_section_timeouts", {"step": True}, "true or false"),
        ("rank_section_timeouts", {"two\nlines": 5}, "not the name"),
        ("rank_section_timeouts", {"": 5}, "not the name"),
        ("rank_section_timeouts", {"x" * 48: 5}, "longer than 47"),
        ("rank_section_timeouts", {f"s{number}": 5 for number in range(101)}, "too many"),
        ("rank_section_timeouts", [5], "dictionary"),
        ("rank_out_of_section_timeout", -1, "greater"),
        ("initial_rank_heartbeat_timeout", "never", "number"),
        ("safety_factor", 0.5, "greater"),
        ("safety_factor", "inf", "finite"),
        ("workload_check_interval", 0, "greater"),
        ("num_warmup_iterations", -1, "greater"),
        ("calc_ft_timeouts", "perhaps", "bool"),
    ],
)
def test_what_makes_no_sense_is_refused(key: str, value: object, words: str):
    with pytest.raises(ConfigError, match=words) as refused:
        settings(**{key: value})
    assert f"fault_tolerance.{key}" in str(refused.value)


def test_what_was_switched_off_stays_so_when_it_is_written_down_and_read_back(tmp_path: Path):
    given = {"rank_section_timeouts": {"step": None, "mine": 5}, "rank_out_of_section_timeout": None}
    config = validate(
        {"command": "x", "run_folder": str(tmp_path / "r"), "working_directory": str(tmp_path),
         "fault_tolerance": given}, source="test"
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(config.as_yaml())
    again = configuration.load(tmp_path / "config.yaml")
    assert again.fault_tolerance == config.fault_tolerance
    assert yaml.safe_load(config.as_yaml())["fault_tolerance"]["rank_section_timeouts"]["step"] == 0
