"""Communication errors: who complains is a victim; who is missed is whoever is behind, or did not come at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slurmft.policy.nodes.evidence import Suspect
from slurmft.policy.verdicts.findings import Finding, WorkerEnd, where

MAX_NAMED = 8
"""More ranks than that are not behind: the others are ahead, and nobody knows why."""


def who_is_missed(complaints: Sequence[Finding], ends: Sequence[WorkerEnd]) -> Finding:
    """One finding for all complaints: it blames the rank that is behind or absent, or nobody.

    Behind are ranks with fewer steps than the others, where they are not the larger part. Absent are ranks that did not
    complain although all others did: they were not in the collective that failed, and we had to kill them.
    """
    count = f"{len(complaints)} of {len(ends)} ranks report a communication error"
    first = complaints[0]
    missed, why = _behind(ends), "behind"
    if not missed:
        missed, why = _absent(complaints, ends), "absent"
    if not missed:
        return replace(first, rank=None, node="", suspects=(), reason=f"{first.reason}; {count}, and nobody is behind",
                       evidence=(count, *first.evidence))  # fmt: skip
    steps = max(end.step for end in ends) - missed[0].step
    tale = f"was {steps} step{'s' if steps > 1 else ''} behind" if why == "behind" else "did not come, nor complain"
    theirs = next((finding for finding in complaints if finding.rank == missed[0].rank), first)
    return replace(
        first,
        rank=missed[0].rank,
        node=missed[0].node,
        suspects=tuple(Suspect(node=end.node, rank=end.rank) for end in missed),
        reason=f"{first.reason}; {where(missed[0])} {tale}",
        traceback=theirs.traceback,
        evidence=(count, f"{where(missed[0])} {tale}", *first.evidence),
    )


def _behind(ends: Sequence[WorkerEnd]) -> list[WorkerEnd]:
    told = [end for end in ends if end.attached]
    if not told or (least := min(end.step for end in told)) == max(end.step for end in told):
        return []
    behind = [end for end in told if end.step == least]
    return behind if 2 * len(behind) <= len(told) and len(behind) <= MAX_NAMED else []


def _absent(complaints: Sequence[Finding], ends: Sequence[WorkerEnd]) -> list[WorkerEnd]:
    complained = {finding.rank for finding in complaints}
    absent = [end for end in ends if end.killed and end.rank not in complained]
    few = 2 * len(absent) < len(ends) and len(absent) <= MAX_NAMED
    return absent if few and len(absent) + len(complained) == len(ends) else []
