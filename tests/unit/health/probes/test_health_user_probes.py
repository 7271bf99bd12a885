"""Executables of a site: whatever they print, and whatever stands in the configuration, there is no traceback and no
failure that nobody reported."""

import time
from pathlib import Path

import pytest
import yaml
from drawn import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import until

import slurmft
from slurmft.config import run as configuration
from slurmft.config.health import HealthConfig, UserProbe
from slurmft.errors import ConfigError
from slurmft.health.checker import look
from slurmft.health.node import Scene
from slurmft.health.probes import first_number, result_of_output, user_probe
from slurmft.policy.node_health import Status, drain_reason
from slurmft.system.processes import birth_of

PROBE = UserProbe(command=("probe",))
OK, WARNING, CRITICAL, UNKNOWN = Status


@pytest.fixture
def script(tmp_path):
    def make(body: str, **options) -> UserProbe:
        path = tmp_path / "a probe's"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return UserProbe(command=(str(path),), **options)

    return make


def scene(**options) -> Scene:
    return Scene(node="n1", now=time.time(), environment={"PATH": "/usr/bin:/bin"}, **options)


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        ("echo 'DISK OK - 5% used | used=5%;80;90'; exit 0", OK, "DISK OK - 5% used"),
        ("echo slow; exit 1", WARNING, "slow"),
        ("echo; echo more; exit 2", CRITICAL, "it said nothing"),
        ("echo hm; exit 3", UNKNOWN, "hm"),
        ("exit 0", OK, "it said nothing"),
        ("echo gone; exit 127", UNKNOWN, "it ended with 127, which Nagios does not know: gone"),
        ("kill -SEGV $$", UNKNOWN, "it was ended by signal 11"),
        ("head -c 10000000 /dev/zero; exit 0", OK, "it said nothing"),
        ("printf '\\377\\000\\033[31mred'; exit 2", CRITICAL, "\ufffd \x1b[31mred"),
        ('echo "$SLURMFT_HEALTH_CONTEXT $SLURMFT_HEALTH_LEVEL"', OK, "manual 1"),
        ("cat; echo no input", OK, "no input"),
        ("echo to stderr >&2; exit 2", CRITICAL, "to stderr"),
        ("sleep 60 & echo left one behind; exit 0", OK, "left one behind"),
        ("exec >&- 2>&-; exit 2", CRITICAL, "it said nothing"),
    ],
)
def test_what_a_probe_says(script, body, status, detail):
    found = user_probe(scene(), "mine", script(body))
    assert (found.name, found.status, found.detail) == ("mine", status, detail)


def test_one_that_hangs_is_unknown_and_ends_with_its_children(script, tmp_path):
    body = f"sleep 60 & echo $! > '{tmp_path}/pid'; trap '' TERM; wait"
    began = time.monotonic()
    found = user_probe(scene(), "mine", script(body, timeout_s=0.3))
    assert (found.status, found.detail) == (UNKNOWN, "no answer within 0.3 s")
    assert time.monotonic() - began < 30
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not birth_of(pid), 30)


@pytest.mark.parametrize("command", ["/no/such", "/tmp", "", "a\0b"], ids=["missing", "a folder", "empty", "nul"])
def test_one_that_cannot_be_started_is_unknown(command):
    assert user_probe(scene(), "mine", UserProbe(command=(command,))).status is UNKNOWN


@pytest.mark.parametrize(
    ("perfdata", "number", "unit"),
    [
        (" used=5%;80;90;0;100 free=95%", 5.0, "%"),
        ("'a label'=-1.5s", -1.5, "s"),
        ("time=0.25", 0.25, ""),
        ("x=U", None, ""),
        ("x=1e5", None, ""),
        ("=5", None, ""),
        ("", None, ""),
        ("x=999999999999999999999", None, ""),
        ("x=nan", None, ""),
    ],
    ids=str,
)
def test_performance_data(perfdata, number, unit):
    assert first_number(perfdata) == (number, unit)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(-70, 300), st.binary(max_size=200))
def test_any_output_is_a_result_and_only_two_is_critical(code, output):
    found = result_of_output("mine", code, output, PROBE)
    assert (found.status is CRITICAL) is (code == 2)
    assert (found.status is OK) is (code == 0)
    assert drain_reason(found.problem, found.name, found.detail).isprintable()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["host", "gpu", "disk", "paths", "platforms", "nodes", "user_probes", "command", "timeout_s",
                         "expected", "verdict", "needed", "limits_s", "disabled", "results_folder", "h100", "write_to",
                         "zombies_warning", "space_critical", "levle"]), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(values.map(lambda value: yaml.safe_dump(value, allow_unicode=True)), st.text(max_size=60)))
def test_any_configuration_is_read_or_refused_in_words(tmp_path, text):
    path = tmp_path / "health.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    try:
        config = configuration.load_section(path, HealthConfig)
    except ConfigError as error:
        assert str(path) in str(error)
        return
    for node in ("n1", "", "gpu-h1"):
        assert isinstance(config.for_node(node), HealthConfig)


def test_a_look_with_probes_of_every_kind(tmp_path, script):
    config = HealthConfig.model_validate({
        "disabled": ["uptime"],
        "user_probes": {
            "fails": {"command": ["/bin/sh", "-c", "echo broken; exit 2"], "is_hardware": True, "remedy": "fix it"},
            "hangs": {"command": ["sleep", "60"], "timeout_s": 0.2},
            "long": {"command": ["false"], "level": 2},
        },
    })  # fmt: skip
    found = {result.name: result for result in look(scene(config=config)).results}
    assert (found["fails"].status, found["fails"].problem, found["fails"].remedy) == (
        CRITICAL, "hardware_problem", "fix it",
    )  # fmt: skip
    assert found["hangs"].status is UNKNOWN
    assert not {"uptime", "long"} & set(found)
    assert [result.name for result in look(scene(config=config), only=["fails"]).results] == ["fails"]


@pytest.mark.parametrize(
    ("code", "status"), [(0, OK), (1, CRITICAL), (101, CRITICAL), (142, UNKNOWN), (143, UNKNOWN)],
)  # fmt: skip
def test_nhc_as_the_page_for_administrators_calls_it(tmp_path, code, status):
    page = (Path(slurmft.__file__).parents[1] / "docs/how-to/nhc.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    probe = HealthConfig.model_validate(yaml.safe_load(text)).user_probes["nhc"]
    nhc = tmp_path / "nhc"
    nhc.write_text(f'#!/bin/sh\necho "ERROR: nhc: $*"\nexit {code}\n')
    nhc.chmod(0o755)
    found = user_probe(Scene(node="n1", now=0.0, environment={"PATH": f"{tmp_path}:/usr/bin:/bin"}), "nhc", probe)
    assert (found.status, found.detail) == (status, "ERROR: nhc: MARK_OFFLINE=0 DETACHED_MODE=0")
