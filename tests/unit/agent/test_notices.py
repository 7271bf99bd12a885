"""Notices of clouds: what they say, from real answers; and the watch, against a real server on the loopback."""

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import slowness

from slurmft.agent.notices import NoAnswer, NoticeWatch, ask, firmware_facts
from slurmft.config import run as configuration
from slurmft.ipc.channel import encoded
from slurmft.ipc.messages import NoticeReport, parse_report
from slurmft.policy.site import (
    AZURE_CHASSIS,
    LEAST_S,
    LINK_LOCAL,
    MOST_S,
    Cloud,
    Notice,
    aws_action,
    aws_rebalance,
    azure_events,
    azure_incarnation,
    endpoints,
    from_plugin,
    gcp_maintenance,
    gcp_preempted,
    server_time,
)

NOW = 1_700_000_000.0  # 2023-11-14T22:13:20Z


@pytest.mark.parametrize(
    ("facts", "environment", "expected"),
    [
        ({}, {}, {}),
        ({"sys_vendor": "QEMU\n", "product_name": "Standard PC\n"}, {}, {}),
        ({"sys_vendor": "Amazon EC2\n"}, {}, {Cloud.AWS: LINK_LOCAL}),
        ({"sys_vendor": "Xen\n", "bios_version": "4.11.amazon\n"}, {}, {Cloud.AWS: LINK_LOCAL}),
        ({"sys_vendor": "Amazon EC2"}, {"AWS_EC2_METADATA_DISABLED": "true"}, {}),
        ({"sys_vendor": "Google\n"}, {}, {Cloud.GCP: LINK_LOCAL}),
        ({"sys_vendor": "Microsoft Corporation\n"}, {}, {}),
        (
            {"sys_vendor": "Microsoft Corporation\n", "chassis_asset_tag": AZURE_CHASSIS + "\n"},
            {},
            {Cloud.AZURE: LINK_LOCAL},
        ),
        ({}, {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://[::1]:1"}, {Cloud.AWS: "http://[::1]:1"}),
        ({}, {"GCE_METADATA_HOST": "127.0.0.1:1"}, {Cloud.GCP: "http://127.0.0.1:1"}),
        ({}, {"SLURMFT_AZURE_METADATA_ENDPOINT": "http://h"}, {Cloud.AZURE: "http://h"}),
        ({"sys_vendor": "Amazon EC2"}, {"AWS_EC2_METADATA_SERVICE_ENDPOINT": ""}, {Cloud.AWS: LINK_LOCAL}),
    ],
)
def test_a_cloud_is_known_by_its_firmware_or_by_its_own_variable(facts, environment, expected):
    assert endpoints(facts, environment) == expected


@pytest.mark.parametrize(
    ("text", "left_s"),
    [
        ('{"action": "terminate", "time": "2023-11-14T22:15:00Z"}', 100.0),
        ('{"action": "stop", "time": "2023-11-14T23:15:00+01:00"}', 100.0),
        ('{"action": "hibernate", "time": "2023-11-14T22:13:20Z"}', LEAST_S),
        ('{"action": "terminate", "time": "2023-11-15T22:15:00Z"}', 120.0),
        ('{"action": "terminate", "time": "soon"}', 120.0),
        ('{"action": "terminate"}', 120.0),
        ('{"action": "terminate", "time": "2023-13-44T99:15:00Z"}', 120.0),
        ('{"action": "none"}', None),
        ("[]", None),
        ("<html>404</html>", None),
        ("", None),
    ],
)
def test_a_spot_notice_of_aws_has_at_most_two_minutes(text, left_s):
    found = aws_action(text, NOW)
    assert (None if found is None else (found.ends, found.left_s)) == (None if left_s is None else (True, left_s))


def test_a_rebalance_recommendation_is_a_suspicion_only():
    found = aws_rebalance('{"noticeTime": "2023-11-14T22:13:20Z"}')
    assert found is not None
    assert not found.ends
    assert aws_rebalance('{"noticeTime": 5}') is None


@pytest.mark.parametrize(
    ("text", "preempted", "maintained"),
    [
        ("TRUE", True, None),
        ("FALSE", None, None),
        ("NONE", None, None),
        ("TERMINATE_ON_HOST_MAINTENANCE\n", None, True),
        ("MIGRATE_ON_HOST_MAINTENANCE", None, False),
    ],
)
def test_google_says_one_word(text, preempted, maintained):
    said = [None if found is None else found.ends for found in (gcp_preempted(text), gcp_maintenance(text))]
    assert said == [preempted, maintained]


def azure(*events: dict[str, Any], incarnation: object = 1) -> str:
    return json.dumps({"DocumentIncarnation": incarnation, "Events": list(events)})


def event(kind: str = "Preempt", **changes: Any) -> dict[str, Any]:
    at = "Tue, 14 Nov 2023 22:13:50 GMT"
    return {"EventId": "E1", "EventType": kind, "Resources": ["vm_1"], "EventStatus": "Scheduled", "NotBefore": at,
            **changes}  # fmt: skip


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (event(), (True, 30.0)),
        (event(NotBefore=""), (True, 30.0)),
        (event("Terminate", NotBefore=None), (True, 300.0)),
        (event("Reboot", NotBefore="Tue, 14 Nov 2023 22:03:50 GMT"), (True, LEAST_S)),
        (event("Redeploy"), (True, 30.0)),
        (event("Freeze"), (False, 0.0)),
        (event("Reboot", EventStatus="Completed"), None),
        (event(Resources=["vm_2"]), None),
        (event(Resources=["VM_1", "vm_2"]), (True, 30.0)),
        (event(Resources="vm_1"), None),
        (event("Cosmic"), None),
    ],
)
def test_an_event_of_azure_counts_when_it_is_about_this_machine(one, expected):
    found = [(notice.ends, notice.left_s) for notice in azure_events(azure(one), ["vm_1", "host"], NOW)]
    assert found == ([] if expected is None else [expected])


