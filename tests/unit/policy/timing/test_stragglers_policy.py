"""Scores, cohorts, k of n, and whether a move pays: tables of values, and what must hold for all of them."""

import math

import numpy as np
import pytest
from drawn import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.stragglers import (
    Limits,
    ReportShape,
    Scores,
    StragglerVerdict,
    Window,
    accused,
    convicted,
    pays,
    report,
    score,
    step_slowdown,
)
from slurmft.policy.verdict import Kind

NAN, INF = math.nan, math.inf


def scores_of(
    work: list[float] | list[list[float]], *, cohorts: list[int] | None = None, best: list[float] | None = None,
    counts: list[int] | int = 10, limits: Limits | None = None,
) -> Scores:  # fmt: skip
    medians = np.array(work, dtype=float)
    medians = medians.reshape(len(work), -1) if work else np.zeros((0, 1))
    samples = np.broadcast_to(np.array(counts, dtype=np.int64).reshape(-1, 1), medians.shape).copy()
    window = Window(
        medians_s=medians,
        counts=samples,
        cohorts=np.array(cohorts if cohorts is not None else [0] * len(medians), dtype=np.int64),
        best_s=np.array(best if best is not None else [NAN] * len(medians), dtype=float),
    )
    return score(window, limits or Limits())


def slow(scores: Scores) -> list[int]:
    return np.flatnonzero(scores.slow).tolist()


@pytest.mark.parametrize(
    ("work", "accuses"),
    [
        pytest.param([1, 1, 1, 1], [], id="all alike"),
        pytest.param([1, 1, 2, 1], [2], id="one is slow"),
        pytest.param([1, 1, 1.4, 1], [], id="one is slow, but not enough"),
        pytest.param([1, 1, 0.1, 1], [], id="one is fast"),
        pytest.param([1, 2], [], id="of two nobody knows"),
        pytest.param([1, 1, 2, 2], [], id="two halves"),
        pytest.param([6, 6, 1, 1], [0, 1], id="one of two nodes is six times slower"),
        pytest.param([1, 1.02, 0.98, 2.6, 2.5, 2.7], [3, 4, 5], id="halves far apart, with noise"),
        pytest.param([1, 3], [1], id="one of two ranks is three times slower"),
        pytest.param([1, 1.9, 3.7, 7], [], id="no two halves: all differ"),
        pytest.param([1, 1, 1, 2, 2], [3, 4], id="most of them are faster"),
        pytest.param([1, 1, 1, 1, 1, 2, 3, 1], [5, 6], id="two of eight"),
        pytest.param([1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 6.0], [], id="all differ"),
        pytest.param([1, NAN, 2, 1, 1], [2], id="one is missing"),
        pytest.param([1, NAN, NAN, NAN, 2], [], id="most are missing"),
        pytest.param([NAN] * 4, [], id="all are missing"),
        pytest.param([1, INF, 1, 1, 0, -3], [], id="no times at all accuse nobody"),
        pytest.param([1e-3, 1e-3, 4e-3, 1e-3], [], id="steps of a millisecond"),
        pytest.param([1e300, 1e300, 1.7e308, 1e300], [2], id="huge"),
        pytest.param([5e-324, 5e-324, 1, 5e-324], [2], id="tiny"),
        pytest.param([], [], id="no ranks"),
    ],
)
def test_whom_the_cohort_accuses(work, accuses):
    found = scores_of(work)
    assert slow(found) == accuses
    told = found.relative[np.isfinite(found.relative)]
    assert ((told > 0) & (told <= 1)).all()


def test_the_score_is_the_reference_by_the_time():
    found = scores_of([1.0, 1.25, 2.0, 0.5, 1.0])
    assert found.relative.tolist() == [1.0, 0.8, 0.5, 1.0, 1.0]
    assert found.behind_s.tolist() == [0.0, 0.25, 1.0, -0.5, 0.0]


def test_several_sections_weigh_by_their_time():
    found = scores_of([[1.0, 0.01], [1.0, 0.01], [1.0, 0.04], [1.0, 0.01]])
    assert found.sections[2].tolist() == [1.0, 0.25]
    assert found.relative[2] == pytest.approx(1.01 / 1.04)
    assert slow(found) == []


def test_a_section_that_one_rank_has_alone_says_nothing():
    found = scores_of([[1.0, NAN], [1.0, NAN], [1.0, 5.0], [1.0, NAN]])
    assert found.relative.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("cohorts", "accuses"),
    [
        pytest.param([0, 0, 0, 1, 1, 1], [], id="a stage is compared with itself"),
        pytest.param([0, 0, 0, -1, -1, -1], [], id="the others are unknown"),
        pytest.param([0, 1, 2, 3, 4, 5], [], id="everybody has a role of his own"),
    ],
)
def test_equals_are_compared_with_equals(cohorts, accuses):
    assert slow(scores_of([1, 1, 1, 3, 3, 3], cohorts=cohorts)) == accuses


