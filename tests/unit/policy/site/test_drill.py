"""What the table of a drill says, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurmft.policy.site import DrillFacts, passed, rows
from slurmft.policy.stop import Preempts

GOOD = DrillFacts(
    how="scancel --signal=TERM", partition="low", preempts=Preempts.BY_PARTITION, preempt_mode="REQUEUE", grace_s=20.0,
    kill_wait_s=5.0, stop_reason="SIGTERM at n1", stop_cause="signalled", world_size=4, marked=4, saved_step=12,
    save_s=0.4, requeued=True, waited_s=2.1, resumed_from=12, workload_needs_s=8.0,
)  # fmt: skip


def test_a_drill_in_which_all_went_well():
    assert [row.passed for row in rows(GOOD)] == [True] * 8
    assert passed(rows(GOOD))


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"stop_reason": None}, ["signal", "who got it"]),
        ({"saved_step": None, "resumed_from": 0}, ["save", "resumed"]),
        ({"grace_s": 0.0}, ["grace", "your workload"]),
        ({"grace_s": 3.2}, ["grace", "your workload"]),
        ({"workload_needs_s": 30.0}, ["your workload"]),
        ({"grace_s": None, "workload_needs_s": None}, []),
        ({"preempts": Preempts.NEVER, "grace_s": 0.0}, []),
        ({"preempts": Preempts.BY_QOS, "grace_s": 0.0}, []),
        ({"preempt_mode": "CANCEL"}, ["requeue"]),
        ({"requeued": False, "resubmitted": True}, ["requeue"]),
        ({"requeued": False, "waited_s": None, "resumed_from": None}, ["requeue", "ineligible", "resumed"]),
        ({"waited_s": 121.4}, ["ineligible"]),
        ({"resumed_from": 0}, ["resumed"]),
        ({"save_s": None}, []),
    ],
)
def test_what_fails(changes, failed):
    table = rows(replace(GOOD, **changes))
    assert [row.what for row in table if row.passed is False] == failed
    assert passed(table) is (failed == [])
