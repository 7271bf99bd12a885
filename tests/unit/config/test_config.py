"""A typo costs one second on the login node: what the configuration accepts, refuses, and says."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from of_each import of_each
from pydantic import BaseModel
from pydantic.plugin import _loader

from slurmft.cli.submit import configuration_schema
from slurmft.config.base import Section, section_of
from slurmft.config.run import RunConfig, from_values, load, validate
from slurmft.errors import ConfigError

LEAST = {"command": ["python", "train.py"], "run_folder": "runs/a"}


def with_(**keys: Any) -> dict[str, Any]:
    return LEAST | keys


def problems(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(with_(**keys), source="here.yaml")
    return str(caught.value)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Write YAML text to a file, and be in its folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def from_yaml(file: Any, text: str, *overrides: str) -> RunConfig:
    return load(file("command: [python, train.py]\nrun_folder: runs/a\n" + text), overrides)


def test_two_keys_are_enough():
    config = validate(LEAST, source="t")
    assert (config.name, config.world_size, config.nodes, config.nproc_per_node) == ("a", 1, 1, 1)
    assert config.checkpoint_dir == Path("runs/a/checkpoints")
    assert config.preemption.signal_lead_s == 120
    assert config.slurm.requeue


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        pytest.param({"node": 2}, "unknown key node; did you mean nodes?", id="top level"),
        pytest.param({"env": {}}, "unknown key env; did you mean environment?", id="its beginning"),
        pytest.param({"checkpoint": {"dirctory": "x"}}, "unknown key checkpoint.dirctory; did you mean directory?"),
        pytest.param(
            {"preemption": {"signal_lead": 9}}, "unknown key preemption.signal_lead; did you mean signal_lead_s?"
        ),
        pytest.param(
            {"slurm": {"partitoin": "x"}}, "slurm.partitoin is not an option of sbatch; did you mean partition?"
        ),
        pytest.param({"slurm": {"cpus_per_tsk": 2}}, "did you mean cpus_per_task?", id="sbatch option of ours"),
        pytest.param({"slurm": {"tres_per_tsk": 2}}, "did you mean tres_per_task?", id="sbatch option of sbatch's"),
        pytest.param({"zzzzzz": 1}, "unknown key zzzzzz\n", id="nothing near"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(keys, message):
    assert message in problems(**keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"nodes": 0}, "nodes: Input should be greater than or equal to 1"),
        ({"nodes": "two"}, "nodes: "),
        ({"nproc_per_node": -1}, "nproc_per_node: "),
        ({"command": []}, "command: "),
        ({"command": ""}, "command: "),
        ({"checkpoint": {"interval_steps": -1}}, "checkpoint.interval_steps: "),
        ({"preemption": {"signal": "SIGKILL"}}, "preemption.signal: Input should be 'SIGTERM', 'SIGINT', 'SIGUSR1' or"),
        ({"preemption": {"signal_lead_s": 65536}}, "preemption.signal_lead_s: "),
        ({"nccl": {"backend": "mpi"}}, "nccl.backend: "),
        ({"nccl": {"step_timeout_minutes": 0}}, "nccl.step_timeout_minutes: "),
        ({"fault_tolerance": {"max_no_progress_cycles": 0}}, "fault_tolerance.max_no_progress_cycles: "),
        ({"slurm": {"cpus_per_task": 0}}, "slurm.cpus_per_task: "),
        ({"slurm": 5}, "slurm: "),
        ({"exit_actions": {"COMPLET": "0"}}, "exit_actions.COMPLET"),
        ({"exit_actions": {"FAIL": "1-"}}, "'1-' is neither an exit code nor a range"),
        ({"exit_actions": {"FAIL": "300"}}, "exit codes go from 0 to 255"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(keys, message):
    assert message in problems(**keys)


@pytest.mark.parametrize("missing", ["command", "run_folder"])
def test_what_has_no_default_must_be_given(missing):
    with pytest.raises(ConfigError, match=f"{missing}: missing; it has no default"):
        validate({key: value for key, value in LEAST.items() if key != missing}, source="t")


INFERENCE = {"input": "requests.jsonl", "engine": {"url": "http://host:8000"}}


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"command": []}, "command: missing; it has no default (a run without a trainer has a section inference)"),
     ({"command": ["  "], "inference": None}, "command: its first word, the program, is empty"),
     ({"inference": INFERENCE}, "command: a run with a section inference has no trainer; remove one of the two")],
    ids=["neither", "empty", "both"],
)  # fmt: skip
def test_a_run_has_a_trainer_or_inference(keys, message):
    assert message in problems(**keys)


@pytest.mark.parametrize(
    ("engine", "message"),
    [({}, "inference.engine: give one of command, callable, process and url; given: none"),
     ({"command": ["a", "/m/b", "{port}"], "stage_in_memory": ["/m/c"]}, "stage_in_memory: '/m/c' is no absolute path"),
     ({"command": ["a", "m", "{port}"], "stage_in_memory": ["m"]}, "stage_in_memory: 'm' is no absolute path"),
     ({"command": ["a", "/", "{port}"], "stage_in_memory": ["/"]}, "stage_in_memory: '/' is no absolute path"),
     ({"callable": "a:b", "stage_in_memory": ["/m"]}, "stage_in_memory: '/m' is no absolute path"),
     ({"url": "http://h", "callable": "a:b"}, "give one of command, callable, process and url; given: callable, url"),
     ({"command": "vllm serve m"}, "inference.engine: command must hold {port}"),
     ({"callable": "a.b"}, "inference.engine.callable: 'a.b' is not of the form package.module:name"),
     ({"url": "http://user:secret@h"}, "inference.engine.url: "),
     ({"url": "http://h", "ready_path": "health"}, "inference.engine.ready_path: 'health' is not a path"),
     ({"comand": "a"}, "unknown key inference.engine.comand; did you mean command?")],
    ids=["none", "staged elsewhere", "a relative stage", "all staged", "a staged callable", "two", "no port", "no name",
         "a password", "no path", "a typo"],
)  # fmt: skip
def test_a_wrong_engine_is_named(engine, message):
    raw = {"run_folder": "runs/a", "inference": INFERENCE | {"engine": engine}}
    with pytest.raises(ConfigError) as caught:
        validate(raw, source="here.yaml")
    assert message in str(caught.value)


def test_the_paths_of_inference_become_absolute_but_standard_input(file, tmp_path):
    text = "run_folder: r\ninference: {input: %s, output: out, engine: {url: 'http://h', token_file: t}}\n"
    section = load(file(text % "in.jsonl")).inference
    assert section is not None
    assert (section.input, section.output, section.engine.token_file) == (
        tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "t",
    )  # fmt: skip
    section = load(file(text % '"-"')).inference
    assert section is not None and section.from_stdin


def test_all_problems_are_reported_at_once():
    text = problems(nodes=0, node=1, checkpoint={"x": 1}, nccl={"backend": "mpi"})
    assert text.startswith("here.yaml: 4 problems\n")
    assert all(part in text for part in ("nodes: ", "unknown key node", "unknown key checkpoint.x", "nccl.backend: "))
    assert "slurmft examples reference.yaml" in text


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"partitoin": "low", "exlude": "n1"}, ("slurm.partitoin", "slurm.exlude")),
        ({"partitoin": "low", "cpus_per_task": 0}, ("slurm.partitoin", "slurm.cpus_per_task")),
        ({"partitoin": "low", "nodes": 2}, ("slurm.partitoin", "slurm.nodes")),
    ],
    ids=["two typos", "a typo and a value", "a typo and a key of ours"],
)
def test_all_problems_of_the_slurm_section_are_reported_at_once(section, expected):
    text = problems(slurm=section)
    assert all(part in text for part in expected)


# sbatch's options


@pytest.mark.parametrize(
    ("key", "value"),
    [("gres", "x"), ("mail_type", "x"), ("gpus_per_task", "1"), ("reservation", "x"), ("time_min", "10"),
     ("mem_per_cpu", "1G"), ("hold", "x")],
)  # fmt: skip
def test_any_option_of_sbatch_may_be_given(key, value):
    assert (validate(with_(slurm={key: value}), source="t").slurm.model_extra or {})[key] == value


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("signal", "preemption.signal"),
        ("nodes", "use nodes"),
        ("ntasks", "nproc_per_node"),
        ("ntasks_per_node", "nproc_per_node"),
        ("open_mode", "append"),
        ("array", "submit each run by itself"),
        ("wrap", "use command"),
        ("no_requeue", "requeue: false"),
    ],
)
def test_what_slurmft_sets_itself_is_refused_with_what_to_use_instead(key, instead):
    text = problems(slurm={key: "1"})
    assert f"slurm.{key} is set by slurmft" in text
    assert instead in text


# YAML's traps


@pytest.mark.parametrize(
    ("written", "time"),
    [
        ("30", "30"),
        ('"1:30:00"', "1:30:00"),
        ("1-12:00:00", "1-12:00:00"),
        ("0:30:00", "0:30:00"),
        ('"30:00"', "30:00"),
    ],
)
def test_a_time_reaches_sbatch_as_written(file, written, time):
    assert from_yaml(file, f"slurm: {{time: {written}}}").slurm.time == time


@pytest.mark.parametrize(
    "written",
    ["1:30:00", "100:00", "30:00", "5:00"],
)
def test_a_time_that_yaml_reads_in_base_60_is_refused_or_kept(file, written):
    try:
        assert from_yaml(file, f"slurm: {{time: {written}}}").slurm.time == written
    except ConfigError as error:
        assert "in quotes" in str(error)


@pytest.mark.parametrize(
    "written",
    [
        "True", "2026-11-20", "yes", "no", "on", "off", "010", "1_000", "12:30", "0x1F", "0.5", "1e3", "1.50",
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["slurm: {{partition: {}}}", "environment: {{X: {}}}"], ids=["partition", "variable"])
def test_a_text_that_yaml_reads_as_something_else_is_refused_or_kept(file, where, written):
    try:
        config = from_yaml(file, where.format(written))
    except ConfigError:
        return
    assert written in (config.slurm.partition, config.environment.get("X"))


@pytest.mark.parametrize(("written", "read"), [("8", "8"), ("a100:4", "a100:4")])
def test_a_number_may_be_a_text(file, written, read):
    assert from_yaml(file, f"slurm: {{gpus_per_node: {written}}}").slurm.gpus_per_node == read


@pytest.mark.parametrize(
    ("written", "argv"),
    [
        ("[python, train.py, --lr, 0.1, --steps, 300]", ("python", "train.py", "--lr", "0.1", "--steps", "300")),
        ("python train.py --name 'a b' \"$HOME\"", ("python", "train.py", "--name", "a b", "$HOME")),
        ("bash -c 'cd /x && exec train $1 | tee log'", ("bash", "-c", "cd /x && exec train $1 | tee log")),
        (
            "env A=1 train --x=a>b --y='; ' http://h/?a&b c$",
            ("env", "A=1", "train", "--x=a>b", "--y=; ", "http://h/?a&b", "c$"),
        ),
        ("[train.py]", ("train.py",)),
    ],
)
def test_the_command_is_an_argument_list(file, written, argv):
    assert load(file(f"command: {written}\nrun_folder: r\n")).command == argv


def test_a_command_with_an_open_quote_is_refused(file):
    with pytest.raises(ConfigError, match="command: No closing quotation"):
        load(file("command: python 'train.py\nrun_folder: r\n"))


FOR_A_SHELL = (
    ("A=1 train", "A=1"), ("cd /x && train", "&&"), ("train || rest", "||"), ("train | tee log", "|"), ("a; b", ";"),
    ("train &", "&"), ("train > log", ">"), ("train 2>&1", "2>&1"), ("train >log", ">log"), ("train $MODEL", "$MODEL"),
    ("train ~/m", "~/"), ("train `date`", "`"), ("train $(date)", "$("),
)  # fmt: skip


@of_each(line__found=FOR_A_SHELL)
def test_a_command_that_only_a_shell_understands_is_refused(file, line, found):
    with pytest.raises(ConfigError, match=re.escape(f"command: no shell reads it, and '{found}")):
        load(file(f"command: {json.dumps(line)}\nrun_folder: r\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold keys and values"),
        ("- a\n- b\n", "must hold keys and values"),
        ("a: [1\n", "is not YAML"),
        ("command: {{upload_location}}\n", "is a template"),
        ("inputs:\n- url: {{input:0}}\n", "is a template"),
        ("a: !!python/object/apply:os.system ['true']\n", "is not YAML"),
        ("a:\tb\n\tc: d", "is not YAML"),
    ],
    ids=["empty", "a list", "an open bracket", "a template", "a template of an input", "code", "tabs"],
)
def test_what_is_no_configuration(file, text, message):
    with pytest.raises(ConfigError, match=message):
        load(file(text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no configuration file .*nowhere.yaml"):
        load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff\xfe")], ids=["folder", "bytes"]
)
def test_an_unreadable_file_is_named(tmp_path, make):
    make(path := tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"cannot read .*config.yaml"):
        load(path)


# --set


@pytest.mark.parametrize(
    ("override", "look", "value"),
    [
        ("nodes=4", lambda config: config.nodes, 4),
        ("slurm.partition=low", lambda config: config.slurm.partition, "low"),
        ("slurm.gres=gpu:2", lambda config: config.slurm.model_extra, {"gres": "gpu:2"}),
        ("slurm.time='1:30:00'", lambda config: config.slurm.time, "1:30:00"),
        ("environment.A=b=c", lambda config: config.environment, {"A": "b=c"}),
        ("environment.EMPTY=''", lambda config: config.environment, {"EMPTY": ""}),
        ("command=[a, b]", lambda config: config.command, ("a", "b")),
        ("checkpoint={interval_steps: 5}", lambda config: config.checkpoint.interval_steps, 5),
        ("exit_actions.FAIL=17", lambda config: dict(config.exit_actions), {"FAIL": "17"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_override_replaces_one_key(file, override, look, value):
    assert look(from_yaml(file, "nodes: 1\n", override)) == value


def test_the_last_override_wins_and_leaves_the_others(file):
    config = from_yaml(file, "slurm: {partition: low, account: me}\n", "slurm.partition=a", "slurm.partition=b")
    assert (config.slurm.partition, config.slurm.account) == ("b", "me")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nodes", "not of the form key.sub=value"),
        ("=4", "not of the form key.sub=value"),
        ("nodes=[1", "the value is not YAML"),
        ("nodes.x=1", "nodes is a value, not a section"),
        ("nodse=4", "unknown key nodse; did you mean nodes?"),
        ("slurm.tiem=4", "slurm.tiem is not an option of sbatch"),
    ],
)
def test_a_wrong_override_is_refused(file, override, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        from_yaml(file, "nodes: 1\n", override)


# paths


def test_paths_become_absolute_where_one_submits(file, tmp_path):
    config = from_yaml(file, "checkpoint: {directory: ../elsewhere}\n")
    assert config.run_folder == tmp_path / "runs/a"
    assert config.working_directory == tmp_path
    assert config.checkpoint_dir == tmp_path.parent / "elsewhere"


def test_the_home_folder_is_understood(file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert from_yaml(file, "", "run_folder=~/runs/b").run_folder == Path("/home/me/runs/b")


def test_links_in_paths_are_kept(file, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert from_yaml(file, "", "run_folder=link/r").run_folder == tmp_path / "link/r"


# exit codes and variables


@pytest.mark.parametrize(
    "actions",
    [{"COMPLETE": "0", "FAIL": "0"}, {"RESCHEDULE": "11-20", "FAIL": "17"}, {"COMPLETE": "5,6", "RESCHEDULE": "6-9"}],
    ids=str,
)
def test_a_code_has_one_action(actions):
    assert "is in both" in problems(exit_actions=actions)


@pytest.mark.parametrize(
    "actions", [{"COMPLETE": 0, "RESCHEDULE": "11-16", "FAIL": "17"}, {"FAIL": "3,3"}, {}], ids=str
)
def test_codes_that_do_not_overlap(actions):
    assert validate(with_(exit_actions=actions), source="t").exit_actions.keys() == actions.keys()


@pytest.mark.parametrize("name", ["A", "_a1", "NCCL_DEBUG"])
def test_names_of_variables(name):
    assert validate(with_(environment={name: 1}), source="t").environment == {name: "1"}


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "A\n", "Ä"])
def test_what_is_no_name_of_a_variable(name):
    assert "is not the name of an environment variable" in problems(environment={name: "x"})


# round trip and schema

FULL = {
    "command": ["python", "train.py", "--text", "yes", "1:30:00", "ü 'q' \"d\" $x\n"],
    "run_folder": "/shared/runs/odd name: yes",
    "nodes": 3,
    "nproc_per_node": 8,
    "environment": {"A": "no", "B": "010", "C": ""},
    "working_directory": "/work",
    "slurm": {
        "time": "1:30:00", "gpus_per_node": "8", "mem": "0", "exclude": "n[1-3]", "requeue": False, "no_kill": True,
        "srun_args": ["--mpi=none"], "gres": "gpu:2", "hold": True, "nice": 5,
    },
    "checkpoint": {"directory": "/shared/c", "interval_steps": 0},
    "fault_tolerance": {"launch_timeout_s": 0.5, "preload": False},
    "preemption": {"signal": "SIGUSR1", "continue_by": "resubmit"},
    "nccl": {"backend": "gloo"},
    "exit_actions": {"COMPLETE": "0", "RESCHEDULE": "11-16", "FAIL": "17"},
}  # fmt: skip


@pytest.mark.parametrize("raw", [LEAST, FULL], ids=["least", "full"])
def test_what_is_written_is_read_back_equal(raw, tmp_path):
    config = validate(raw, source="t")
    assert validate(yaml.safe_load(config.as_yaml()), source="again") == config
    path = tmp_path / "config.yaml"
    path.write_text(config.as_yaml(), encoding="utf-8")
    once = load(path)
    path.write_text(once.as_yaml(), encoding="utf-8")
    assert load(path) == once


def keys_of(model: type[BaseModel]) -> set[str]:
    """Every key with its section, as ``slurm.time``."""
    found: set[str] = set()
    for name, info in model.model_fields.items():
        found.add(name)
        if (section := section_of(info.annotation)) is not None:
            found |= {f"{name}.{inner}" for inner in keys_of(section)}
    return found


def keys_of_schema(node: dict[str, Any], definitions: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in node.get("properties", {}).items():
        found.add(name)
        for section in (each["$ref"] for each in [value, *value.get("anyOf", [])] if "$ref" in each):
            inner = definitions[section.rpartition("/")[2]]
            found |= {f"{name}.{key}" for key in keys_of_schema(inner, definitions)}
    return found


def test_the_json_schema_lists_every_key():
    text = configuration_schema()
    assert json.loads(json.dumps(text)) == text
    assert keys_of_schema(text, text["$defs"]) == keys_of(RunConfig)
    assert text["required"] == ["run_folder"]
    a_sweep_of_functions = {
        "required": ["trials"], "properties": {"trials": {"type": "object", "required": ["callable"]}},
    }  # fmt: skip
    assert text["oneOf"] == [{"required": ["command"]}, {"required": ["inference"]}, a_sweep_of_functions]
    assert text["$schema"].startswith("https://json-schema.org/")


@pytest.mark.parametrize(
    ("elastic", "minimum", "maximum"),
    [({}, 4, 4), ({"min_nodes": 1}, 1, 4), ({"max_nodes": 6}, 4, 6), ({"min_nodes": 4, "max_nodes": 4}, 4, 4)],
)
def test_how_many_nodes_a_run_may_have(elastic: dict[str, int], minimum: int, maximum: int):
    size = validate({"command": ["a"], "run_folder": "/runs/a", "nodes": 4, "elastic": elastic}, source="here").size
    assert (size.minimum, size.nodes, size.maximum) == (minimum, 4, maximum)
    assert size.is_elastic == (minimum < maximum)


@pytest.mark.parametrize(
    ("elastic", "words"),
    [
        ({"min_nodes": 5}, "elastic.min_nodes=5 is more than nodes=4"),
        ({"max_nodes": 3}, "elastic.max_nodes=3 is less than nodes=4"),
        ({"min_nodes": 0}, "elastic.min_nodes"),
        ({"max_nodes": 10**9}, "elastic.max_nodes"),
        ({"min_nodes": True}, "elastic.min_nodes"),
        ({"start_with_fewer": True}, "elastic.start_with_fewer needs elastic.min_nodes below nodes=4"),
        ({"min_node": 1}, "did you mean min_nodes"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(elastic: dict[str, int], words: str):
    with pytest.raises(ConfigError, match=words):
        validate({"command": ["a"], "run_folder": "/runs/a", "nodes": 4, "elastic": elastic}, source="here")


@pytest.mark.parametrize("before", [None, "some-plugin"])
def test_no_plugin_of_pydantics_is_looked_for(before, monkeypatch):
    class Own(Section):
        number: int = 1

    def look(group: str) -> None:
        raise AssertionError(f"entry points of {group}")

    monkeypatch.setattr(_loader, "_plugins", None)
    monkeypatch.setattr(_loader, "entry_points", look)
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS", raising=False)
    if before is not None:
        monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", before)
    assert Own.model_validate({"number": 2}).number == 2
    assert os.environ.get("PYDANTIC_DISABLE_PLUGINS") == before


@pytest.mark.parametrize("key", ["exclude", "nodelist"])
@pytest.mark.parametrize("nodes", ["n[1-3", "n]1", "n[1-3]]", "n[a-b]", "n[]"])
def test_a_list_of_nodes_that_is_none_is_refused_at_once(key, nodes):
    with pytest.raises(ConfigError, match=f"{key}: .*is no list of nodes"):
        from_values({"command": ["x"], "run_folder": "r", "slurm": {key: nodes}}, source="x.yaml")
    for good in ("n1", "n[1-3,7],login1", "r[1-2]n[01-04]", "/home/ann/nodes"):
        from_values({"command": ["x"], "run_folder": "r", "slurm": {key: good}}, source="x.yaml")


def test_a_threshold_of_one_is_taken():
    section = {"gpu_relative_perf_threshold": 1.0, "gpu_individual_perf_threshold": 1}
    found = from_values({"command": ["x"], "run_folder": "r", "straggler_detection": section}, source="x.yaml")
    assert found.straggler_detection.gpu_relative_perf_threshold == 1.0


@pytest.mark.parametrize(
    ("section", "in_place", "by_requeue", "in_a_row", "of_causes"),
    [
        ({}, 3, 2, 3, {}),
        ({"retries": 5}, 5, 5, 6, {}),
        ({"retries": 0}, 0, 0, 1, {}),
        ({"retries": 5, "num_in_job_restarts": 1}, 1, 5, 6, {}),
        ({"retries": {"node lost": 7}, "max_no_progress_cycles": 9}, 3, 2, 9, {"node lost": 7}),
    ],
)
def test_one_budget_with_exceptions(tmp_path, section, in_place, by_requeue, in_a_row, of_causes):
    values = {"command": ["true"], "run_folder": str(tmp_path / "run"), "fault_tolerance": section}
    found = from_values(values, source="test").fault_tolerance
    assert (found.num_in_job_restarts, found.num_job_retries_on_failure, found.max_no_progress_cycles) == (
        in_place, by_requeue, in_a_row,
    )  # fmt: skip
    assert found.retries == of_causes
    again = from_values({**values, "fault_tolerance": found.model_dump(mode="json")}, source="test")
    assert again.fault_tolerance == found


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "many", [1]])
def test_a_budget_that_is_none_is_refused(tmp_path, wrong):
    values = {"command": ["true"], "run_folder": str(tmp_path / "run"), "fault_tolerance": {"retries": wrong}}
    with pytest.raises(ConfigError, match="retries"):
        from_values(values, source="test")