def test_a_slow_rank_of_a_slow_stage_is_found():
    assert slow(scores_of([1, 1, 1, 3, 3, 9], cohorts=[0, 0, 0, 1, 1, 1])) == [5]


def test_too_few_samples_accuse_nobody():
    assert slow(scores_of([1, 1, 9, 1], counts=[10, 10, 2, 10])) == []
    assert scores_of([1, 1, 9, 1], counts=[10, 10, 2, 10]).covered.tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("work", "best", "accuses"),
    [
        pytest.param([1.0, 2.0], [1.0, 1.0], [1], id="of two nodes one is slower than it was"),
        pytest.param([2.0, 2.0], [1.0, 1.0], [], id="both are: the work has changed"),
        pytest.param([2.0, 3.9], [1.0, 1.0], [1], id="both are, one more"),
        pytest.param([3.0], [1.0], [], id="alone nobody can tell"),
        pytest.param([2.0, 1.9, 1.2], [1.0, 1.9, 1.2], [], id="slower than it was, but as fast as the others"),
        pytest.param([1.0, 1.0, 2.0, 2.0], [1.0] * 4, [2, 3], id="half of them are"),
        pytest.param([1.0, 2.0], [NAN, 1.0], [], id="no past to compare the others with"),
        pytest.param([1.0, 2.0], [1.0, 0.0], [], id="a best time of zero is none"),
        pytest.param([1.0, 1.3], [1.0, 1.0], [], id="not slow enough"),
        pytest.param([0.001, 0.004], [0.001, 0.001], [], id="steps of a millisecond"),
    ],
)
def test_whom_its_own_past_accuses(work, best, accuses):
    assert slow(scores_of(work, best=best)) == accuses


def test_either_comparison_can_be_switched_off():
    work, best = [1.0, 1.0, 1.0, 3.0], [1.0, 1.0, 1.0, 1.0]
    both = scores_of(work, best=best)
    assert (both.slow_relative[3], both.slow_individual[3]) == (True, True)
    off = scores_of(work, best=best, limits=Limits(relative=0, individual=0))
    assert slow(off) == []


times = st.one_of(st.floats(), st.floats(0.01, 100.0), st.just(NAN))


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.tuples(times, times, st.integers(-1, 2), times, st.integers(0, 5)), min_size=1, max_size=24),
)
@example([(NAN, NAN, 1, NAN, 0), (2.0, NAN, 0, 0.0, 3), (2.0, 0.01, 0, NAN, 3), (NAN, NAN, 1, NAN, 2),
          (0.0, 1.0, 0, 1.4e-45, 3), (1.0, 1.0, 0, NAN, 3), (1.0, 1.0, 0, 6e-08, 3),
          (1.0, 9e15, 0, 0.01, 3)])  # fmt: skip
def test_whatever_was_measured_scores_are_scores_and_most_are_innocent(rows):
    window = Window(
        medians_s=np.array([row[:2] for row in rows]),
        counts=np.array([[row[4]] * 2 for row in rows], dtype=np.int64),
        cohorts=np.array([row[2] for row in rows], dtype=np.int64),
        best_s=np.array([row[3] for row in rows]),
    )
    found = score(window, Limits())
    for values in (found.relative, found.individual, found.sections):
        told = values[np.isfinite(values)]
        assert ((told >= 0) & (told <= 1)).all()
    for cohort in set(window.cohorts[window.cohorts >= 0].tolist()):
        members = window.cohorts == cohort
        assert 2 * found.slow_relative[members].sum() <= members.sum()
    unmeasured = ~(np.isfinite(window.medians_s) & (window.medians_s > 0)).any(axis=1)
    assert not found.slow[unmeasured].any()
    assert isinstance(report(found, ["n"] * len(rows), ["a", "b"], ReportShape()), str)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.floats(1.0, 1.3), min_size=3, max_size=20), st.floats(1e-6, 1.0), st.data())
