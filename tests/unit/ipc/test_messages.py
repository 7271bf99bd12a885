"""Messages of the control channel: the bytes that older versions sent, and back and forth between bytes and values."""

import json
import math
import os
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from of_each import of_each
from rank_facts import training

from slurmft.ipc import messages
from slurmft.ipc.channel import BadMessage, Fields, body_of, encoded, kind_of
from slurmft.ipc.messages import (
    Call,
    Hello,
    Sent,
    SignalReport,
    SyncReport,
    as_reply,
    parse_call,
    parse_hello,
    parse_report,
)
from slurmft.policy.judge import Progress

RECORDED = [
    line.split("\t")
    for line in Path(__file__).with_name("recorded_messages.tsv").read_text(encoding="utf-8").splitlines()
]
"""The kind, and the bytes: most of them from a run of an earlier version on one machine."""

CALLS: dict[str, type[Call[Any]]] = {
    kind_of(each): each
    for each in vars(messages).values()
    if isinstance(each, type) and issubclass(each, Call) and each is not Call
}
REPORTS: list[type[Sent]] = [
    each for each in vars(messages).values()
    if isinstance(each, type) and issubclass(each, Sent) and each not in (Sent, messages.InferenceReport)
]  # fmt: skip


def made(kind: str, line: bytes) -> Any:
    """Parsed and made again."""
    if kind.startswith("reply to "):
        return as_reply(json.loads(line)["id"], CALLS[kind.removeprefix("reply to ")].reply_of(line))
    if kind == "hello":
        return parse_hello(json.loads(line))
    if b'"id":' in line:
        number, found = parse_call(line)
        assert found is not None
        return found.as_call(number)
    report = parse_report(line)
    assert isinstance(report, Sent)
    return report


@of_each(kind__body=RECORDED)
def test_messages_of_the_version_before_are_read_and_written_as_it_does(kind, body):
    again = encoded(made(kind, body.encode()))
    assert body_of(again) == body_of(body.encode())
    assert again.count(b"NaN") == body.count("NaN"), "earlier versions need a metric that is a number"
    assert again.count(b"null") == body.count("null"), "nor do they know a null elsewhere"
    assert encoded(made(kind, again)) == again


def test_every_kind_of_message_was_recorded():
    found = {kind for kind, _ in RECORDED}
    assert found >= {*CALLS, "hello", *map(kind_of, REPORTS)}
    with_reply = {kind for kind, call in CALLS.items() if call.reply().__struct_fields__} - {"propose"}  # looks, too
    assert found >= {f"reply to {kind}" for kind in with_reply}


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_of_json_arrives_as_none(metric):
    """As this version sends it, and the ones before."""
    told = training(step=7, metric=metric)
    report = messages.ProgressReport(ranks=(told, training(metric=0.5)), ready=True)
    before = json.dumps(report.as_mapping()).encode()
    assert b"NaN" in before or b"Infinity" in before
    for line in (before, encoded(report)):
        found = parse_report(line)
        assert isinstance(found, messages.ProgressReport)
        assert [each.metric for each in found.ranks] == [None, 0.5]


def test_a_name_that_is_not_utf_8_arrives_as_it_was():
    report = SyncReport(what="kept", path=os.fsdecode(b"/models/caf\xe9"))
    assert parse_report(encoded(report)) == report


@of_each(line__error=[
        (b'{"kind":"hung","rank":0,"section":"a\\u202eb","held_s":1,"limit_s":1,"why":""}', r"`\$.section`"),
        (b'{"kind":"want","epoch":1,"count":18446744073709551616}', "`count`"),
        (b'{"kind":"limit","what":""}', r"`\$.what`"),
        (b'{"kind":"timings","window":9223372036854775808,"ranks":[]}', r"`\$.window`"),
        (b'{"kind":"returned","epoch":1,"runs":[[0,8],[3,3]]}', "`runs`"),
        (b'{"kind":"progress","ranks":[],"generation":true}', r"`\$.generation`"),
        (b'{"kind":"a kind of tomorrow","generation":"1"}', r"`\$.generation`"),
        (b'{"kind":"limit","what":"x","\\udcff":1}', "not text"),
    ])  # fmt: skip
def test_a_malformed_report_is_refused_with_its_field(line, error):
    with pytest.raises(BadMessage, match=error):
        parse_report(line)


def test_what_no_reader_relies_on_counts_as_missing_where_it_is_malformed():
    assert parse_report(b'{"kind":"signal","name":"SIGTERM","count":"two","at":[]}') == SignalReport(name="SIGTERM")
    ranks = [training(copied=1, attached_at=2.5).as_mapping(), training(rank=1).as_mapping() | {"copied": -1}]
    found = parse_report(encoded({"kind": "progress", "ranks": ranks, "ready": "yes"}))
    assert found == messages.ProgressReport(ranks=(training(attached_at=2.5), training(rank=1)))


# any values that fit

