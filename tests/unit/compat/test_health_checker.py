"""Health by kind of check, with the real probes of this machine."""

from typing import Any

import pytest

from slurmft import health as health_health
from slurmft.compat import HealthChecker
from slurmft.compat.serving_names import PROBES
from slurmft.config.health import HealthConfig
from slurmft.errors import ConfigError, UsageError
from slurmft.health.checker import scene_here
from slurmft.health.probes import known_names


def _answers(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, str]) -> list[tuple[str, ...]]:
    """Let the probes answer so; returns what they are asked for."""
    asked: list[tuple[str, ...]] = []

    class Checker:
        def __init__(self, _config: Any = None, *, only: Any = ()) -> None:
            self.only = tuple(only)

        def check_health(self) -> dict[str, Any]:
            asked.append(self.only)
            return {"checks": [{"name": name, "status": status, "detail": "so"} for name, status in found]}

    monkeypatch.setattr(health_health.checker, "HealthChecker", Checker)
    return asked


def test_this_machine_answers_by_kind():
    health = HealthChecker(worker_id=3).check_health()
    assert {*health} >= {"healthy", "checks", "timestamp"} and health["worker_id"] == 3
    assert {*health["checks"]} == {"gpu", "memory", "network", "disk"}
    assert health["checks"]["memory"] in (True, False), "every machine has memory"
    assert isinstance(health["healthy"], bool) and isinstance(health["timestamp"], float)


def test_every_probe_that_is_asked_exists():
    known = known_names(scene_here(HealthConfig(), {}, context="manual", level=1))
    assert {name for names in PROBES.values() for name in names} <= set(known)


@pytest.mark.parametrize(
    ("found", "checks", "healthy"),
    [
        ([("memory", "OK"), ("links", "WARNING"), ("disk-space", "OK")], (None, True, True, True), True),
        ([("memory", "OK"), ("edac", "CRITICAL")], (None, False, None, None), False),
        ([("gpu-count", "CRITICAL"), ("memory", "OK")], (False, True, None, None), False),
        ([("gpu-count", "UNKNOWN"), ("xid", "OK")], (True, None, None, None), True),
        ([("probes", "UNKNOWN")], (None, None, None, None), False),
        ([], (None, None, None, None), False),
    ],
)
def test_the_dictionary_of_checks(found, checks, healthy, monkeypatch):
    asked = _answers(monkeypatch, *found)
    answer = HealthChecker("worker-1").check_health()
    assert tuple(answer["checks"][kind] for kind in ("gpu", "memory", "network", "disk")) == checks
    assert answer["healthy"] is healthy
    assert len(asked) == 1, "one look for all kinds"
    assert [line for line in answer["problems"] if "edac" in line] == ["edac: so"] * (("edac", "CRITICAL") in found)


def test_each_kind_can_be_asked_alone(monkeypatch):
    asked = _answers(monkeypatch, ("disk-space", "OK"))
    checker = HealthChecker(0)
    assert checker.check_gpu() is None and checker.check_disk() is True
    assert checker.check_memory() is None and checker.check_network() is None
    assert asked == [PROBES["gpu"], PROBES["disk"], PROBES["memory"], PROBES["network"]]


def test_a_subclass_may_have_its_own_checks(monkeypatch):
    _answers(monkeypatch, ("memory", "OK"))

    class Stricter(HealthChecker):
        def check_network(self) -> bool:
            return False

    answer = Stricter(0).check_health()
    assert answer["checks"]["network"] is False and answer["healthy"] is False


@pytest.mark.parametrize("worker_id", [None, 1.5, True, [1], b"1"])
def test_a_worker_without_a_name_is_refused(worker_id):
    with pytest.raises(UsageError, match="worker_id is"):
        HealthChecker(worker_id)


def test_a_configuration_that_cannot_be_used_is_refused_at_once(tmp_path):
    (tmp_path / "health.yaml").write_text("memory: {available: no}")
    with pytest.raises(ConfigError):
        HealthChecker(0, config=tmp_path / "health.yaml")