def test_a_fast_outlier_accuses_nobody(work, fast, data):
    work[data.draw(st.integers(0, len(work) - 1))] = fast
    assert slow(scores_of(work)) == []


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.floats(1.0, 1.1), min_size=3, max_size=20), st.floats(2.0, 1e6), st.data())
def test_a_slow_outlier_is_the_only_one_accused(work, factor, data):
    who = data.draw(st.integers(0, len(work) - 1))
    work[who] *= factor
    assert slow(scores_of(work)) == [who]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([], ([], False), id="nobody"),
        pytest.param([0], ([0], False), id="one rank"),
        pytest.param([0, 1], ([0], False), id="both of a node"),
        pytest.param([0, 2], ([], True), id="one of two nodes each: what they share"),
        pytest.param([6], ([3], False), id="the last"),
    ],
)
def test_which_nodes_are_accused(ranks, expected):
    flags = np.zeros(8, np.bool_)
    flags[ranks] = True
    assert accused(flags, np.arange(8) // 2) == expected


def test_ranks_whose_node_is_unknown_accuse_no_node():
    assert accused(np.array([True, False, False]), np.array([-1, 0, 1])) == ([], False)


@of_each(
    outcomes__verdict=[
        ("", False),
        ("ss", False),
        ("sss", True),
        ("s.s.s", True),
        ("s..s.s", False),
        ("sss...", False),
        (".....", False),
    ]
)
def test_three_of_the_newest_five(outcomes, verdict):
    assert convicted([each == "s" for each in outcomes], needed=3, considered=5) is verdict


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 6), st.integers(1, 6))
def test_k_of_n_looks_at_the_newest_only(outcomes, needed, considered):
    expected = convicted(outcomes, needed=needed, considered=considered)
    assert convicted([True, *outcomes], needed=needed, considered=considered) in (
        {expected} if len(outcomes) >= considered else {True, False}
    )
    assert not convicted(outcomes, needed=len(outcomes) + 1, considered=considered)


@of_each(
    step_s__excess_s__expected=[
        (2.0, 1.0, 2.0),
        (1.0, 0.2, 1.25),
        (1.0, 0.0, 1.0),
        (1.0, 1.0, 1.0),
        (1.0, 2.0, 1.0),
        (NAN, 1.0, 1.0),
        (1, INF, 1),
    ]
)
def test_how_much_longer_a_step_takes(step_s, excess_s, expected):
    assert step_slowdown(step_s=step_s, excess_s=excess_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("slowdown", "remaining_s", "nodes", "cost", "worth", "gain"),
    [
        pytest.param(2.0, 3600, 4, 300, True, 7200, id="half of four hours"),
        pytest.param(2.0, 500, 4, 300, False, 1000, id="nearly done"),
        pytest.param(1.0, 1e6, 4, 300, False, 0, id="not slower"),
        pytest.param(0.5, 1e6, 4, 300, False, 0, id="faster"),
        pytest.param(1.01, 1e6, 4, 300, True, 39604, id="a little for long"),
        pytest.param(2.0, NAN, 4, 300, False, 0, id="unknown end"),
        pytest.param(NAN, 1e6, 4, 300, False, 0, id="unknown slowdown"),
        pytest.param(INF, 1e6, 4, 300, False, 0, id="endless slowdown"),
        pytest.param(2.0, -5, 4, 300, False, 0, id="past the end"),
        pytest.param(2.0, 600, 1, 300, False, 300, id="just as much"),
    ],
)
def test_whether_a_move_pays(slowdown, remaining_s, nodes, cost, worth, gain):
    found = pays(slowdown=slowdown, remaining_s=remaining_s, nodes=nodes, requeue_cost_s=cost)
    assert (found.worth, round(found.gain_s), found.cost_s) == (worth, gain, cost * nodes)
    if found.gain_s:
        assert f"{found.gain_s:.0f}" in found.reason
        assert f"{found.cost_s:.0f}" in found.reason


def test_the_report_has_the_known_lines():
    work = [1.0] * 20
    work[7], work[9], work[3] = 4.0, 3.0, 1.05
    nodes = [f"n{rank // 4}" for rank in range(20)]
    best = [1.0] * 20
    lines = report(scores_of(work, best=best), nodes, ["own work"], ReportShape(worst=3)).split("\n")
    assert lines == [
        "GPU relative performance:",
        " Worst performing 3/20 ranks:",
        "  Rank=7 Node=n1 Score=0.25",
        "  Rank=9 Node=n2 Score=0.33",
        "  Rank=3 Node=n0 Score=0.95",
        " Best performing 3/20 ranks:",
        "  Rank=0 Node=n0 Score=1.00",
        "  Rank=1 Node=n0 Score=1.00",
        "  Rank=2 Node=n0 Score=1.00",
        "STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: [7, 9]",
        "GPU individual performance:",
        " Worst performing 3/20 ranks:",
        "  Rank=7 Node=n1 Score=0.25",
        "  Rank=9 Node=n2 Score=0.33",
        "  Rank=3 Node=n0 Score=0.95",
        " Best performing 3/20 ranks:",
        "  Rank=0 Node=n0 Score=1.00",
        "  Rank=1 Node=n0 Score=1.00",
        "  Rank=2 Node=n0 Score=1.00",
        "STRAGGLER DETECTION WARNING: Some GPUs performance dropped. Affected ranks: [7, 9]",
        "Section relative performance:",
        '  Section="own work" Rank=7 Node=n1 Score=0.25',
    ]