FEW = settings(max_examples=25, deadline=None)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
NAMES = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=40)
SLOTS = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(0, 1)
LOOK = st.tuples(st.booleans(), SLOTS, st.booleans(), SLOTS)
TIMED = st.tuples(NAMES, NUMBERS, st.integers(1, 9))
FIRSTS = st.integers(0, 2**40 - 9)
RUNS = FIRSTS.map(lambda first: (first, first + 9))
HELD = st.lists(st.tuples(NAMES, NUMBERS), max_size=2).map(tuple)
PROGRESS = st.builds(
    Progress, group=NAMES, description=NAMES, members=st.just(((0, 3), (5, 5))), entered=SMALL, done=SMALL,
    operation=NAMES, called_from=NAMES,
)  # fmt: skip
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "code": st.integers(-128, 255), "state": SMALL, "device": SMALL, "left_s": st.floats(0, 1e9), "why": NAMES,
    "port": st.integers(1, 65535), "master_port": st.integers(1, 65535), "process": st.sampled_from(["", "S"]),
    "router_port": st.none() | st.integers(1, 65535),
    "exit_code": st.none() | st.integers(-128, 255), "ranks": st.none() | st.lists(SMALL).map(tuple),
    "on": st.none() | st.lists(SMALL).map(tuple),
    "order": st.just({"fault": "kill"}), "limits": st.none() | st.dictionaries(NAMES, NUMBERS, max_size=3),
    "save_errno": SMALL, "injected": st.lists(SMALL).map(tuple),
}  # fmt: skip


def values(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any message of this kind."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{one.name: one_value(one.name, hints[one.name]) for one in msgspec.structs.fields(kind)})


def one_value(name: str, hint: Any) -> st.SearchStrategy[Any]:
    arguments = typing.get_args(hint)
    if type(None) in arguments and name not in BY_NAME:
        return st.none() | one_value(name, arguments[0])
    if arguments and isinstance(arguments[0], type) and issubclass(arguments[0], Fields):
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Fields):
        return values(hint)
    if name in BY_NAME:
        return BY_NAME[name]
    special = {
        tuple[tuple[bool, int, bool, int], ...]: st.lists(LOOK).map(tuple),
        tuple[Progress, ...]: st.lists(PROGRESS, max_size=2).map(tuple),
        tuple[str, ...]: st.lists(NAMES, min_size=1, max_size=3).map(tuple),
        tuple[tuple[str, float], ...]: HELD,
        tuple[tuple[str, float, int], ...]: st.lists(TIMED, max_size=3).map(tuple),
        tuple[tuple[int, int], ...]: st.lists(RUNS, max_size=3).map(tuple),
        tuple[int, ...]: st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
        int: st.integers(0, 2**31 - 1), float: NUMBERS, str: NAMES, bool: st.booleans(),
    }  # fmt: skip
    return special.get(hint, st.from_type(hint))


def parse_any_hello(line: bytes) -> Hello:
    return parse_hello(body_of(line))


@pytest.mark.parametrize("kind", [Hello, *REPORTS], ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_what_an_agent_says_arrives_as_it_was(kind, data):
    message = data.draw(values(kind))
    parse = parse_any_hello if kind is Hello else parse_report
    assert parse(encoded(message)) == message
    assert parse(encoded({**message.as_mapping(), "of a newer version": [1], "new_s": 2.5})) == message
    assert parse(json.dumps({**message.as_mapping(), "new": math.nan}).encode()) == message


@pytest.mark.parametrize("kind", CALLS.values(), ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_a_call_and_its_reply_arrive_as_they_were(kind, data):
    call, reply = data.draw(values(kind)), data.draw(values(kind.reply()))
    assert parse_call(encoded(call.as_call(7))) == (7, call)
    assert call.reply_of(encoded(as_reply(7, reply))) == reply


@pytest.mark.parametrize("kind", [Hello, *REPORTS, *CALLS.values()], ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_of_a_message_with_other_values_only_the_connection_ends(kind, data):
    """Anything in place of a field, and any field missing: it is understood, or refused."""
    body = data.draw(values(kind)).as_mapping()
    body = {**body, "id": 1} if issubclass(kind, Call) else body
    name = data.draw(st.sampled_from([each for each in body if each != "kind"] or ["new_s"]))
    odd = st.recursive(st.none() | st.booleans() | SLOTS | st.floats() | st.text(), st.lists, max_leaves=5)
    changed = data.draw(st.one_of(odd.map(lambda value: {**body, name: value}), st.just(without(body, name))))
    parse = parse_call if issubclass(kind, Call) else parse_any_hello if kind is Hello else parse_report
    try:
        parse(json.dumps(changed).encode())
    except BadMessage as error:
        assert "\n" not in str(error)


def without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != name}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"kind": "propose", "id": 1, "action": 1}, "the call 'propose': Object missing required field `tick`"),
        (
            {"kind": "propose", "id": 1, "action": 1, "tick": "7"},
            r"'propose': Expected `int`, got `str` - at `\$.tick`",
        ),
        (
            {"kind": "ping", "id": 0, "limits": {"step": "long"}},
            r"'ping': Expected `float`, got `str` - at `\$.limits\[",
        ),
        ({"kind": "ping", "id": "0"}, r"a call: Expected `int`, got `str` - at `\$.id`"),
        ({"kind": "ping"}, "a call: Object missing required field `id`"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_call_is_refused(body, error):
    with pytest.raises(BadMessage, match=error):
        parse_call(encoded(body))


def test_a_call_of_a_newer_version_is_none_of_ours():
    assert parse_call(b'{"kind": "a kind of tomorrow", "id": 3, "x": null}') == (3, None)
