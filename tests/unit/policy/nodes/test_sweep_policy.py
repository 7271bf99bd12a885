"""What a sweep decides: tables of looks, states and lists; nothing is run."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.policy.node_health import (
    Checkup,
    HealthRules,
    NodeFact,
    ProbeResult,
    Status,
    SweepPlan,
    Visits,
    sweep_plan,
)
from slurmft.policy.suspicion import ManualEntry, Observation, Rules, State, standing
from slurmft.policy.verdict import Kind

NOW = 1_000_000.0
HEALTH, RULES = HealthRules(), Rules()
OK, BAD, UNKNOWN = Status.OK, Status.CRITICAL, Status.UNKNOWN
OURS = "slurmft: [node_problem] disk: no space"


def fact(node: str, state: str = "IDLE", reason: str = "") -> NodeFact:
    usable = state not in ("DRAINED", "DRAINING", "DOWN")
    return NodeFact(node=node, state=state, usable=usable, is_idle=state == "IDLE", reason=reason)


def looks(
    node: str, *statuses: Status, check: str = "disk", newest: float = NOW - 10, level: int = 1, apart_s: float = 60.0
) -> list[Checkup]:
    """Oldest first, a minute apart."""
    return [
        Checkup(
            node=node,
            at=newest - apart_s * age,
            level=level,
            context="cron" if level > 1 else "healthcheck",
            results=(ProbeResult(name=check, status=status, detail="no space"),),
        )
        for age, status in reversed(list(enumerate(reversed(statuses))))
    ]


def planned(facts: list[NodeFact], checkups: list[list[Checkup]], **changes: object) -> SweepPlan:
    given: dict = {"observations": (), "manual": (), "now": NOW, "health": HEALTH, "rules": RULES,
                   "visits": Visits()} | changes  # fmt: skip
    return sweep_plan({each.node: each for each in facts}, {each[0].node: each for each in checkups}, **given)


def names(found: object) -> list[str]:
    return [each.node for each in found]  # type: ignore[attr-defined]


def well(*numbers: int) -> tuple[list[NodeFact], list[list[Checkup]]]:
    return [fact(f"w{number}") for number in numbers], [looks(f"w{number}", OK, OK) for number in numbers]


def test_a_sick_node_is_excluded_and_to_be_drained():
    facts, healthy = well(1, 2, 3)
    plan = planned([fact("n1"), *facts], [looks("n1", BAD, BAD), *healthy])
    assert names(plan.excluded) == names(plan.drain) == ["n1"]
    assert plan.exit_code == 2
    (found,) = plan.observations
    assert standing([found], [], NOW, RULES)["n1"].state is State.EXCLUDED
    assert (found.kind, found.source, found.evidence) == (Kind.HEALTH, "sweep", "[node_problem] disk: no space")


def test_nodes_that_were_excluded_long_ago_are_drained_a_few_in_an_hour_as_well():
    """As after days of sweeps without ``--drain``."""
    sick = [f"n{number:02}" for number in range(20)]
    facts, healthy = well(*range(60))
    by_hand = [ManualEntry(node=node, who="me", reason="x", at=NOW - 86_400, until=None) for node in sick]
    checkups = [*(looks(node, BAD, BAD) for node in sick), *healthy]
    plan = planned([*map(fact, sick), *facts], checkups, manual=by_hand)
    assert names(plan.drain) == sick[: HEALTH.max_nodes_per_hour] and plan.excluded == ()
    assert [verdict.node for verdict, _ in plan.held_back] == sick[HEALTH.max_nodes_per_hour :]
    drained = [
        NodeFact(node=node, state="DRAINED", usable=False, is_idle=False, reason=OURS, since=since)
        for node, since in zip(sick, [NOW - 60, NOW - 3500, NOW - 3700, None], strict=False)
    ]
    rest = [*drained, *map(fact, sick[len(drained) :]), *facts]
    assert names(planned(rest, checkups, manual=by_hand).drain) == sick[4 : 4 + HEALTH.max_nodes_per_hour - 2]
    none = planned(rest, checkups, manual=by_hand, health=HealthRules(max_nodes_per_hour=0))
    assert none.drain == ()


def test_one_failure_changes_nothing_and_is_told():
    facts, healthy = well(1, 2, 3)
    plan = planned([fact("n1"), *facts], [looks("n1", OK, BAD), *healthy])
    assert (plan.observations, plan.drain, plan.exit_code) == ((), (), 1)


def test_an_excluded_node_is_not_held_against_twice_but_may_still_be_drained():
    facts, healthy = well(1, 2, 3)
    first = planned([fact("n1"), *facts], [looks("n1", BAD, BAD), *healthy])
    plan = planned([fact("n1"), *facts], [looks("n1", BAD, BAD, BAD), *healthy], observations=first.observations)
    assert (plan.observations, names(plan.drain)) == ((), ["n1"])


def test_the_same_failure_everywhere_is_one_problem_and_no_nodes():
    every = [f"n{number}" for number in range(10)]
    plan = planned([fact(node) for node in every], [looks(node, BAD, BAD, BAD) for node in every])
    assert (plan.observations, plan.drain, len(plan.cluster_problems), plan.exit_code) == ((), (), 1, 2)


def test_no_more_than_a_few_nodes_are_taken_out_in_an_hour():
    facts, healthy = well(*range(30))
    sick = [f"n{number}" for number in range(6)]
    everything = [fact(node) for node in sick] + facts, [looks(node, BAD, BAD) for node in sick] + healthy
    first = planned(*everything)
    assert (names(first.excluded), names(first.drain)) == (["n0", "n1", "n2", "n3"], ["n0", "n1", "n2", "n3"])
    assert [verdict.node for verdict, _ in first.held_back] == ["n4", "n5"]
    second = planned(*everything, observations=first.observations)
    assert (names(second.excluded), names(second.drain)) == ([], ["n0", "n1", "n2", "n3"])
    later = [each._replace(at=NOW - 4000) for each in first.observations]
    assert names(planned(*everything, observations=later).excluded) == ["n4", "n5"]


def test_what_somebody_has_drained_is_theirs():
    facts, healthy = well(1, 2, 3)
    for reason in ("bad cable", "slurmft is great", ""):
        plan = planned([fact("n1", "DRAINED", reason), *facts], [looks("n1", BAD, BAD), *healthy])
        assert (plan.observations, plan.drain, plan.resume) == ((), (), ())
        plan = planned([fact("n1", "DRAINED", reason), *facts], [looks("n1", OK, OK, OK), *healthy])
        assert plan.resume == ()


def test_a_node_that_we_drained_is_resumed_when_it_is_well_and_not_before():
    cases = [
        ("DRAINED", (BAD, OK), False),
        ("DRAINED", (BAD, OK, OK), True),
        ("DRAINING", (OK, OK), True),
        ("DOWN", (OK, OK), False),
        ("IDLE", (OK, OK), False),
        ("DRAINED", (OK, UNKNOWN), False),
        ("DRAINED", (BAD, BAD), False),
    ]
    for state, statuses, resumed in cases:
        facts, healthy = well(1, 2, 3)
        plan = planned([fact("n1", state, OURS), *facts], [looks("n1", *statuses), *healthy])
        assert (names(plan.resume) == ["n1"]) is resumed, (state, statuses)


def test_clean_looks_bring_an_excluded_node_back_over_probation():
    against = planned([fact("n1")], [looks("n1", BAD, BAD, newest=NOW - 600)]).observations
    states = []
    held = list(against)
    for number in range(1, 6):
        clean = looks("n1", *([OK] * number), newest=NOW - 300 + 60 * number)
        held += planned([fact("n1")], [clean], observations=held).observations
        states.append(standing(held, [], NOW, RULES)["n1"].state)
    assert states == [State.EXCLUDED, *[State.PROBATION] * 2, State.FREE, State.FREE]


def test_the_same_look_counts_once():
    against = planned([fact("n1")], [looks("n1", BAD, BAD, newest=NOW - 600)]).observations
    clean = looks("n1", OK, OK)
    first = planned([fact("n1")], [clean], observations=against).observations
    assert len(first) == 2
    assert planned([fact("n1")], [clean], observations=(*against, *first)).observations == ()


def test_checks_do_not_speak_against_wrong_results_or_people():
    wrong = Observation(kind=Kind.RERUN_PERSISTENT, node="n1", weight=2.0, at=NOW - 100, id="r")
    person = ManualEntry(node="n1", reason="mine", who="me", at=NOW)
    assert planned([fact("n1")], [looks("n1", OK, OK)], observations=[wrong]).observations == ()
    assert planned([fact("n1")], [looks("n1", OK, OK)], manual=[person]).observations == ()


def test_idle_nodes_are_tested_suspects_first_then_the_longest_unseen():
    facts = [fact("n1"), fact("n2"), fact("n3", "ALLOCATED"), fact("n4"), fact("n5"), fact("n6", "DRAINED", OURS)]
    alone = {node: node for node in ("n1", "n2", "n3", "n4", "n5")}
    checkups = [
        looks("n1", OK, OK, newest=NOW - 90_000, level=2),
        looks("n2", OK, BAD, newest=NOW - 700, level=2),
        looks("n3", OK, BAD, newest=NOW - 700, level=2),
        looks("n5", OK, OK, newest=NOW - 100, level=2),
    ]

    def tested(**given: object) -> tuple[tuple[str, ...], ...]:
        return planned(facts, checkups, visits=Visits(**{"switch_of": alone, **given})).test

    assert tested(at_most=9) == (("n2",), ("n4",), ("n1",))
    assert tested(at_most=1) == (("n2",),)
    assert tested(at_most=9, under_way=frozenset({"n2", "n4"})) == (("n1",),)
    assert tested(at_most=3, under_way=frozenset({"n2", "n4"})) == (("n1",),)
    assert tested(at_most=2, under_way=frozenset({"n2", "n4"})) == (), "so many are under way"
    assert tested(share=0.01) == (("n2",),), "one at least"
    assert tested(share=0.5) == (("n2",), ("n4",), ("n1",))
    assert tested() == ()


def test_pairs_are_of_one_switch_and_no_two_of_them_are_under_suspicion():
    facts = [fact(f"n{number}") for number in range(1, 8)]
    well_seen = [looks(f"n{number}", OK, OK, level=2) for number in (3, 4)]
    checkups = [
        looks("n1", OK, BAD, newest=NOW - 700, level=2),
        looks("n2", OK, BAD, newest=NOW - 700, level=2),
        *well_seen,
    ]
    switch_of = dict.fromkeys(("n1", "n2", "n3", "n4"), "s1") | dict.fromkeys(("n5", "n6"), "s2") | {"n7": "s3"}
    found = planned(facts, checkups, visits=Visits(at_most=9, switch_of=switch_of)).test
    assert found == (("n1", "n4"), ("n2", "n3"), ("n5", "n6"), ("n7",))
    assert planned(facts, checkups, visits=Visits(at_most=3, switch_of=switch_of)).test == (("n1", "n4"), ("n2",))


def test_short_looks_do_not_stand_for_a_long_one_and_a_node_that_was_away_is_tested_at_once():
    long = looks("n1", OK, newest=NOW - 20_000, level=2)
    short = looks("n1", *[OK] * 12, apart_s=300.0)
    away = [*long, *looks("n1", OK, OK, newest=NOW - 10_000), *looks("n1", OK, OK)]
    visits = Visits(at_most=1)
    assert planned([fact("n1")], [short], visits=visits).test == (("n1",),), "a new node"
    assert planned([fact("n1")], [[*long, *looks("n1", *[OK] * 60, apart_s=300.0)]], visits=visits).test == ()
    assert planned([fact("n1")], [away], visits=visits).test == (("n1",),)
    assert planned([fact("n1")], [[*away, *looks("n1", OK, newest=NOW - 5, level=2)]], visits=visits).test == ()


def test_a_node_is_resumed_only_when_the_check_that_drained_it_has_passed():
    drained = [fact("n1", "DRAINED", "slurmft: [hardware_problem] gpu-matmul: 3 rows are wrong")]
    assert planned(drained, [looks("n1", OK, OK)]).resume == (), "short looks do not compute"
    assert names(planned(drained, [looks("n1", OK, OK, check="gpu-matmul", level=2)]).resume) == ["n1"]


def test_results_of_nodes_that_slurm_does_not_name_are_left_out():
    plan = planned([fact("n1")], [looks("n1", OK, OK), looks("gone", BAD, BAD)])
    assert (plan.strangers, plan.observations, plan.exit_code) == (1, (), 0)


STATES = st.sampled_from(["IDLE", "ALLOCATED", "DRAINED", "DRAINING", "DOWN"])
REASONS = st.sampled_from(["", OURS, "slurmft", "someone's", "slurmft:"]) | st.text(max_size=20)
TIMES = st.floats(allow_nan=True, allow_infinity=True) | st.floats(NOW - 8000, NOW + 500)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[NodeFact], list[list[Checkup]]]:
    nodes = [f"n{number}" for number in range(draw(st.integers(1, 8)))]
    facts = [fact(node, draw(STATES), draw(REASONS)) for node in nodes]
    result = st.builds(ProbeResult, name=st.sampled_from(["disk", "gpu", ""]), status=st.sampled_from(Status),
                       detail=st.text(max_size=30))  # fmt: skip
    checkups = [
        [Checkup(node=node, at=draw(TIMES), results=tuple(draw(st.lists(result, max_size=3))))
         for _ in range(draw(st.integers(1, 4)))]
        for node in nodes
    ]  # fmt: skip
    return facts, checkups


@settings(max_examples=60, deadline=None)
@given(clusters())
def test_whatever_was_seen_only_what_n_of_m_looks_agree_on_is_drained_and_only_ours_is_resumed(cluster):
    facts, checkups = cluster
    plan = planned(facts, checkups)
    seen = {each.node: each for each in facts}
    for verdict in plan.drain:
        failing = [
            look for look in plan_looks(checkups, verdict.node)
            if any(result.name == verdict.check and result.status is BAD for result in look.results)
        ]  # fmt: skip
        assert len(failing) >= HEALTH.needed
        assert seen[verdict.node].usable
        assert verdict.reason.startswith("slurmft: [")
        assert verdict.reason.isprintable()
    assert len(plan.excluded) <= HEALTH.max_nodes_per_hour
    assert all(each.reason.startswith("slurmft: ") and not each.usable for each in plan.resume)
    assert not set(names(plan.drain)) & set(names(plan.resume))
    assert all(standing([each], [], NOW, RULES)[each.node].score >= 0 for each in plan.observations)


def plan_looks(checkups: list[list[Checkup]], node: str) -> list[Checkup]:
    return [look for each in checkups for look in each if look.node == node]


def test_a_sick_node_that_gets_its_own_list_entry_forgiven_is_judged_again():
    facts, healthy = well(1, 2, 3)
    against = planned([fact("n1"), *facts], [looks("n1", BAD, BAD), *healthy]).observations
    forgiven = replace_kind(against[0])
    plan = planned([fact("n1"), *facts], [looks("n1", BAD, BAD), *healthy], observations=(*against, forgiven))
    assert names(plan.excluded) == ["n1"], "it is still sick"


def replace_kind(each: Observation) -> Observation:
    return each._replace(kind=Kind.FORGIVEN, weight=-1_000_000.0, at=NOW, id="f", source="me")