@pytest.mark.parametrize(
    ("worst", "headings"),
    [
        (2, [" Worst performing 2/5 ranks:", " Best performing 2/5 ranks:"]),
        (4, [" Worst performing 4/5 ranks:", " Best performing 1/5 ranks:"]),
        (5, [" Worst performing 5/5 ranks:"]),
        (9, [" Worst performing 5/5 ranks:"]),
    ],
)
def test_the_best_ranks_are_shown_too_and_none_twice(worst, headings):
    shape = ReportShape(worst=worst, individual=False)
    lines = report(scores_of([1.0, 2.0, 1.0, 1.5, 1.25]), ["a"] * 5, [], shape).split("\n")
    assert [line for line in lines if "performing" in line] == headings
    ranks = [line for line in lines if line.startswith("  Rank=")]
    assert len(ranks) == len(set(ranks)) == min(5, 2 * worst)
    assert ranks[0].startswith("  Rank=1 ")
    scores = [float(line.rpartition("=")[2]) for line in ranks]
    assert scores[:worst] == sorted(scores[:worst]) and scores[worst:] == sorted(scores[worst:], reverse=True)


def test_the_report_tells_who_is_missing():
    text = report(scores_of([1.0, NAN, 1.0, 1.0, 1.0]), ["a"] * 5, ["own work"], ReportShape(device="CPU"))
    assert " Worst performing 4/4 ranks:" in text
    assert " Partial coverage: 4/5 ranks could be compared; not compared: [1]" in text
    assert "CPU relative performance:" in text


def test_a_report_of_many_stays_short():
    text = report(scores_of([NAN] * 1000), ["a"] * 1000, ["own work"], ReportShape())
    assert "and 980 more" in text
    assert len(text) < 500


def test_a_verdict_is_evidence_against_nodes_unless_it_is_the_ranks_own_work():
    verdict = StragglerVerdict(
        nodes=("n1", "n2"), ranks=(3,), score=0.4, work_ratio=2.5, slowdown=1.5, step_s=1.0, text="slow"
    )
    found = verdict.evidence(at=5.0, step=7)
    assert [(each.kind, each.suspect.node, each.at, each.step) for each in found] == [
        (Kind.STRAGGLER, "n1", 5.0, 7), (Kind.STRAGGLER, "n2", 5.0, 7),
    ]  # fmt: skip
    own = StragglerVerdict(
        nodes=("n1",), ranks=(3,), score=0.4, work_ratio=2.5, slowdown=1.5, step_s=1.0, text="slow", follows_rank=True
    )
    assert own.evidence(at=5.0) == []


@pytest.mark.parametrize("sigma", [0.2, 0.4, 0.8])
def test_noise_convicts_nobody_however_large_it_is(sigma):
    """256 ranks on 64 nodes whose speeds vary from window to window, with a long tail upwards."""
    random = np.random.default_rng(3)
    node_of_rank, best_s = np.repeat(np.arange(64), 4), np.full((256, 3), np.nan)
    outcomes: list[list[int]] = []
    for _ in range(40):
        of_node = np.repeat(np.exp(random.normal(0, sigma, 64)), 4)
        medians_s = 0.1 * of_node * np.exp(random.normal(0, 0.1, 256))
        window = Window(
            medians_s=medians_s[:, None], counts=np.full((256, 1), 9), cohorts=np.zeros(256, np.int64),
            best_s=best_s[:, -1], judged=(0,),
        )  # fmt: skip
        scores = score(window, Limits())
        outcomes.append(accused(scores.slow, node_of_rank)[0])
        best_s = np.sort(np.column_stack([best_s, scores.work_s]), axis=1)[:, :3]
    newest = [[node in each for each in outcomes[first : first + 5]] for first in range(36) for node in range(64)]
    assert not any(convicted(windows, needed=3, considered=5) for windows in newest)


def test_half_of_a_run_that_is_far_slower_has_a_score_that_says_so():
    found = scores_of([6, 6, 1, 1])
    assert found.relative.tolist() == pytest.approx([1 / 6, 1 / 6, 1, 1])
    assert accused(found.slow, np.array([0, 0, 1, 1])) == ([0], False)


def test_with_no_scores_to_print_only_warnings_are_reported():
    nothing = ReportShape(worst=0)
    assert report(scores_of([1, 1, 1, 1]), ["n"] * 4, ["a"], nothing) == ""
    text = report(scores_of([1, 1, 9, 1]), ["n"] * 4, ["a"], nothing)
    assert text == "STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: [2]"
