"""The section ``checkpoint``: what is refused, and that workers get what was configured."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmft.agent.workers import worker_environment
from slurmft.config import run as configuration
from slurmft.config.run import RunConfig, load, validate
from slurmft.config.sections import DEFAULTS, OUT_OF_SECTION_S, START_UP_S, CheckpointConfig, FaultToleranceConfig
from slurmft.errors import ConfigError
from slurmft.ipc.messages import StartWorkers
from slurmft.policy.container import Mount
from slurmft.policy.worker_settings import WORKER_VARIABLE, CheckpointSettings, WorkerSettings

START = StartWorkers(attempt="7.0.0", nodes=2, first_rank=0, master_addr="n1", master_port=1, cycle=0, generation=1)


def run_with(**section: Any) -> RunConfig:
    return validate({"command": "x", "run_folder": "/r/n", "nodes": 2, "checkpoint": section}, source="t")


def of_a_worker(config: RunConfig) -> CheckpointSettings:
    return WorkerSettings.from_environment(worker_environment(config, {}, START, 0, "7.0.0")).checkpoint


def test_a_worker_has_the_defaults_of_the_configuration_without_any_variable():
    alone = WorkerSettings.from_environment({}).checkpoint
    assert alone == of_a_worker(run_with())
    ours = {field.name for field in fields(CheckpointSettings)} - {"mtbf_s"}
    assert ours == set(CheckpointConfig.model_fields) - {"directory"}


def test_every_key_reaches_the_worker():
    given = {
        "interval": "seconds", "interval_steps": 7, "interval_seconds": 1.5, "keep_last_n": 4, "keep_every": 1000,
        "save_best": False, "best_metric": "val acc 'x'", "best_mode": "max", "async_save": False, "when_busy": "wait",
        "max_failed_saves": 9, "bandwidth": 12345, "peer_copies": 1, "peer_interval": 2,
        "local_directory": "/nvme/o'dd name", "just_in_time": False, "stall_timeout_s": 5.0,
    }  # fmt: skip
    assert set(given) == set(CheckpointConfig.model_fields) - {"directory"}
    got = of_a_worker(run_with(**given))
    assert {name: getattr(got, name) for name in given} == given


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1), ("500", 500), ("500M", 500 << 20), ("1.5G", 3 << 29), ("1.5 GiB/s", 3 << 29), ("2kB", 2048),
        ("1t", 1 << 40), (None, None),
    ],
    ids=["number", "digits", "M", "G", "GiB/s", "kB", "t", "none"],
)  # fmt: skip
def test_a_bandwidth_may_be_written_as_people_write_it(text, expected):
    assert run_with(bandwidth=text).checkpoint.bandwidth == expected


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"interval": "hourly"}, "checkpoint.interval: "),
        ({"interval": "seconds"}, "needs interval_seconds above 0"),
        ({"interval_seconds": 60}, "does nothing with interval: steps; say interval: seconds"),
        ({"interval_seconds": float("nan")}, "checkpoint.interval_seconds: "),
        ({"interval_seconds": -1}, "checkpoint.interval_seconds: "),
        ({"keep_last_n": 0}, "checkpoint.keep_last_n: "),
        ({"best_metric": " "}, "is not the name of a metric"),
        ({"best_mode": "lowest"}, "checkpoint.best_mode: "),
        ({"bandwidth": "fast"}, "checkpoint.bandwidth: 'fast' is not a number of bytes per second, such as 500M"),
        ({"bandwidth": "0"}, "checkpoint.bandwidth: "),
        ({"bandwidth": True}, "checkpoint.bandwidth: "),
        ({"bandwidth": "9" * 400}, "checkpoint.bandwidth: "),
        ({"bandwidth": "999999999999999T"}, "checkpoint.bandwidth: "),
        ({"peer_copies": 2}, "checkpoint.peer_copies=2 needs more than 2 nodes; nodes=2"),
        ({"directory": "/a", "local_directory": "/a"}, "local_directory is the shared directory"),
        ({"local_directory": "/a\nb"}, "holds a line break or control character"),
        ({"stall_timeout_s": 0}, "checkpoint.stall_timeout_s: "),
        ({"max_failed_saves": 0}, "checkpoint.max_failed_saves: "),
        ({"keep_last": 3}, "unknown key checkpoint.keep_last; did you mean keep_last_n?"),
    ],
    ids=["interval", "no seconds", "seconds unused", "nan", "negative", "keep none", "metric", "mode", "rate",
         "rate 0", "rate true", "rate of 400 digits", "rate too much", "peers", "same folder", "control", "stall",
         "failures", "unknown"],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(section, named):
    with pytest.raises(ConfigError) as caught:
        run_with(**section)
    assert named in caught.value.what


@pytest.mark.parametrize(
    ("name", "value"),
    [("interval", "x"), ("keep_last_n", 0), ("keep_every", 1.5), ("async_save", "true"), ("mtbf_s", math.nan),
     ("mtbf_s", math.inf), ("bandwidth", 1 << 70), ("interval_seconds", -1)],
    ids=["interval", "keep", "every", "flag", "nan", "inf", "digits", "seconds"],
)  # fmt: skip
def test_a_setting_that_was_changed_by_hand_is_named(name, value):
    with pytest.raises(ConfigError, match=f"{WORKER_VARIABLE} does not hold .*{name}"):
        WorkerSettings.from_environment({WORKER_VARIABLE: json.dumps({"checkpoint": {name: value}})})


def test_how_often_it_fails_comes_from_the_supervisor():
    assert CheckpointConfig().settings(86400.5).mtbf_s == 86400.5


@pytest.mark.parametrize(
    ("section", "expected"),
    [({}, True), ({"interval_steps": 0}, False), ({"interval": "auto", "interval_steps": 0}, True)],
    ids=["steps", "none", "auto"],
)
def test_whether_anything_is_saved_before_the_end(section, expected):
    assert run_with(**section).checkpoint.is_periodic is expected


# --- ``inference.serving.replicas``: bounds that cannot be kept are refused, with the key to change ---


def endpoint(path: Path, **replicas: Any) -> RunConfig:
    section = {"engine": {"command": ["engine", "{port}"]}, "replicas_per_node": 2, "serving": {"replicas": replicas}}
    return RunConfig.model_validate({"run_folder": str(path / "run"), "nodes": 2, "inference": section})


def test_none_to_all_is_allowed(tmp_path: Path) -> None:
    inference = endpoint(tmp_path, min=0, max=4).inference
    assert inference is not None and inference.serving is not None
    assert (inference.serving.replicas.min, inference.serving.replicas.max) == (0, 4)


@pytest.mark.parametrize(
    ("replicas", "word"),
    [
        ({"max": 2}, "replicas.min"),
        ({"min": 3, "max": 2}, "above replicas.max"),
        ({"min": 0, "max": 5}, "is above replicas_per_node times nodes"),
        ({"min": 5}, "is above replicas_per_node times nodes"),
        ({"min": -1}, "greater than or equal to 0"),
        ({"min": 0, "idle_s": 0}, "greater than 0"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, replicas: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        endpoint(tmp_path, **replicas)


# --- What ``fault_tolerance`` may say about hangs, and what it means ---


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
def test_limits_that_make_no_sense_are_refused(key: str, value: object, words: str):
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


# --- The section ``container`` of a configuration: what is taken, and what is refused with its reason ---


BWRAP = {"runtime": "command", "command": "bwrap {mounts} --"}


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def make(container: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
        raw = {"command": "x", "run_folder": "runs/r", **changes, "container": container or {}}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
        return load(tmp_path / "c.yaml")

    return make


def test_by_default_there_is_none(loaded: Any):
    assert loaded().contained() is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param("/data", ("/data", "/data", False), id="a path"),
        pytest.param("/data:/in", ("/data", "/in", False), id="elsewhere"),
        pytest.param("/data:/in:ro", ("/data", "/in", True), id="read-only"),
        pytest.param("/data:/in:rw", ("/data", "/in", False), id="read and write"),
        pytest.param("data", ("HERE/data", "HERE/data", False), id="relative"),
        pytest.param("../data:/in", ("ABOVE/data", "/in", False), id="relative, upwards"),
        pytest.param({"source": "/a:b", "target": "/c"}, ("/a:b", "/c", False), id="with a colon"),
        pytest.param({"source": "/a b", "read_only": True}, ("/a b", "/a b", True), id="with a blank"),
    ],
)
def test_a_mount(loaded: Any, tmp_path: Path, given: Any, expected: tuple[str, str, bool]):
    plan = loaded({**BWRAP, "mounts": [given]}).contained()
    here = [text.replace("HERE", str(tmp_path)).replace("ABOVE", str(tmp_path.parent)) for text in expected[:2]]
    assert Mount(source=here[0], target=here[1], read_only=expected[2]) in plan.mounts


def test_the_runs_folders_are_mounted_in_any_case(loaded: Any, tmp_path: Path):
    plan = loaded(BWRAP, checkpoint={"directory": "/big/c", "local_directory": "/ssd/l"}).contained()
    assert {each.target for each in plan.mounts} == {
        str(tmp_path), str(tmp_path / "runs/r"), "/big/c", "/ssd/l", "/dev/shm"
    }  # fmt: skip
    assert plan.workdir == str(tmp_path)


def test_a_working_directory_inside_is_the_trainers(loaded: Any, tmp_path: Path):
    config = loaded({**BWRAP, "workdir": "/code"})
    assert config.trainer_directory == Path("/code")
    assert str(tmp_path) not in {each.target for each in config.contained().mounts}


@pytest.mark.parametrize(
    ("container", "words"),
    [
        pytest.param({"runtime": "docker"}, "container.runtime", id="an unknown runtime"),
        pytest.param({"image": "x"}, "image without container.runtime", id="no runtime"),
        pytest.param({"runtime": "pyxis"}, "runtime: pyxis needs container.image", id="no image"),
        pytest.param({"runtime": "command"}, "runtime: command needs container.command", id="no command"),
        pytest.param({"runtime": "oci", "image": "/i", "command": "x"}, "for runtime: command, not oci",
                     id="a command"),
        pytest.param({**BWRAP, "options": ["-x"]}, "belong into container.command", id="options"),
        pytest.param({**BWRAP, "imgae": "x"}, "did you mean image", id="a typo"),
        pytest.param({**BWRAP, "workdir": "code"}, "absolute, and without ..", id="a relative workdir"),
        pytest.param({**BWRAP, "mounts": ["/a:b"]}, "absolute, and without ..", id="a relative target"),
        pytest.param({**BWRAP, "mounts": ["/a:/b/../c"]}, "absolute, and without ..", id="a target upwards"),
        pytest.param({**BWRAP, "mounts": ["/a:/b:/c"]}, "is not SOURCE, SOURCE:TARGET", id="three paths"),
        pytest.param({**BWRAP, "mounts": ["/a:/b:ro:x"]}, "is not SOURCE, SOURCE:TARGET", id="too many parts"),
        pytest.param({**BWRAP, "mounts": [":/b"]}, "is not SOURCE, SOURCE:TARGET", id="no source"),
        pytest.param({**BWRAP, "mounts": [""]}, "is not SOURCE, SOURCE:TARGET", id="nothing"),
        pytest.param({**BWRAP, "mounts": ["/x:/dev/shm"]}, "hides what the run needs in /dev/shm", id="memory"),
        pytest.param({**BWRAP, "command": "bwrap"}, "container.command: one of its words must be", id="no mounts"),
        pytest.param({"runtime": "pyxis", "image": "x", "mounts": [{"source": "/a,b"}]}, "container.mounts: pyxis",
                     id="a comma"),
    ],
)  # fmt: skip
def test_what_is_refused(loaded: Any, container: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as refused:
        loaded(container)
    assert words in str(refused.value)


def test_a_run_folder_that_the_runtime_cannot_be_given(loaded: Any):
    with pytest.raises(ConfigError, match="takes ',' in"):
        loaded({"runtime": "apptainer", "image": "/i.sif"}, run_folder="/scratch/a,b")
    assert loaded(BWRAP, run_folder="/scratch/a,b").contained() is not None


def test_it_is_written_down_and_read_back(loaded: Any, tmp_path: Path):
    config = loaded({**BWRAP, "mounts": ["/a:/b:ro", {"source": "/c:d"}], "python": "/p"})
    (tmp_path / "again.yaml").write_text(config.as_yaml())
    assert load(tmp_path / "again.yaml") == config
