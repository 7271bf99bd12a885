"""The arithmetic of a stop's time: what it needs, what Slurm leaves, how much is left by which clock."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.stop import (
    NOTICE_S,
    REQUEUE_COST_S,
    SLURM_JITTER_S,
    Finding,
    GraceNeed,
    GraceOffer,
    JobTimes,
    Preempts,
    Severity,
    SlurmClock,
    cause_of_signal,
    findings,
    preempts,
    seconds_for_stop,
    seconds_in_kill_wait,
)
from slurmft.policy.verdict import Cause

START, LIMIT_S, LEAD_S, TIMEOUT_S, HOUR_S = 10_000.0, 7200.0, 120.0, 600.0, 3600.0
AT_LIMIT = JobTimes(start=START, end=START + LIMIT_S, limit_s=LIMIT_S)
PREEMPTED = JobTimes(start=START, end=START + 520.0, limit_s=LIMIT_S, preempted=START + 500.0)
UNKNOWN = JobTimes(start=None, end=None, limit_s=None)


# the time of a preemption


@pytest.mark.parametrize(
    ("times", "grace_s"),
    [
        pytest.param(PREEMPTED, 20.0, id="end moved to the end of the grace"),
        pytest.param(AT_LIMIT, None, id="never preempted"),
        pytest.param(UNKNOWN, None, id="Slurm does not answer"),
        pytest.param(JobTimes(start=START, end=START + LIMIT_S, limit_s=LIMIT_S, preempted=START + 9), None,
                     id="suspended by the gang scheduler: the end stayed"),
        pytest.param(JobTimes(start=START, end=START + 50, limit_s=LIMIT_S, preempted=START - 400), None,
                     id="left over from the start before"),
        pytest.param(JobTimes(start=START, end=START + 500, limit_s=LIMIT_S, preempted=START + 520), None,
                     id="overwritten when the grace was over"),
        pytest.param(JobTimes(start=START, end=START + 500, limit_s=None, preempted=START + 470), 30.0, id="no limit"),
    ],
)  # fmt: skip
def test_the_grace_is_told_by_slurms_own_times(times, grace_s):
    assert times.grace_s == grace_s


# how much is left


@pytest.mark.parametrize("wrong_by_s", [0.0, -HOUR_S, HOUR_S, -1e9, 1e9])
def test_no_clock_can_make_a_preemption_shorter_or_longer_than_its_grace(wrong_by_s):
    now = START + 500.0 + wrong_by_s
    left_s = seconds_for_stop(PREEMPTED, cause=Cause.PREEMPTED, now=now, lead_s=LEAD_S, timeout_s=TIMEOUT_S)
    assert 20.0 - NOTICE_S - REQUEUE_COST_S <= left_s <= 20.0 - REQUEUE_COST_S


@pytest.mark.parametrize("wrong_by_s", [0.0, -HOUR_S, HOUR_S, -1e9, 1e9])
def test_no_clock_can_make_a_time_limit_come_earlier_than_its_lead(wrong_by_s):
    now = START + LIMIT_S - LEAD_S - 10.0 + wrong_by_s
    left_s = seconds_for_stop(AT_LIMIT, cause=Cause.TIME_LIMIT, now=now, lead_s=LEAD_S, timeout_s=TIMEOUT_S)
    assert LEAD_S - REQUEUE_COST_S <= left_s <= LEAD_S + SLURM_JITTER_S - REQUEUE_COST_S


@pytest.mark.parametrize(
    ("times", "cause", "now", "left_s"),
    [
        pytest.param(AT_LIMIT, Cause.TIME_LIMIT, START + LIMIT_S - 130, 127.0, id="10 s early: they are used"),
        pytest.param(PREEMPTED, Cause.PREEMPTED, START + 502, 15.0, id="noticed after 2 s"),
        pytest.param(JobTimes(start=START, end=START + 60, limit_s=60.0), Cause.TIME_LIMIT, START + 20, 37.0,
                     id="a limit shorter than the lead: only the clock can tell"),
        pytest.param(JobTimes(start=START, end=START + 60, limit_s=60.0), Cause.TIME_LIMIT, START + 999, 1.0,
                     id="and it can be wrong, but never below a second"),
        pytest.param(AT_LIMIT, Cause.SIGNALLED, START + 100, TIMEOUT_S - 3, id="by hand, nothing hurries"),
        pytest.param(AT_LIMIT, Cause.SIGNALLED, START + LIMIT_S - 300, 297.0, id="by hand, the limit is near"),
        pytest.param(UNKNOWN, Cause.SIGNALLED, START, TIMEOUT_S - 3, id="Slurm does not answer"),
        pytest.param(UNKNOWN, Cause.PREEMPTED, START, TIMEOUT_S - 3, id="a machine of one's own"),
    ],
)  # fmt: skip
def test_how_much_time_a_stop_has(times, cause, now, left_s):
    assert seconds_for_stop(times, cause=cause, now=now, lead_s=LEAD_S, timeout_s=TIMEOUT_S) == left_s


SECONDS = st.one_of(st.none(), st.floats(0, 1e10))


@given(
    st.builds(JobTimes, start=SECONDS, end=SECONDS, limit_s=SECONDS, preempted=SECONDS),
    st.sampled_from(list(Cause)), st.floats(0, 1e10), st.floats(1, 65535), st.floats(0.1, 1e6),
)  # fmt: skip
def test_whatever_slurm_and_the_clock_say_there_is_a_second_and_an_end(times, cause, now, lead_s, timeout_s):
    left_s = seconds_for_stop(times, cause=cause, now=now, lead_s=lead_s, timeout_s=timeout_s)
    assert 1.0 <= left_s <= max(1.0, timeout_s, lead_s + SLURM_JITTER_S, times.grace_s or 0.0)


def test_slurms_clock_goes_on_when_the_nodes_own_is_set():
    clock = SlurmClock(unix_s=5000.0, monotonic_s=70.0)
    assert clock.at(82.5) == 5012.5


def test_a_preemption_in_the_last_seconds_is_the_time_limits():
    """Its end stays where it was, and less is left than the lead."""
    times = JobTimes(start=START, end=START + LIMIT_S, limit_s=LIMIT_S, preempted=START + LIMIT_S - 10)
    assert cause_of_signal(times, now=START + LIMIT_S - 10, lead_s=LEAD_S) is Cause.TIME_LIMIT


@pytest.mark.parametrize(("kill_wait_s", "left_s"), [(30.0, 27.0), (5.0, 2.0), (1.0, 1.0)])
def test_what_is_left_of_killwait(kill_wait_s, left_s):
    assert seconds_in_kill_wait(kill_wait_s) == left_s


# who is preempted


@of_each(
    kind__mode__tier__tiers__what=[
        ("preempt/partition_prio", "REQUEUE", 1, [1, 10], Preempts.BY_PARTITION),
        ("preempt/partition_prio", "CANCEL", 1, [1, 10], Preempts.BY_PARTITION),
        ("preempt/partition_prio", "GANG,REQUEUE", 1, [1, 10], Preempts.BY_PARTITION),
        ("preempt/partition_prio", "REQUEUE", 10, [1, 10], Preempts.NEVER),
        ("preempt/partition_prio", "REQUEUE", None, [], Preempts.BY_PARTITION),
        ("preempt/partition_prio", "OFF", 1, [1, 10], Preempts.NEVER),
        ("preempt/partition_prio", "GANG,SUSPEND", 1, [1, 10], Preempts.NEVER),
        ("preempt/partition_prio", "SUSPEND", 1, [1, 10], Preempts.NEVER),
        ("preempt/partition_prio", "GANG", 1, [1, 10], Preempts.NEVER),
        ("preempt/none", "REQUEUE", 1, [1, 10], Preempts.NEVER),
        ("preempt/qos", "REQUEUE", 1, [1], Preempts.BY_QOS),
        ("preempt/qos", "WITHIN,CANCEL", 1, [1], Preempts.BY_QOS),
        ("preempt/qos", "OFF", 1, [1], Preempts.NEVER),
        ("", "REQUEUE", 1, [1, 10], Preempts.BY_PARTITION),
        ("", "", None, [], Preempts.UNKNOWN),
        ("preempt/partition_prio", "", 1, [1, 10], Preempts.UNKNOWN),
    ]
)
def test_what_a_preemption_does(kind, mode, tier, tiers, what):
    assert preempts(kind=kind, mode=mode, tier=tier, tiers=tiers) is what


# the budget


def need(step: float | None = 0.8, save: float | None = 0.3, *, cut_off: bool = False, start: float | None = 10.0,
         interval: int = 100) -> GraceNeed:  # fmt: skip
    return GraceNeed(longest_step_s=step, save_s=save, cut_off=cut_off, start_s=start, step_s=0.5,
                     interval_steps=interval)  # fmt: skip


def offer(*, lead: float = 120.0, limit: float | None = 36_000.0, what: Preempts = Preempts.BY_PARTITION,
          grace: float | None = 20.0, kill_wait: float | None = 30.0) -> GraceOffer:  # fmt: skip
    return GraceOffer(lead_s=lead, limit_s=limit, partition="low", preempts=what, grace_s=grace, kill_wait_s=kill_wait)


def warnings(found: list[Finding]) -> list[str]:
    return [finding.text for finding in found if finding.severity is Severity.WARNING]


@pytest.mark.parametrize(
    ("needs", "offers", "text"),
    [
        (need(), [offer()],
         "a stop needs 4.1 s (longest step 0.8, p99 save 0.3, requeue 3) and has 120 s at the time limit, "
         "20 s at a preemption"),
        (need(), [offer(limit=math.inf, what=Preempts.NEVER)],
         "a stop needs 4.1 s (longest step 0.8, p99 save 0.3, requeue 3) and is only requested by hand"),
        (need(), [offer(what=Preempts.BY_QOS)],
         "a stop needs 4.1 s (longest step 0.8, p99 save 0.3, requeue 3) and has 120 s at the time limit, "
         "the GraceTime of its QOS at a preemption (sacctmgr show qos format=Name,GraceTime)"),
        (need(None, None), [offer(what=Preempts.UNKNOWN, grace=None, limit=None)],
         "longest step and save are unknown until a run of this workload has saved; "
         "a stop has 120 s at the time limit, an unknown time at a preemption"),
        (need(), [offer(), offer(grace=60.0)],
         "a stop needs 4.1 s (longest step 0.8, p99 save 0.3, requeue 3) and has 120 s at the time limit, "
         "20 s at a preemption"),
    ],
)  # fmt: skip
def test_a_comfortable_budget_is_one_line(needs, offers, text):
    assert findings(needs, offers) == [Finding(Severity.NOTE, text)]


@pytest.mark.parametrize(
    ("needs", "offers", "texts"),
    [
        pytest.param(need(100, 37), [offer(what=Preempts.NEVER)],
                     ["a stop needs 140 s (longest step 100, p99 save 37, requeue 3)", "only 120 s before the time",
                      "preemption.signal_lead_s to at least 150"], id="lead too short"),
        pytest.param(need(), [offer(limit=60)],
                     ["time limit of 60 s is too short", "at the very start", "start-up, first step and a save take "
                      "10.3 s", "slurm.time to at least 3 minutes"], id="the limit is shorter than the lead"),
        pytest.param(need(start=None, save=None), [offer(limit=140)],
                     ["time limit of 140 s is too short", "as early as 150 s before it", "at least 3 minutes"],
                     id="the limit is no longer than lead and jitter"),
        pytest.param(need(start=600.0), [offer(limit=720)],
                     ["time limit of 720 s", "a save take 600.3 s", "at least 13 minutes"], id="a long start-up"),
        pytest.param(need(), [offer(grace=0.0)],
                     ["partition low leaves no grace (GraceTime 0)", "KillWait alone, 30 s",
                      "up to 100 steps (50 s of work) are done again"], id="no grace"),
        pytest.param(need(None, None), [offer(grace=0.0, kill_wait=None)], ["GraceTime 0", "KillWait alone, and"],
                     id="no grace, and nothing else known"),
        pytest.param(need(interval=0), [offer(grace=0.0)],
                     ["everything since the newest save of a stop is done again (checkpoint.interval_steps is 0)"],
                     id="no grace, no periodic checkpoints"),
        pytest.param(need(3.0, 15.0), [offer()],
                     ["a stop needs 21 s (longest step 3, p99 save 15, requeue 3)", "partition low leaves 20 s",
                      "up to 100 steps"], id="a save longer than the grace"),
        pytest.param(need(3.0, 10.0, cut_off=True), [offer()],
                     ["needs at least 16 s (longest step 3, a save that was cut off at 10, requeue 3)", "leaves 20 s"],
                     id="a save that was cut off needs more"),
        pytest.param(need(None, 18.0), [offer()], ["at least 21 s (longest step unknown, p99 save 18"], id="partly"),
    ],
)  # fmt: skip
def test_a_budget_that_does_not_fit_is_named_with_its_numbers(needs, offers, texts):
    (text,) = warnings(findings(needs, offers))
    assert [wanted for wanted in texts if wanted not in text] == [], text


def test_the_same_trouble_in_two_partitions_is_told_once():
    assert len(warnings(findings(need(100, 37), [offer(), offer()]))) == 2, "time limit and preemption"


@pytest.mark.parametrize("what", [Preempts.NEVER, Preempts.BY_QOS, Preempts.UNKNOWN])
def test_a_grace_that_does_not_rule_is_no_reason_to_warn(what):
    assert warnings(findings(need(), [offer(what=what, grace=0.0)])) == []


TIMES = st.one_of(st.none(), st.floats(0, 1e6))
NEEDS = st.builds(GraceNeed, longest_step_s=TIMES, save_s=TIMES, cut_off=st.booleans(), start_s=TIMES, step_s=TIMES,
                  interval_steps=st.integers(0, 10**9))  # fmt: skip
OFFERS = st.builds(GraceOffer, lead_s=st.floats(1, 65535), limit_s=st.one_of(TIMES, st.just(math.inf)),
                   partition=st.just("p"), preempts=st.sampled_from(Preempts), grace_s=TIMES,
                   kill_wait_s=TIMES)  # fmt: skip


@given(NEEDS, st.lists(OFFERS, max_size=3))
def test_every_budget_is_told_in_sentences_without_odd_numbers(needs, offers):
    found = findings(needs, offers)
    assert found
    assert not [one.text for one in found if "inf" in one.text.split() or "nan" in one.text or "None" in one.text]


@given(NEEDS, OFFERS, st.floats(0, 1e5))
def test_more_time_never_makes_more_warnings(needs, given_offer, more_s):
    def with_more(value: float | None) -> float | None:
        return None if value is None else value + more_s

    ampler = GraceOffer(
        lead_s=given_offer.lead_s, limit_s=with_more(given_offer.limit_s), partition="p",
        preempts=given_offer.preempts, grace_s=with_more(given_offer.grace_s), kill_wait_s=given_offer.kill_wait_s,
    )  # fmt: skip
    assert len(warnings(findings(needs, [ampler]))) <= len(warnings(findings(needs, [given_offer])))


@given(NEEDS)
def test_nothing_is_wrong_with_endless_time(needs):
    endless = GraceOffer(lead_s=1e8, limit_s=math.inf, partition="p", preempts=Preempts.BY_PARTITION, grace_s=1e8)
    assert warnings(findings(needs, [endless])) == []
