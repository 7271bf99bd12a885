"""What is held against nodes: weights, fading, corroboration, acquittals, exclusions by hand."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.policy.suspicion import (
    FADED,
    HALF_LIFE_HOURS,
    WEIGHTS,
    ManualEntry,
    Observation,
    Rules,
    State,
    observed,
    standing,
    suspect_gpus,
    weigh,
    worth_keeping,
)
from slurmft.policy.verdict import Evidence, Kind, Suspect

NOW = 1_800_000_000.0
HOUR, DAY = 3600.0, 86_400.0
RULES = Rules()
_IDS = iter(range(10**9))


def seen(
    kind: Kind | str, *, ago: float = 0.0, node: str = "n1", weight: float | None = None, **more: str
) -> Observation:
    weight = WEIGHTS[kind] if weight is None else weight
    return Observation(kind=kind, node=node, weight=weight, at=NOW - ago, id=more.pop("id", f"id{next(_IDS)}"), **more)


def state_of(*observations: Observation, manual: tuple[ManualEntry, ...] = (), at: float = NOW) -> tuple[str, float]:
    found = standing(observations, manual, at, RULES)
    return (str(found["n1"].state), round(found["n1"].score, 3)) if "n1" in found else ("unknown", 0.0)


def by_hand(**changes: object) -> ManualEntry:
    return ManualEntry(**{"node": "n1", "reason": "fan", "who": "me@here", "at": NOW - DAY, "until": None} | changes)


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        pytest.param([seen(Kind.RERUN_PERSISTENT)], ("excluded", 2.0), id="a proven error excludes by itself"),
        pytest.param([seen(Kind.RERUN_PERSISTENT, ago=29 * DAY)], ("excluded", 1.023), id="for about a month"),
        pytest.param([seen(Kind.RERUN_PERSISTENT, ago=31 * DAY)], ("probation", 0.977), id="then it is on probation"),
        pytest.param([seen(Kind.RERUN_PERSISTENT, ago=91 * DAY)], ("free", 0.244), id="then it is free"),
        pytest.param([seen(Kind.RERUN_TRANSIENT)], ("probation", 0.4), id="one transient error is weak"),
        pytest.param([seen(Kind.RERUN_TRANSIENT) for _ in range(5)], ("excluded", 2.0),
                     id="many of them are not"),
        pytest.param([seen(Kind.RERUN_UNDECIDED), seen(Kind.NODE_LOST)], ("excluded", 1.2), id="two kinds add up"),
        pytest.param([seen(Kind.CRASH, run="a"), seen(Kind.CRASH, run="a", ago=HOUR), seen(Kind.CRASH, run="a")],
                     ("probation", 0.25), id="a run that crashes again and again counts once"),
        pytest.param([seen(Kind.CRASH, run=run) for run in "abcd"], ("excluded", 1.0),
                     id="four runs that crash do not"),
        pytest.param([seen(Kind.CRASH) for _ in range(4)], ("excluded", 1.0),
                     id="nor crashes of runs that are unnamed"),
        pytest.param([seen(Kind.HANG, run="a"), seen(Kind.HANG, run="a", weight=1.5)], ("excluded", 1.5),
                     id="the strongest of one run counts"),
        pytest.param([seen(Kind.NODE_LOST, run="a"), seen(Kind.NODE_LOST, run="a")], ("excluded", 1.2),
                     id="a node lost twice under one run is lost twice"),
        pytest.param([seen(Kind.RERUN_UNDECIDED, ago=HOUR), seen(Kind.RERUN_ACQUITTED)], ("free", 0.0), id="acquitted"),
        pytest.param([seen(Kind.RERUN_ACQUITTED, ago=HOUR), seen(Kind.RERUN_UNDECIDED)], ("probation", 0.6),
                     id="an acquittal is no credit for later"),
        pytest.param([seen(Kind.RERUN_PERSISTENT), seen(Kind.RERUN_ACQUITTED)], ("excluded", 1.0),
                     id="an acquittal takes off its weight and no more"),
        pytest.param([seen(Kind.HEALTH, ago=HOUR), *[seen(Kind.PASSED) for _ in range(9)]], ("free", 0.0),
                     id="well again"),
        pytest.param([seen(Kind.RERUN_PERSISTENT, ago=HOUR), *[seen(Kind.PASSED) for _ in range(9)]],
                     ("excluded", 1.998), id="a passed check proves nothing about results"),
        pytest.param([seen(Kind.RERUN_PERSISTENT, ago=1), seen(Kind.FORGIVEN)], ("free", 0.0), id="forgiven"),
        pytest.param([seen(Kind.FORGIVEN, ago=1), seen(Kind.RERUN_PERSISTENT)], ("excluded", 2.0), id="and again"),
        pytest.param([seen(Kind.RERUN_PERSISTENT, ago=-DAY)], ("excluded", 2.0), id="a clock that is ahead"),
        pytest.param([seen(Kind.RERUN_PERSISTENT, ago=1e12)], ("free", 0.0), id="a clock that was never set"),
        pytest.param([seen("invented later", weight=1.0, ago=DAY)], ("probation", 0.5), id="a kind of a newer version"),
        pytest.param([seen(Kind.CRASH, weight=math.nan), seen(Kind.CRASH, weight=math.inf)], ("free", 0.0),
                     id="no numbers"),
        pytest.param([], ("unknown", 0.0), id="nothing"),
    ],
)  # fmt: skip
def test_what_observations_come_to(observations, expected):
    assert state_of(*observations) == expected


def test_alone_only_a_proven_error_excludes():
    alone = {kind for kind, weight in WEIGHTS.items() if weight >= RULES.threshold}
    assert alone == {Kind.RERUN_PERSISTENT, Kind.RECLAIMED, Kind.REPLICA_DIFFERS}
    assert WEIGHTS.keys() == set(Kind)
    assert HALF_LIFE_HOURS.keys() == {kind for kind, weight in WEIGHTS.items() if weight > 0}


@pytest.mark.parametrize(
    ("manual", "observations", "state", "until"),
    [
        ([by_hand()], [], "excluded", math.inf),
        ([by_hand(until=NOW + 5)], [], "excluded", NOW + 5),
        ([by_hand(until=NOW)], [], "unknown", None),
        ([by_hand(until=NOW - 1)], [seen(Kind.RERUN_TRANSIENT)], "probation", "later"),
        ([by_hand(until=NOW + 5)], [seen(Kind.RERUN_PERSISTENT)], "excluded", NOW + 30 * DAY),
        ([by_hand(until=NOW + 5)], [seen(Kind.RERUN_TRANSIENT)], "excluded", NOW + 5),
        ([by_hand(until=NOW + 5), by_hand(who="you", until=NOW + 9)], [], "excluded", NOW + 9),
        ([by_hand()], [seen(Kind.FORGIVEN)], "excluded", math.inf),
    ],
    ids=["for ever", "for a time", "over", "over, yet suspected", "score lasts longer", "hand over score", "two",
         "not by score"],
)  # fmt: skip
def test_exclusions_by_hand(manual, observations, state, until):
    found = standing(observations, manual, NOW, RULES).get("n1")
    assert (found.state if found else "unknown") == state
    if until == "later":
        assert found.until > NOW
    elif found:
        assert found.until == pytest.approx(until)
        assert found.by_hand == any(entry.holds(NOW) for entry in manual)


def test_the_reasons_name_what_counts():
    held = [seen(Kind.NODE_LOST), seen(Kind.NODE_LOST), seen(Kind.CRASH), seen(Kind.PASSED, ago=DAY)]
    found = standing(held, [by_hand()], NOW, RULES)
    assert found["n1"].reasons == ("fan (by me@here)", "2 x node lost 1.20", "crash 0.25")


half_lives = st.dictionaries(st.sampled_from(sorted(HALF_LIFE_HOURS)), st.floats(0.1, 10_000))
observation = st.builds(
    lambda kind, ago, node, run, weight, gpu: seen(kind, ago=ago, node=node, run=run, weight=weight, gpu=gpu),
    st.sampled_from(list(Kind)), st.floats(0, 300 * DAY), st.sampled_from(["n1", "n2"]),
    st.sampled_from(["", "a", "b"]), st.one_of(st.none(), st.floats(-3, 3)), st.sampled_from(["", "GPU-1", "GPU-2"]),
)  # fmt: skip
many = st.lists(observation, max_size=12)


@settings(deadline=None)
@given(many, half_lives, st.floats(0, 100 * DAY))
def test_suspicion_only_fades_by_itself_and_until_says_when(observations, lives, later):
    rules = Rules(half_life_hours=lives)
    before = standing(observations, [], NOW, rules)
    after = standing(observations, [], NOW + later, rules)
    for node, now in before.items():
        assert 0 <= after[node].score <= now.score + 1e-9
        if now.until is not None:
            level = rules.threshold if now.state is State.EXCLUDED else rules.probation
            at_the_end = standing(observations, [], now.until, rules)[node]
            assert at_the_end.score == pytest.approx(level, rel=1e-6) or now.score == level
            if now.until - NOW > 2:
                assert standing(observations, [], now.until - 1, rules)[node].state is now.state


@settings(deadline=None)
@given(many, st.randoms(use_true_random=False))
def test_order_and_other_nodes_do_not_matter(observations, random):
    shuffled = list(observations)
    random.shuffle(shuffled)
    both, other_way = (standing(each, [], NOW, RULES) for each in (observations, shuffled))
    alone = standing([each for each in observations if each.node == "n1"], [], NOW, RULES)
    for found in (other_way, both | alone):
        assert {node: (each.state, pytest.approx(each.score)) for node, each in found.items()} == {
            node: (each.state, each.score) for node, each in both.items()
        }


@settings(deadline=None)
@given(many, observation.filter(lambda each: each.weight < 0))
def test_what_speaks_for_a_node_never_harms_it(observations, favour):
    before = standing(observations, [], NOW, RULES)
    after = standing([*observations, favour], [], NOW, RULES)[favour.node]
    assert after.score <= (before[favour.node].score if favour.node in before else 0.0) + 1e-9


@settings(deadline=None)
@given(many, st.floats(0, 100 * DAY))
def test_what_is_forgotten_changes_nothing(observations, later):
    kept = worth_keeping(observations, NOW, RULES)
    assert set(kept) <= set(observations)
    before, after = (standing(each, [], NOW + later, RULES) for each in (observations, kept))
    for node, each in before.items():
        lost = FADED * RULES.probation * len(observations)
        assert each.score == pytest.approx(after[node].score if node in after else 0.0, abs=lost)


def test_what_has_faded_is_forgotten_and_favours_with_it():
    old = [seen(Kind.CRASH, ago=400 * DAY), seen(Kind.PASSED, ago=DAY)]
    acquitted = [seen(Kind.RERUN_UNDECIDED, node="n2", ago=HOUR), seen(Kind.RERUN_ACQUITTED, node="n2")]
    fresh = seen(Kind.RERUN_PERSISTENT, node="n3")
    assert worth_keeping([*old, *acquitted, fresh], NOW, RULES) == [fresh]


def test_each_observation_says_what_it_still_means():
    lost, acquitted, later = (
        seen(Kind.NODE_LOST, ago=3 * DAY),
        seen(Kind.RERUN_ACQUITTED, ago=2 * DAY),
        seen(Kind.CRASH),
    )
    first, second, third = weigh([later, acquitted, lost], NOW, RULES)
    assert (first.observation, first.value) == (lost, 0.0)
    assert second.value == pytest.approx(-0.6 * 2 ** (-1 / 3))
    assert (third.value, third.counts) == (0.25, True)


def test_a_gpu_is_suspect_by_its_own_score():
    held = [
        seen(Kind.RERUN_PERSISTENT, gpu="GPU-a"), seen(Kind.RERUN_TRANSIENT, gpu="GPU-b"), seen(Kind.RERUN_PERSISTENT),
        seen(Kind.RERUN_PERSISTENT, gpu="GPU-c", ago=1), seen(Kind.RERUN_ACQUITTED, gpu="GPU-c", weight=-2.0),
        seen(Kind.RERUN_PERSISTENT, gpu="GPU-d", node="n2", ago=1), seen(Kind.FORGIVEN, node="n2"),
    ]  # fmt: skip
    assert suspect_gpus(held, NOW, RULES) == {"GPU-a": pytest.approx(2.0)}


def test_evidence_becomes_an_observation_with_an_id_of_its_own():
    one = Evidence(kind=Kind.HANG, suspect=Suspect(node="n1", gpu="GPU-1", rank=3), message="stuck", at=NOW, step=7)
    facts = {"source": "supervisor", "run": "r", "job": "12"}
    made = observed(one, **facts, where="/runs/r/verdicts/x")
    assert (made.weight, made.at, made.evidence) == (WEIGHTS[Kind.HANG], NOW, "stuck (/runs/r/verdicts/x)")
    assert observed(one, **facts).id == made.id
    others = [
        Suspect(node="n2", gpu="GPU-1", rank=3),
        Suspect(node="n1", gpu="GPU-2", rank=3),
        Suspect(node="n1", rank=3),
    ]
    ids = {observed(Evidence(kind=Kind.HANG, suspect=each, message="", at=NOW, step=7), **facts).id for each in others}
    assert len(ids | {made.id}) == 4
    assert observed(one, **facts, weight=1.5).weight == 1.5


def test_ten_thousand_nodes_are_judged_at_once():
    held = [seen(Kind.RERUN_PERSISTENT if n % 2 else Kind.CRASH, node=f"n{n}", ago=n) for n in range(10_000)]
    began = time.process_time()
    found = standing(held, [], NOW, RULES)
    assert time.process_time() - began < 2
    assert sum(each.state is State.EXCLUDED for each in found.values()) == 5000


def test_a_node_that_passes_its_check_every_hour_costs_nothing():
    held = [seen(Kind.PASSED, ago=n * HOUR) for n in range(5000)] + [seen(Kind.RERUN_PERSISTENT, ago=9 * DAY)]
    began = time.process_time()
    assert state_of(*held) == ("excluded", pytest.approx(1.625, abs=0.001))
    assert time.process_time() - began < 2
    assert [each.kind for each in worth_keeping(held, NOW, RULES)] == [Kind.RERUN_PERSISTENT]
