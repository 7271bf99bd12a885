"""From looks at nodes to verdicts and actions: N of M, cluster problems, limits per hour, ten thousand nodes."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.node_health import (
    MAX_REASON,
    Checkup,
    Condition,
    HealthRules,
    ProbeResult,
    Problem,
    Status,
    assess,
    drain_reason,
    is_ours,
    plan,
    worst,
)

NOW = 1_000_000.0
RULES = HealthRules(needed=2, considered=3, clean_needed=2, min_spacing_s=30, max_age_s=3600)
LETTERS = {".": Status.OK, "w": Status.WARNING, "X": Status.CRITICAL, "?": Status.UNKNOWN}


def look(node: str, at: float, **results: str) -> Checkup:
    """``look("n1", NOW, gpu="X")``"""
    found = tuple(ProbeResult(name=name, status=LETTERS[letter], detail=f"{name} says {letter}",
                              problem=Problem.HARDWARE) for name, letter in results.items())  # fmt: skip
    return Checkup(node=node, at=at, results=found)


def history(node: str, letters: str, *, name: str = "gpu", every_s: float = 300, end: float = NOW) -> list[Checkup]:
    """One look for each letter, the newest last."""
    return [look(node, end - every_s * (len(letters) - 1 - index), **{name: letter})
            for index, letter in enumerate(letters)]  # fmt: skip


@pytest.mark.parametrize(
    ("letters", "condition"),
    [
        ("", Condition.UNKNOWN),
        ("?", Condition.UNKNOWN),
        ("???", Condition.UNKNOWN),
        (".", Condition.HEALTHY),
        ("w", Condition.HEALTHY),
        ("X", Condition.SUSPECT),
        ("XX", Condition.SICK),
        ("X.X", Condition.SICK),
        ("X..X", Condition.SUSPECT),
        ("X?X", Condition.SICK),
        ("X???X", Condition.SICK),
        ("XX.", Condition.SUSPECT),
        ("XX..", Condition.HEALTHY),
        ("XX?.", Condition.SUSPECT),
        ("XX.?", Condition.SUSPECT),  # the newest look saw nothing: no run of clean ones
        ("XXX?", Condition.SICK),
        ("?.", Condition.HEALTHY),
    ],
    ids=str,
)
def test_what_a_nodes_past_comes_to(letters, condition):
    verdict = assess({"n1": history("n1", letters)}, NOW, RULES, nodes=["n1"]).verdicts["n1"]
    assert verdict.condition is condition


def test_ten_looks_at_once_are_one_opinion():
    checkups = history("n1", "XXXXXXXXXX", every_s=1)
    assert assess({"n1": checkups}, NOW, RULES).verdicts["n1"].condition is Condition.SUSPECT
    earlier = history("n1", "X", end=NOW - 400)
    verdict = assess({"n1": checkups + earlier}, NOW, RULES).verdicts["n1"]
    assert (verdict.condition, verdict.failed, verdict.looked) == (Condition.SICK, 2, 2)


@pytest.mark.parametrize("end", [NOW - 4000, NOW + 10_000, float("nan"), float("inf")], ids=str)
def test_looks_from_another_time_are_not_believed(end):
    checkups = history("n1", "XXX", end=end)
    assert assess({"n1": checkups}, NOW, RULES).verdicts["n1"].condition is Condition.UNKNOWN


def test_different_failures_do_not_add_up():
    checkups = [look("n1", NOW - 300, gpu="X", disk="."), look("n1", NOW, gpu=".", disk="X")]
    verdict = assess({"n1": checkups}, NOW, RULES).verdicts["n1"]
    assert (verdict.condition, verdict.check) == (Condition.SUSPECT, "disk")


def test_a_look_that_did_not_ask_says_nothing_of_the_check():
    checkups = [look("n1", NOW - 600, gpu="X"), look("n1", NOW - 300, disk="."), look("n1", NOW, gpu="X")]
    assert assess({"n1": checkups}, NOW, RULES).verdicts["n1"].condition is Condition.SICK


def cluster(failing: int, of: int, letters: str = "XX") -> dict[str, list[Checkup]]:
    return {f"n{number}": history(f"n{number}", letters if number < failing else "..") for number in range(of)}


@of_each(failing__of__is_the_clusters=[(1, 1, False), (1, 2, False), (1, 4, False), (2, 4, True), (2, 10, False),
     (3, 10, False), (4, 10, True), (10, 10, True)])  # fmt: skip
def test_what_many_share_is_no_nodes_fault(failing, of, is_the_clusters):
    found = assess(cluster(failing, of), NOW, RULES)
    assert bool(found.cluster_problems) is is_the_clusters
    sick = found.of(Condition.SICK)
    assert len(sick) == (0 if is_the_clusters else failing)
    if is_the_clusters:
        problem = found.cluster_problems[0]
        assert (problem.check, len(problem.nodes), problem.looked) == ("gpu", failing, of)
        assert plan(found, NOW, RULES)[0] == ()


def test_a_cluster_problem_hides_no_other_failure():
    checkups = cluster(10, 10)
    for each in (NOW - 300, NOW):
        checkups["n3"].append(look("n3", each + 1, gpu="X", disk="X"))
    rules = HealthRules(needed=2, considered=3, min_spacing_s=0)
    found = assess(checkups, NOW + 1, rules)
    assert [(verdict.node, verdict.check) for verdict in found.of(Condition.SICK)] == [("n3", "disk")]


def test_nodes_that_could_not_look_do_not_hide_a_cluster_problem():
    checkups = cluster(3, 6) | {f"silent{number}": history(f"silent{number}", "??") for number in range(90)}
    assert len(assess(checkups, NOW, RULES).cluster_problems) == 1


def test_no_more_than_a_few_in_an_hour():
    found = assess(cluster(6, 100), NOW, RULES)
    rules = HealthRules(max_nodes_per_hour=4)
    first = plan(found, NOW, rules)
    assert [verdict.node for verdict in first[0]] == ["n0", "n1", "n2", "n3"]
    assert [verdict.node for verdict in first[1]] == ["n4", "n5"]
    assert plan(found, NOW, rules, taken_out_at=[NOW - 10] * 4)[0] == ()
    assert len(plan(found, NOW, rules, taken_out_at=[NOW - 4000] * 9)[0]) == 4
    assert plan(found, NOW, HealthRules(max_nodes_per_hour=0))[0] == ()


def test_who_is_out_already_is_not_taken_out_again():
    found = assess(cluster(2, 100), NOW, RULES)
    assert [verdict.node for verdict in plan(found, NOW, RULES, already_out=frozenset({"n0"}))[0]] == ["n1"]


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        ("XID 79", "slurmft: [hardware_problem] xid: XID 79"),
        ('a "b"\nc\td', "slurmft: [hardware_problem] xid: a 'b' c d"),
        ("gr\u00fc\u00df\x1b[31m", "slurmft: [hardware_problem] xid: gr [31m"),
        ("\\n", "slurmft: [hardware_problem] xid: /n"),
    ],
    ids=["plain", "quotes and lines", "other letters", "backslash"],
)
def test_the_drain_reason(detail, reason):
    assert drain_reason(Problem.HARDWARE, "xid", detail) == reason


@settings(max_examples=50)
@given(st.text(), st.text())
def test_a_drain_reason_is_one_short_line_of_ours(check, detail):
    reason = drain_reason(Problem.NODE, check, detail)
    assert is_ours(reason)
    assert reason.isprintable()
    assert reason.isascii()
    assert len(reason) <= MAX_REASON
    assert '"' not in reason


def test_strangers_reasons_are_not_ours():
    assert not any(map(is_ours, ["", "Kill task failed", "not slurmft: x", "slurmft", " slurmft: [node_problem] x: y"]))


@pytest.mark.parametrize(
    ("letters", "status"),
    [("", Status.UNKNOWN), ("..", Status.OK), (".?", Status.UNKNOWN), ("?w", Status.WARNING), ("?wX", Status.CRITICAL)],
    ids=["none", "well", "unknown", "warning", "critical"],
)
def test_the_worst(letters, status):
    assert worst(LETTERS[letter] for letter in letters) is status


@given(st.lists(st.text(alphabet=".wX?", max_size=6), max_size=8))
def test_nobody_is_taken_out_without_enough_failures(pasts):
    checkups = {f"n{number}": history(f"n{number}", letters) for number, letters in enumerate(pasts)}
    for verdict in plan(assess(checkups, NOW, RULES), NOW, RULES)[0]:
        newest = [letter for letter in pasts[int(verdict.node[1:])] if letter != "?"][-RULES.considered :]
        assert newest[-1] == "X"
        assert newest.count("X") >= RULES.needed


def test_ten_thousand_nodes():
    checks = [f"check{number}" for number in range(20)]
    results = {letter: look("", NOW, **dict.fromkeys(checks, letter)).results for letter in ".X"}
    checkups = {
        f"n{number}": [Checkup(node=f"n{number}", at=NOW - 300 * age, results=results[".X"[number % 997 == 0]])
                       for age in range(3)]
        for number in range(10_000)
    }  # fmt: skip
    began = time.process_time()
    found = plan(assess(checkups, NOW, RULES), NOW, RULES)
    took = time.process_time() - began
    assert len(found[0]) + len(found[1]) == 11
    assert took < 2.0, took