def test_a_document_of_azure_has_a_number():
    assert [azure_incarnation(text) for text in (azure(incarnation=7), azure(incarnation="7"), "{}")] == [7, None, None]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"ends": true, "what": "evicted\\n", "left_s": 90}', ("evicted", True, 90.0)),
        ('{"ends": true}', ("a plug-in announces the end of this machine", True, 120.0)),
        ('{"ends": false, "what": "hot", "left_s": 3}', ("hot", False, 0.0)),
        ('{"ends": true, "left_s": NaN}', ("a plug-in announces the end of this machine", True, LEAST_S)),
        ('{"ends": true, "left_s": 1e300}', ("a plug-in announces the end of this machine", True, MOST_S)),
        ('{"ends": 1}', None),
        ('{"ends": true, "what": 5}', None),
        ("all is well", None),
    ],
)
def test_a_plugin_says_whether_the_machine_ends(line, expected):
    found = from_plugin(line)
    assert (None if found is None else (found.what, found.ends, found.left_s)) == expected


KEYS = st.sampled_from(["Events", "action", "time", "ends", "left_s", "Resources", "EventType", "NotBefore"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)
)


@given(st.text() | VALUES.map(json.dumps))
def test_no_answer_raises_anything(text):
    said = [aws_action(text, NOW), aws_rebalance(text), gcp_preempted(text), gcp_maintenance(text), from_plugin(text)]
    found = [notice for notice in [*said, *azure_events(text, ["vm_1"], NOW)] if notice is not None]
    assert all(LEAST_S <= notice.left_s <= MOST_S for notice in found if notice.ends)
    assert server_time(text, 5.0) >= -1e12


# the watch


class Metadata:
    """A metadata service; ``answers`` has (status, headers, body) by method and path."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.delay_s = 0.0
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                asked = f"{self.command} {self.path.partition('?')[0]}"
                metadata.asked.append((asked, {name.lower(): value for name, value in self.headers.items()}))
                time.sleep(metadata.delay_s)
                status, headers, body = metadata.answers.get(asked, (404, {}, b"no such thing"))
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            do_GET = do_PUT = _answer

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def say(self, asked: str, body: str | bytes, status: int = 200, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers[asked] = (status, named, body.encode() if isinstance(body, str) else body)


@pytest.fixture
def service() -> Iterator[Metadata]:
    found = Metadata()
    yield found
    found.server.shutdown()
    found.server.server_close()
    found.thread.join()


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have loaded a stand-in for NVIDIA's library."""
    monkeypatch.setattr("slurmft.agent.notices.has_gpus", lambda: False)


TOKEN, ACTION = "PUT /latest/api/token", "GET /latest/meta-data/spot/instance-action"
REBALANCE = "GET /latest/meta-data/events/recommendations/rebalance"
GCP = "GET /computeMetadata/v1/instance/"


