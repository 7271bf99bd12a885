"""A cloud's notices that it will take a machine away: its answers in, notices out; and which cloud this is."""

from __future__ import annotations

import calendar
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from enum import StrEnum
from typing import Any

AWS_LEAD_S = 120.0
GCP_LEAD_S = 30.0
GCP_MAINTENANCE_LEAD_S = 60.0
AZURE_PREEMPT_LEAD_S = 30.0
AZURE_LEAD_S = 300.0
"""The clouds' documented time between a notice and the end, where the notice itself does not say."""

PLUGIN_LEAD_S = 120.0
LEAST_S = 5.0
"""A deadline that has passed already may also be a clock that is ahead: there is so much time at least."""

MOST_S = 86_400.0
MAX_TEXT = 200


class Cloud(StrEnum):
    """The owner of the machine."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One announcement."""

    source: str
    """The cloud, or ``plugin``."""

    what: str
    """One line for people."""

    ends: bool
    """The machine goes away or is restarted. False: it may, so it is under suspicion and no more."""

    left_s: float = 0.0
    """Seconds from now until then, where ``ends``."""

    key: str = ""
    """The same for the same announcement, however often it is made."""


AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
AWS_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
AWS_OFF_VARIABLE = "AWS_EC2_METADATA_DISABLED"
GCP_VARIABLE = "GCE_METADATA_HOST"
AZURE_VARIABLE = "SLURMFT_AZURE_METADATA_ENDPOINT"
LINK_LOCAL = "http://169.254.169.254"


def endpoints(facts: Mapping[str, str], environment: Mapping[str, str]) -> dict[Cloud, str]:
    """Where to ask for notices, by cloud; nothing where no sign of a cloud is seen.

    Args:
        facts: the firmware's values, by the names of the files in ``/sys/class/dmi/id``.
        environment: the clouds' own variables, for private setups: AWS_EC2_METADATA_SERVICE_ENDPOINT (or
            AWS_EC2_METADATA_DISABLED), GCE_METADATA_HOST; and SLURMFT_AZURE_METADATA_ENDPOINT.
    """
    found: dict[Cloud, str] = {}
    vendor = facts.get("sys_vendor", "").strip().lower()
    if vendor.startswith("amazon") or "amazon" in facts.get("bios_version", "").lower():
        found[Cloud.AWS] = LINK_LOCAL
    elif vendor == "google" or facts.get("product_name", "").strip() == "Google Compute Engine":
        found[Cloud.GCP] = LINK_LOCAL
    elif vendor == "microsoft corporation" and facts.get("chassis_asset_tag", "").strip() == AZURE_CHASSIS:
        found[Cloud.AZURE] = LINK_LOCAL  # without the tag it is a private Hyper-V
    if given := environment.get(AWS_VARIABLE):
        found[Cloud.AWS] = given
    if given := environment.get(GCP_VARIABLE):
        found[Cloud.GCP] = f"http://{given}"
    if given := environment.get(AZURE_VARIABLE):
        found[Cloud.AZURE] = given
    if environment.get(AWS_OFF_VARIABLE, "").strip().lower() == "true":
        found.pop(Cloud.AWS, None)
    return found


def aws_action(text: str, now: float) -> Notice | None:
    """The notice in an answer of ``spot/instance-action``; None where there is none in it."""
    facts = _object(text)
    action = facts.get("action")
    if action not in ("terminate", "stop", "hibernate"):
        return None
    at = _iso(facts.get("time"))
    left_s = AWS_LEAD_S if at is None else min(AWS_LEAD_S, at - now)  # never announced earlier
    return Notice(
        source=Cloud.AWS, what=f"AWS will {action} this spot instance", ends=True, left_s=_bounded(left_s),
        key=f"aws|{action}|{_short(facts.get('time'))}",
    )  # fmt: skip


def aws_rebalance(text: str) -> Notice | None:
    """The notice in an answer of ``events/recommendations/rebalance``: a higher risk, which may come to nothing."""
    facts = _object(text)
    if _iso(facts.get("noticeTime")) is None:
        return None
    what = "AWS recommends to leave this spot instance (rebalance recommendation)"
    return Notice(source=Cloud.AWS, what=what, ends=False, key=f"aws|rebalance|{_short(facts['noticeTime'])}")


def gcp_preempted(text: str) -> Notice | None:
    """The notice in an answer of ``instance/preempted``."""
    if text.strip().upper() != "TRUE":
        return None
    return Notice(source=Cloud.GCP, what="Google preempts this VM", ends=True, left_s=GCP_LEAD_S, key="gcp|preempted")


