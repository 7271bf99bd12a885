"""The journal's newest look at the ranks, for people: culprits, victims, and where the files lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmft.storage.events import EventName
from slurmft.storage.journal import Event

"""Its name in the journal."""

MAX_SHOWN = 8
"""Culprits that are shown in full."""


def look_told(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Names and texts, the attempt first; empty where there was no look at the ranks.

    The journal may be damaged or of a newer slurmft: what does not fit is left out.
    """
    newest = next((event for event in reversed(events) if event.event == EventName.LAST_LOOK), None)
    if newest is None:
        return []
    facts = newest.details
    culprits = [each for each in _listed(facts.get("culprits")) if isinstance(each, Mapping)]
    rows = [row for each in culprits[:MAX_SHOWN] for row in _culprit(each)]
    if len(culprits) > MAX_SHOWN:
        rows.append(("culprit", f"and {len(culprits) - MAX_SHOWN} more"))
    if not culprits:
        rows.append(("culprit", f"not found: {facts.get('undecided') or 'no reason given'}"))
    rows += [("victims", str(each)) for each in _listed(facts.get("victims"))]
    rows += [("collective", str(each)) for each in _listed(facts.get("collectives"))]
    rows.append(("files", str(facts.get("folder") or "")))
    return [("attempt", newest.attempt), *((name, text) for name, text in rows if text.strip())]


def _culprit(each: Mapping[str, Any]) -> list[tuple[str, str]]:
    reason = str(each.get("reason", ""))
    where = f"rank {each.get('rank', '?')} on {each.get('node') or '?'}"
    step = f" (step {each['step']})" if type(each.get("step")) is int and " at step " not in reason else ""
    sections = " > ".join(map(str, _listed(each.get("sections"))))
    return [
        ("culprit", f"{where}{step}: {reason}"),
        ("section", sections),
        *(("stack", str(call)) for call in _listed(each.get("stack"))),
    ]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
