"""Every kind of fault of a GPU, by the real probes on the stand-in: seen, and off the node where it must be."""

import time
from pathlib import Path

import gpu_stand_in
import pytest
from gpu_faults import CRITICAL, FAULTS, OK, UNKNOWN, WARNING, Fault, FaultyCluster, outcome_of, stand_in

from slurmft.policy.node_health import growth, with_sample

pytestmark = gpu_stand_in.needs_stand_in


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> FaultyCluster:
    monkeypatch.setenv("NVML_STAND_IN", "")
    stand_in(tmp_path_factory.mktemp("nvml"))
    return FaultyCluster(tmp_path_factory.mktemp("cluster"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_seen_and_its_node_is_taken_out_where_it_must(cluster: FaultyCluster, fault: Fault):
    cluster.begin()
    assert cluster.sweep(0.0).assessment.verdicts["n3"].condition == "healthy"
    sick = cluster.nodes[2]
    fault.inject(sick, 5, cluster.dice)

    began = time.monotonic()
    at_once = cluster.look(sick, 1.0, "prolog")
    took_s = time.monotonic() - began
    assert took_s < 10
    if "hang" not in fault.name:
        assert outcome_of(at_once, fault) is fault.status, at_once
    else:
        assert outcome_of(at_once, fault) is UNKNOWN, "a job does not wait for the driver"

    looks = [cluster.look(sick, 300.0 * number, "healthcheck") for number in (1, 2)]
    assert {outcome_of(found, fault) for found in looks} == {fault.status}, looks
    drained = [verdict.node for verdict in cluster.sweep(601.0).drain]
    assert drained == (["n3"] if fault.takes_out else [])


def test_there_are_kinds_of_every_sort():
    assert len(FAULTS) >= 24
    assert {fault.status for fault in FAULTS} == {OK, WARNING, CRITICAL, UNKNOWN}


def test_a_driver_that_hangs_hides_neither_the_kernel_log_nor_the_other_probes(cluster):
    sick = cluster.nodes[0]
    sick.gpus.set_driver(hang="nvmlInitWithFlags")
    sick.log("NVRM: Xid (PCI:0000:1b:00): 119, Timeout after 6s of waiting for RPC response from GPU0 GSP!")
    found = {result.name: result for result in cluster.look(sick, 1.0, "prolog").results}
    assert (found["gpu-count"].status, found["xid"].status) == (UNKNOWN, CRITICAL)


def test_a_driver_that_wakes_up_slowly_is_no_fault(cluster):
    slow = cluster.nodes[0]
    slow.gpus.set_driver(hang="nvmlInitWithFlags", hang_s=1)
    assert cluster.look(slow, 1.0, "healthcheck").status is OK


def test_counters_count_by_their_growth(cluster):
    """One uncorrected error a week is no reason to drain; five in an hour are, until a day later."""
    node, day, total = cluster.nodes[0], 86_400.0, 30
    node.gpus.set(3, uncorrected=total)
    assert cluster.look(node, 0.0, "healthcheck").status is OK, "long before the first look"
    for week in range(1, 8):
        node.gpus.set(3, uncorrected=total + week)
        assert cluster.look(node, 7 * week * day, "healthcheck").status is WARNING
        assert cluster.look(node, (7 * week + 2) * day, "healthcheck").status is OK
    for number in range(5):
        node.gpus.set(3, uncorrected=total + 8 + number)
        found = cluster.look(node, 60 * day + 600 * number, "healthcheck")
    assert found.status is CRITICAL
    assert cluster.look(node, 61 * day - 60, "healthcheck").status is CRITICAL
    assert cluster.look(node, 61 * day + 3600, "healthcheck").status is OK


def test_a_file_of_counters_that_is_damaged_is_begun_anew(cluster):
    node = cluster.nodes[0]
    for number, text in enumerate(["{", '{"format": 1, "samples": 7}', '{"format": 1, "samples": [["x", {}]]}', ""]):
        cluster.look(node, float(number), "healthcheck")
        (path,) = (node.root / "run").rglob("*.gpu.json")
        path.write_text(text)
        assert cluster.look(node, number + 0.5, "healthcheck").status is OK
    outside = Path(node.root, "target")
    path.unlink()
    path.symlink_to(outside)
    assert cluster.look(node, 9.0, "healthcheck").status is OK
    assert not outside.exists()
    assert not path.is_symlink(), "replaced, not followed"


@pytest.mark.parametrize(
    ("totals", "grown"),
    [([0, 0, 7], 7), ([5, 5, 5], 0), ([5, 6, 9], 4), ([9, 2, 3], 3), ([3], 0)],
    ids=["some", "none", "twice", "after a reset", "the first"],
)
def test_growth_within_the_window(totals, grown):
    samples = ()
    for number, total in enumerate(totals):
        samples = with_sample(samples, 10.0 * number, {"x": total}, 100.0)
    assert growth(samples, 10.0 * (len(totals) - 1), 100.0).get("x", 0) == grown


def test_few_samples_of_a_counter_that_grows_with_every_look_are_kept():
    samples, window_s = (), 86_400.0
    for number in range(5000):
        now = 300.0 * number
        samples = with_sample(samples, now, {"a": number, "b": 3 if number > 2 else 0}, window_s)
        if number > 400:
            assert abs(growth(samples, now, window_s)["a"] - 288) <= 7
    assert len(samples) < 60
    assert growth(samples, now, window_s)["b"] == 0


def test_a_counter_that_is_not_known_for_a_while_does_not_count_twice():
    samples = with_sample((), 0.0, {"a": 40}, 100.0)
    samples = with_sample(samples, 10.0, {"b": 1}, 100.0)
    samples = with_sample(samples, 20.0, {"a": 41}, 100.0)
    assert growth(samples, 20.0, 100.0) == {"a": 1, "b": 1}
