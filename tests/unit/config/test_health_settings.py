"""configs/health.yaml: every key with its true default and a comment; platforms; what is refused."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from of_each import of_each
from pydantic import BaseModel

from slurmft.config import run as configuration
from slurmft.config.health import HealthConfig, VerdictLimits
from slurmft.errors import ConfigError
from slurmft.health.checker import load_config
from slurmft.policy.node_health import HealthRules

EXAMPLE = Path(__file__).parents[3] / "configs" / "health.yaml"


def leaves(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, (*above, name))
        else:
            default = field.get_default(call_default_factory=True, validated_data={})
            yield (*above, name), list(map(str, default)) if isinstance(default, tuple) else default


KEYS = dict(leaves(HealthConfig))


def written(text: str, tmp_path: Path) -> HealthConfig:
    (tmp_path / "health.yaml").write_text(text)
    return configuration.load_section(tmp_path / "health.yaml", HealthConfig)


def test_the_example_states_every_key_with_its_default():
    raw = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    stated = {}
    for key, value in raw.items():
        inner = {(key, name): each for name, each in value.items()} if isinstance(value, dict) and value else {}
        stated |= inner or {(key,): value}
    assert stated == KEYS


@of_each(key=KEYS)
def test_the_example_explains_every_key(key):
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    indent = "  " * (len(key) - 1)
    start = lines.index(f"{key[0]}:") if len(key) > 1 else 0
    at = next(number for number in range(start, len(lines)) if lines[number].startswith(f"{indent}{key[-1]}:"))
    assert lines[at - 1].startswith(f"{indent}# ")
    assert lines[at - 1].endswith(".")


def test_a_platform_holds_on_its_nodes(tmp_path):
    config = written(
        """
gpu: {uncorrected_critical: 9}
host: {zombies_warning: 7}
platforms:
  h100: {nodes: ["gpu-h*"], gpu: {expected: 8}, disabled: [clock]}
  login: {nodes: [login1, "gpu-h*"], gpu: {expected: 0}}
""",
        tmp_path,
    )
    here, login, other = (config.for_node(node) for node in ("gpu-h01", "login1", "cpu1"))
    assert (here.gpu.expected, here.gpu.uncorrected_critical, here.host.zombies_warning) == (8, 9, 7)
    assert (here.disabled, here.platforms) == (("clock",), {})
    assert (login.gpu.expected, other.gpu.expected) == (0, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu: {expectd: 8}", "did you mean expected?"),
        ("gpuu: {}", "did you mean gpu?"),
        ("platforms: {a: {nodes: [x], gpu: {expectd: 8}}}", "platforms.a.gpu.expectd"),
        ("platforms: {a: {gpu: {}}}", "platforms.a.nodes"),
        ("platforms: {a: {nodes: [x], verdict: {needed: 1}}}", "hold for all nodes"),
        ("results_folder: relative/path", "not absolute"),
        ("verdict: {needed: 4, considered: 3}", "never happens"),
        ("disk: {space_warning: .nan}", "space_warning"),
        ("disk: {space_warning: 5}", "less than or equal to 1"),
        ("user_probes: {a: {command: []}}", "user_probes.a.command"),
        ("limits_s: {load: -1}", "limits_s.load"),
        ("[]\n- x", "YAML"),
        ("just words", "keys and values"),
    ],
)
def test_what_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        written(text, tmp_path)


def test_where_the_configuration_is_looked_for(tmp_path):
    path = tmp_path / "a b.yaml"
    path.write_text("gpu: {expected: 3}")
    assert load_config(None, {"SLURMFT_HEALTH_CONFIG": str(path)}).gpu.expected == 3
    assert load_config(path, {"SLURMFT_HEALTH_CONFIG": "/no/such"}).gpu.expected == 3
    with pytest.raises(ConfigError, match="there is no configuration file /no/such"):
        load_config(None, {"SLURMFT_HEALTH_CONFIG": "/no/such"})


def test_the_verdicts_rules_are_the_policys():
    assert VerdictLimits().rules() == HealthRules()


@pytest.mark.skipif(os.geteuid() != 0, reason="root's own rule")
@pytest.mark.parametrize(("mode", "owner", "is_refused"), [(0o644, 0, False), (0o664, 0, True), (0o600, 4711, True)])
def test_root_runs_no_programs_that_another_user_names(tmp_path, mode, owner, is_refused):
    path = tmp_path / "health.yaml"
    path.write_text("user_probes: {mine: {command: [/bin/true]}}\n")
    path.chmod(mode)
    os.chown(path, owner, owner)
    if is_refused:
        with pytest.raises(ConfigError, match="users other than root may write"):
            load_config(path, {})
    else:
        assert load_config(path, {}).user_probes
    path.write_text("disk: {}\n")
    assert not load_config(path, {}).user_probes
