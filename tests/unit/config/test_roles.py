"""Roles of a run: what each is, what it shares with the others, and what makes no sense."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmft.config.run import components_of, from_values, load, partitions_of, roles_of
from slurmft.errors import ConfigError, UsageError
from slurmft.planning import plan
from slurmft.planning.plan import alternatives

TRAINER = {"command": ["python", "train.py"], "nodes": 2}
ENGINE = {"engine": {"command": ["serve", "--port", "{port}"]}}
APART = {"a": TRAINER, "b": {**TRAINER, "slurm": {"mem": "1G"}}}


def config_of(roles: dict[str, Any], **more: Any) -> Any:
    return from_values({"run_folder": "/runs/rl", "roles": roles, **more}, source="rl.yaml")


def test_a_role_is_a_run_in_the_runs_folder_on_nodes_of_its_own():
    asks = {"command": "python ask.py", "needs": ["rollout"], "nodes": 0}
    config = config_of({"trainer": TRAINER, "rollout": {**ENGINE, "nodes": 2, "replicas": 4}, "asks": asks})
    assert config.nodes == 4
    asks_role, rollout, trainer = roles_of(config)
    assert (trainer.config.run_folder, trainer.nodes, trainer.ends_run) == (Path("/runs/rl/roles/trainer"), 2, True)
    assert trainer.config.checkpoint_dir == Path("/runs/rl/roles/trainer/checkpoints")
    assert (rollout.is_endpoint, rollout.ends_run, rollout.nodes) == (True, False, 2)
    assert rollout.config.inference is not None and rollout.config.inference.replicas_per_node == 2
    assert (asks_role.nodes, asks_role.config.nodes, asks_role.needs) == (0, 1, ("rollout",))
    assert {role.config.preemption.continue_by for role in roles_of(config)} == {"job"}


def test_what_the_run_says_is_each_roles_as_well_unless_it_says_otherwise():
    config = config_of(
        {"a": {**TRAINER, "fault_tolerance": {"num_in_job_restarts": 1}}, "b": TRAINER},
        fault_tolerance={"agent_timeout_s": 7, "num_in_job_restarts": 9}, environment={"X": "1"},
        preemption={"signal_lead_s": 60}, rerun={"wait_for_others": False},
    )  # fmt: skip
    a, b = (role.config for role in roles_of(config))
    assert (a.fault_tolerance.agent_timeout_s, b.fault_tolerance.agent_timeout_s) == (7, 7)
    assert (a.fault_tolerance.num_in_job_restarts, b.fault_tolerance.num_in_job_restarts) == (1, 9)
    assert a.environment == {"X": "1"} and a.preemption.signal_lead_s == 60
    assert not a.rerun.wait_for_others


@pytest.mark.parametrize(
    ("asked", "components", "order"),
    [
        ({"a": None, "b": {"mem": "1G"}, "c": {}}, [(4, {}), (2, {"mem": "1G"})], "acb"),
        ({"a": {"partition": "gpu"}, "b": None}, [(2, {}), (1, {"partition": "gpu"})], "ba"),
        ({"a": {"mem": "2G"}, "b": {"mem": "1G"}, "c": {"mem": "2G"}}, [(4, {"mem": "2G"}), (2, {"mem": "1G"})], "acb"),
        ({"a": {"gpus_per_node": 8}}, [(1, {"gpus-per-node": "8"})], "a"),
        ({"a": {"gpus-per-node": 8}, "b": {"gpus_per_node": "8"}}, [(3, {"gpus-per-node": "8"})], "ab"),
        ({"a": None, "b": {}}, [(3, {})], "ab"),
        ({"a": {"mem": "2G"}, "z": "on the first node of the job"}, [(1, {"mem": "2G"})], "az"),
    ],
    ids=str,
)
def test_roles_that_ask_for_the_same_nodes_share_a_component(asked, components, order):
    roles = {
        name: {**TRAINER, "nodes": nodes, "slurm": slurm} if not isinstance(slurm, str) else {**TRAINER, "nodes": 0}
        for nodes, (name, slurm) in enumerate(asked.items(), 1)
    }
    config = config_of(roles, slurm={"partition": "low", "time": "10"})
    assert [(each.nodes, each.options) for each in components_of(config)] == components
    assert "".join(role.name for role in roles_of(config)) == order, "they get nodes in this order"


def test_the_partitions_of_a_job_are_those_of_all_components():
    config = config_of({"a": TRAINER, "b": {**TRAINER, "slurm": {"partition": "cpu"}}, **APART})
    assert (partitions_of(config, "low"), partitions_of(config, "")) == ("low", "")
    config = config_of({"a": TRAINER, "b": {**TRAINER, "slurm": {"partition": "cpu"}}})
    assert (partitions_of(config, "low"), partitions_of(config, "")) == ("low,cpu", ",cpu")


def test_a_stored_configuration_is_read_back_with_the_same_roles(tmp_path):
    config = config_of({"trainer": {**TRAINER, "slurm": {"mem": "1G"}}, "rollout": ENGINE})
    path = tmp_path / "config.yaml"
    path.write_text(config.as_yaml())
    again = load(path)
    assert (again.nodes, roles_of(again)) == (3, roles_of(config))
    yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    ("roles", "more", "said"),
    [
        ({"a": {**TRAINER, "needs": ["b"]}, "b": {**TRAINER, "needs": ["a"]}}, {}, "a, b wait for each other"),
        ({"a": {**TRAINER, "needs": ["a"]}}, {}, "a wait for each other"),
        ({"a": {**TRAINER, "needs": ["x"]}}, {}, "there is no role x"),
        ({"a": {**TRAINER, "needs": "b"}}, {}, "a list of names"),
        ({"a": ENGINE}, {}, "never end"),
        ({"a": {**TRAINER, "slurm": {"time": "1:00"}}}, {}, "roles.a.slurm.time: not of a role"),
        ({"a": {**TRAINER, "slurm": {"mem": "much"}}}, {}, "slurm.mem: 'much' is not a size"),
        ({"a": {**TRAINER, "slurm": {"nodelist": "n[1"}}}, {}, "no list of nodes"),
        ({"a": {**TRAINER, "slurm": 3}}, {}, "slurm"),
        ({"a": TRAINER, "b": {**TRAINER, "nodes": 0, "slurm": {"mem": "1G"}}}, {}, "roles.b.slurm: it has no nodes"),
        (APART, {"spare_nodes": 1}, "spare_nodes: of no use next to roles"),
        (APART, {"elastic": {"min_nodes": 1}}, "elastic: of no use next to roles"),
        (APART, {"slurm": {"no_kill": True}}, "slurm.no_kill does not go with"),
        (APART, {"slurm": {"nodelist": "n[1-9]"}}, "slurm.nodelist does not go with"),
        ({"a": {**TRAINER, "run_folder": "/x"}}, {}, "roles.a.run_folder"),
        ({"a": {"command": ["x"], "nods": 2}}, {}, "unknown key nods"),
        ({"a": {}}, {}, "command: missing"),
        ({"A b": TRAINER}, {}, "roles"),
        ({"a": TRAINER, "b": {**ENGINE, "nodes": 2, "replicas": 3}}, {}, "no multiple"),
        ({"a": TRAINER, "b": {**ENGINE, "replicas": "x"}}, {}, "no multiple"),
        ({"a": TRAINER}, {"nodes": 3}, "not the sum"),
        ({"a": TRAINER}, {"command": ["x"]}, "no command"),
        ({"a": {**TRAINER, "nodes": "many"}}, {}, "nodes a number"),
        ({"a": {**TRAINER, "ends_run": "maybe"}}, {}, "true or false"),
        ({"a": {**TRAINER, "preemption": 3}}, {}, "preemption"),
        ({"a": {**TRAINER, "environment": 3}}, {"environment": {"A": "1"}}, "environment"),
        ({"a-b": ENGINE, "a_b": ENGINE, "c": TRAINER}, {}, "share the names"),
        ({"a": TRAINER}, {"spare_nodes": 2}, "spare_nodes: of no use next to roles; leave it out"),
        ({"a": TRAINER}, {"elastic": {"min_nodes": 1}}, "elastic: .* leave it out"),
        ({"a": TRAINER}, {"trials": {"callable": "m:f", "grid": {"a": [1, 2]}}}, "trials: .* leave it out"),
        ({"a": TRAINER}, {"checkpoint": {"keep_last_n": 5}}, r"give it to the role .*\(roles.NAME.checkpoint\)"),
        ({"a": TRAINER}, {"launcher": "ray", "exit_actions": {"FAIL": "3"}}, "launcher: .*; exit_actions: "),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(roles, more, said):
    with pytest.raises(ConfigError, match=said):
        config_of(roles, **more)


def test_a_plan_knows_the_nodes_of_each_role_and_the_same_job_as_one(tmp_path, monkeypatch):
    asked, counsel = [], plan.counsel
    monkeypatch.setattr(plan, "counsel", lambda run, *more: asked.append(run.run_folder) or counsel(run, *more))
    path = tmp_path / "rl.yaml"
    asks = {"command": "python ask.py", "needs": ["rollout"], "nodes": 0}
    roles = {
        "trainer": TRAINER,
        "rollout": {**ENGINE, "nodes": 2, "replicas": 4},
        "asks": asks,
        "judge": {**TRAINER, "nodes": 1},
    }
    path.write_text(yaml.safe_dump({"run_folder": str(tmp_path / "run"), "roles": roles}))
    load_s = "durations.role_restart_s={rollout: 600}"
    apart, whole = (each.scenario for each in alternatives(path, None, overrides=[load_s], varied=[], seeds=None))
    assert [(part.name, part.first, part.nodes, part.share, part.restart_s) for part in apart.parts] == [
        ("judge", 0, 1, 1.0, 5.0), ("rollout", 1, 2, 0.25, 600.0),
    ]  # fmt: skip
    assert (apart.trainer, apart.size.nodes, apart.restart_s) == ("trainer", 5, 5.0)
    assert asked == [tmp_path / "run" / "roles" / "trainer"], "the trainer's own saves were measured"
    assert (whole.parts, whole.size, whole.restart_s) == ((), apart.size, 600.0)
    with pytest.raises(UsageError, match="no role roll"):
        alternatives(path, None, overrides=["durations.role_restart_s={roll: 600}"], varied=[], seeds=None)


def test_a_key_of_a_role_without_a_value_is_not_given():
    config = config_of({"a": {**TRAINER, "environment": None, "preemption": None}}, environment={"A": "1"})
    assert roles_of(config)[0].config.environment == {"A": "1"}