def watched(
    tmp_path: Path, environment: dict[str, str], until: Callable[[list[NoticeReport]], bool], within_s: float = 5.0,
    **notices: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """What a watch has reported when ``until`` is true of it, or the time is up."""
    raw = {"command": ["true"], "run_folder": str(tmp_path / "run"), "notices": {"poll_seconds": 0.1, **notices}}
    config = configuration.validate(raw, source="test")
    reports: list[NoticeReport] = []

    async def watch() -> None:
        watching = asyncio.create_task(
            NoticeWatch(config, environment, reports.append, firmware=tmp_path / "none").run()
        )
        deadline = time.monotonic() + within_s
        while not until(reports) and not watching.done() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(watch())
    for report in reports:
        assert parse_report(encoded(report)) == report
    return [{name: getattr(report, name) for name in ("source", "ends", "left_s")} for report in reports]


def test_a_spot_notice_is_asked_for_with_a_token_and_told_once(service, tmp_path):
    service.say(TOKEN, "secret")
    service.say(ACTION, '{"action": "terminate", "time": "2023-11-14T22:15:00Z"}',
                Date="Tue, 14 Nov 2023 22:13:20 GMT")  # fmt: skip
    service.answers[REBALANCE] = (200, {}, b'{"noticeTime": "2023-11-14T22:13:20Z"}')
    environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{service.host}"}
    asked_often = lambda _: len(service.asked) > 6  # noqa: E731
    found = watched(tmp_path, environment, asked_often)
    assert found == [
        {"source": "aws", "ends": True, "left_s": pytest.approx(100.0, abs=2.0)},
        {"source": "aws", "ends": False, "left_s": 0.0},
    ]
    assert [asked for asked, _ in service.asked].count(TOKEN) == 1
    assert {headers.get("x-aws-ec2-metadata-token") for asked, headers in service.asked if asked != TOKEN} == {"secret"}


def test_an_expired_token_is_replaced(service, tmp_path):
    service.say(TOKEN, "old")
    service.say(ACTION, "", status=401)
    environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{service.host}"}
    tokens = lambda: [asked for asked, _ in service.asked].count(TOKEN)  # noqa: E731
    watched(tmp_path, environment, lambda _: tokens() >= 2)
    assert tokens() == 2


def test_googles_answers_carry_its_flavor(service, tmp_path):
    service.say(f"{GCP}preempted", "TRUE", Metadata_Flavor="Google")
    service.say(f"{GCP}maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")  # not Google's
    found = watched(tmp_path, {"GCE_METADATA_HOST": service.host}, lambda _: len(service.asked) > 3)
    assert found == [{"source": "gcp", "ends": True, "left_s": 30.0}]
    assert {headers.get("metadata-flavor") for _, headers in service.asked} == {"Google"}


def test_azures_document_is_read_again_when_its_number_changes(service, tmp_path):
    service.say("GET /metadata/instance/compute/name", "vm_1")
    events = "GET /metadata/scheduledevents"
    service.say(events, azure())

    def until(reports: list[dict[str, Any]]) -> bool:
        if len(service.asked) == 3:  # without a new number, nothing is new
            service.say(events, azure(event("Terminate", NotBefore="")))
        elif len(service.asked) > 5:
            service.say(events, azure(event("Terminate", NotBefore=""), incarnation=2))
        return bool(reports)

    environment = {"SLURMFT_AZURE_METADATA_ENDPOINT": f"http://{service.host}"}
    assert watched(tmp_path, environment, until) == [{"source": "azure", "ends": True, "left_s": 300.0}]
    assert {headers.get("metadata") for _, headers in service.asked} == {"true"}


def test_without_a_cloud_nobody_is_asked(service, tmp_path):
    began = time.monotonic()
    assert watched(tmp_path, {}, lambda _: False) == []
    off = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{service.host}"}
    assert watched(tmp_path, off, lambda _: False, enabled="off", plugin=["false"]) == []
    assert time.monotonic() - began < 4.0 * slowness(), "both have ended by themselves"
    assert service.asked == []


@pytest.mark.parametrize(
    ("body", "status", "headers"),
    [
        (b"x" * 300_000, 200, {}),
        (b"", 302, {"Location": "http://203.0.113.1/elsewhere"}),
        (b"oops", 500, {}),
        (b'{"action":', 200, {}),
        (b"short", 200, {"Content-Length": "500"}),
        (b"-1", 200, {"Content-Length": "-1"}),
        (b"zz\r\n", 200, {"Transfer-Encoding": "chunked"}),
        (b"\xff\xfe\x00", 200, {"X" * 9000: "y" * 9000}),
    ],
    ids=["huge", "redirect", "500", "malformed", "cut off", "length", "chunks", "head"],
)
def test_a_service_that_talks_nonsense_does_no_harm(service, tmp_path, body, status, headers):
    service.say(TOKEN, "secret")
    service.answers[ACTION] = (status, headers, body)
    environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{service.host}"}
    actions = lambda: [asked for asked, _ in service.asked].count(ACTION)  # noqa: E731
    assert watched(tmp_path, environment, lambda _: actions() > 1, within_s=8.0) == []
    assert actions() > 1, "it is asked again"


def test_a_slow_service_is_given_up_within_the_time_limit(service):
    service.delay_s = 1.0
    began = time.monotonic()
    with pytest.raises(NoAnswer):
        asyncio.run(ask(f"http://{service.host}", "/", headers={}, timeout_s=0.2))
    assert time.monotonic() - began < 0.9 * slowness()


@pytest.mark.parametrize("endpoint", ["https://127.0.0.1", "127.0.0.1:1", "http://", "http://[", "http://127.0.0.1:1"])
def test_where_nobody_can_be_asked_there_is_no_answer(endpoint):
    with pytest.raises(NoAnswer):
        asyncio.run(ask(endpoint, "/", headers={}))


def test_a_token_with_a_line_break_is_not_sent(service):
    with pytest.raises(NoAnswer):
        asyncio.run(ask(f"http://{service.host}", "/", headers={"X-Token": "a\r\nHost: b"}))


def test_an_answer_in_chunks_is_put_together(service):
    service.say("GET /", b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", Transfer_Encoding="chunked")
    del service.answers["GET /"][1]["Transfer-Encoding"]
    service.answers["GET /"] = (200, {"Transfer-Encoding": "chunked"}, service.answers["GET /"][2])
    assert asyncio.run(ask(f"http://{service.host}", "/", headers={})).text == "abcde"


PLUGIN = """
import json, os, sys, time
with open(sys.argv[1], "a+") as pids:
    print(os.getpid(), file=pids, flush=True)
    pids.seek(0)
    number = len(pids.read().split())
print("hello")
print(json.dumps({"ends": True, "left_s": 60, "id": number}), flush=True)
time.sleep(100 if number > 1 else 0)
"""


def test_a_plugin_is_heard_started_again_and_ended_with_the_watch(tmp_path):
    pids = tmp_path / "pids"
    program = tmp_path / "plugin.py"
    program.write_text(PLUGIN)
    argv = [sys.executable, str(program), str(pids)]
    found = watched(tmp_path, {}, lambda reports: len(reports) == 2, plugin=argv)
    assert found == [{"source": "plugin", "ends": True, "left_s": 60.0}] * 2
    for pid in map(int, pids.read_text().split()):
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]


def test_a_plugin_that_is_not_there_is_tried_again_and_ends_nothing(tmp_path, caplog):
    assert watched(tmp_path, {}, lambda _: len(caplog.records) > 1, plugin=["/no/such/program"]) == []
    assert "notices.plugin cannot be run" in caplog.text


def test_what_the_firmware_does_not_say_is_left_out(tmp_path):
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert firmware_facts(tmp_path) == {"sys_vendor": "Amazon EC2\n"}


WATCH = """
import os, sys
with open(sys.argv[1], "a+") as lives:
    lives.write("x")
    lives.seek(0)
    number = len(lives.read())
print('{"fault": true, "ends": false, "what": "gpu-clocks: GPU 1: power brake", "id": "a"}')
print('{"fault": true, "ends": true, "what": "xid: Xid 79 on 0000:1b:00", "id": "b"}', flush=True)
sys.exit(number < 2)
"""


def test_faults_of_gpus_are_told_once_and_a_watch_that_fails_is_started_again(tmp_path, monkeypatch):
    lives, program = tmp_path / "lives", tmp_path / "watch.py"
    program.write_text(WATCH)
    monkeypatch.setattr("slurmft.agent.notices.has_gpus", lambda: True)
    monkeypatch.setattr("slurmft.agent.notices.GPU_WATCH", (sys.executable, str(program), str(lives)))
    monkeypatch.setattr("slurmft.agent.notices.AGAIN_S", 0.05)
    found = watched(tmp_path, {}, lambda _: False, within_s=20.0)
    assert found == [{"source": "gpu", "ends": False, "left_s": 0.0}, {"source": "gpu", "ends": True, "left_s": 0.0}]
    assert lives.read_text() == "xx", "0: there is nothing to watch"
    assert watched(tmp_path, {}, lambda _: False, enabled="off") == []
    assert lives.read_text() == "xx"


def test_a_line_says_whether_hardware_has_failed():
    assert from_plugin('{"ends": true, "what": "x", "fault": true}', "gpu") == Notice(
        source="gpu", what="x", ends=True, fault=True, key="gpu|True|x"
    )
    for odd in ("1", '"yes"', "null", "[]"):
        notice = from_plugin(f'{{"ends": true, "what": "x", "fault": {odd}}}')
        assert notice is not None and not notice.fault and notice.left_s > 0