def gcp_maintenance(text: str) -> Notice | None:
    """The notice in an answer of ``instance/maintenance-event``: a migration is a short pause."""
    match text.strip().upper():
        case "TERMINATE_ON_HOST_MAINTENANCE":
            what = "Google will stop this VM for maintenance of its host"
            left_s = GCP_MAINTENANCE_LEAD_S
            return Notice(source=Cloud.GCP, what=what, ends=True, left_s=left_s, key="gcp|maintenance|terminate")
        case "MIGRATE_ON_HOST_MAINTENANCE":
            what = "Google migrates this VM to another host"
            return Notice(source=Cloud.GCP, what=what, ends=False, key="gcp|maintenance|migrate")
    return None


_AZURE_ENDS = {"preempt": "evicts", "terminate": "deletes", "reboot": "restarts", "redeploy": "moves and restarts"}


def azure_incarnation(text: str) -> int | None:
    """The number of this version of the document of scheduled events; None where it is not such a document."""
    number = _object(text).get("DocumentIncarnation")
    return number if type(number) is int else None


def azure_events(text: str, names: Sequence[str], now: float) -> list[Notice]:
    """The notices in the document of scheduled events that are about one of ``names``; others are about neighbours."""
    events = _object(text).get("Events")
    mine = {name.lower() for name in names if name}
    found = [_azure_event(event, mine, now) for event in _list(events) if isinstance(event, dict)]
    return [notice for notice in found if notice is not None]


def _azure_event(event: Mapping[str, Any], mine: set[str], now: float) -> Notice | None:
    resources = event.get("Resources")
    if not mine & {name.lower() for name in _list(resources) if isinstance(name, str)}:
        return None
    kind = str(event.get("EventType", "")).lower()
    key = f"azure|{kind}|{_short(event.get('EventId'))}"
    if kind == "freeze":  # its memory is kept; the others of the run wait for it
        return Notice(source=Cloud.AZURE, what="Azure will freeze this VM for seconds", ends=False, key=key)
    if kind not in _AZURE_ENDS or str(event.get("EventStatus", "")).lower() in ("completed", "canceled", "cancelled"):
        return None
    lead_s = AZURE_PREEMPT_LEAD_S if kind == "preempt" else AZURE_LEAD_S
    at = _http_date(event.get("NotBefore"))  # empty once it has begun
    left_s = _bounded(lead_s if at is None else at - now)
    return Notice(source=Cloud.AZURE, what=f"Azure {_AZURE_ENDS[kind]} this VM", ends=True, left_s=left_s, key=key)


def from_plugin(line: str) -> Notice | None:
    """The notice in a line that a plug-in has printed: ``{"what": ..., "ends": true, "left_s": 90, "id": ...}``.

    None where the line is something else, or does not say whether the machine ``ends``.
    """
    facts = _object(line)
    ends, what, left_s = facts.get("ends"), facts.get("what", ""), facts.get("left_s", PLUGIN_LEAD_S)
    if type(ends) is not bool or not isinstance(what, str) or type(left_s) not in (int, float):
        return None
    what = _short(what) or "a plug-in announces the end of this machine"
    key = f"plugin|{ends}|{_short(facts.get('id', what))}"
    return Notice(source="plugin", what=what, ends=ends, left_s=_bounded(float(left_s)) if ends else 0.0, key=key)


def server_time(date: str, own: float) -> float:
    """The unix time in an answer's ``Date`` header, whose clock also sets the deadline; ``own`` where it has none."""
    at = _http_date(date)
    return own if at is None else at


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _short(value: Any) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in str(value)[:MAX_TEXT]).strip()


def _bounded(seconds: float) -> float:
    return min(MOST_S, max(LEAST_S, seconds)) if math.isfinite(seconds) else LEAST_S


_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII | re.IGNORECASE
)


def _iso(value: Any) -> float | None:
    """Unix time; one without a zone is UTC."""
    match = _ISO.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    try:
        at = calendar.timegm(tuple(map(int, match.groups()[:6])))
    except (ValueError, OverflowError):
        return None
    offset_s = int(match[8] or 0) * 3600 + int(match[9] or 0) * 60
    return float(at + offset_s if match[7] == "-" else at - offset_s)


def _http_date(value: Any) -> float | None:
    try:
        parts = parsedate_tz(value)
        return None if parts is None else float(mktime_tz(parts))
    except (TypeError, ValueError, OverflowError, IndexError, AttributeError):
        return None
