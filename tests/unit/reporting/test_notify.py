"""Messages: which events are told, once, in safe words; and what a receiver that misbehaves can do."""

import http.server
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import slowness

from slurmft.config.sections import NotifyConfig
from slurmft.errors import UsageError
from slurmft.reporting.metrics import Notifier, webhook_url
from slurmft.storage.journal import EventName, Journal

SECRET = "T0KEN-in-the-url"


class Receiver:
    """A webhook that answers with ``codes``, the last one again and again, and keeps what came."""

    def __init__(self, *codes: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.codes = list(codes) or [200]
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                code = receiver.codes.pop(0) if len(receiver.codes) > 1 else receiver.codes[0]
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/{SECRET}"


@pytest.fixture
def receiver() -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []

    def make(*codes: int) -> Receiver:
        made.append(Receiver(*codes))
        return made[-1]

    yield make
    for each in made:
        each.server.shutdown()
        each.server.server_close()


def notifier(folder: Path, url: str = "", pauses: list[float] | None = None, **settings: Any) -> Notifier:
    def pause(seconds: float) -> bool:
        (pauses if pauses is not None else []).append(seconds)
        return False

    if url:
        settings["webhook_variable"] = "HOOK"
    return Notifier(folder, NotifyConfig(**settings), {"HOOK": url}, clock=time.time, pause=pause)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path, attempt="7.0.0")


def test_chosen_events_are_told_once_also_by_the_next_process(tmp_path: Path, journal: Journal, receiver):
    hook = receiver()
    journal.append(EventName.FIRST_STEP)
    journal.append(EventName.DECISION, action="continue", reason="preempted")
    journal.append(EventName.DECISION, action="stop", reason="the budget is spent")
    notifier(tmp_path, hook.url).tell_news()
    told = notifier(tmp_path, hook.url)
    told.tell_news()
    journal.append(EventName.SAVES_KEEP_FAILING, reason="No space left on device", in_a_row=3)
    told.tell_news()
    assert [(each["event"], each["text"]) for each in hook.bodies] == [
        ("decision", "decision: stop: the budget is spent"),
        ("saves keep failing", "saves keep failing: No space left on device"),
    ]
    assert (hook.bodies[1]["run"], hook.bodies[1]["facts"], hook.bodies[1]["attempt"]) == (
        tmp_path.name, {"in_a_row": 3}, "7.0.0",
    )  # fmt: skip


def test_a_verdict_can_be_chosen_by_its_cause(tmp_path: Path, journal: Journal, receiver):
    hook = receiver()
    for cause in ("hang", "node lost"):
        journal.append(EventName.VERDICT, cause=cause, reason="why")
    notifier(tmp_path, hook.url, events=["verdict: hang"]).tell_news()
    assert [each["text"] for each in hook.bodies] == ["verdict: hang: why"]


def test_text_of_a_run_cannot_speak_for_itself(tmp_path: Path, journal: Journal, receiver):
    hook = receiver()
    nasty = "\x1b[2J<!channel> <https://evil|click> *bold* @all\nslurmft: all is well"
    journal.append(EventName.DECISION, action="stop", reason=nasty, node="n\x07")
    notifier(tmp_path, hook.url, form="slack").tell_news()
    (told,) = hook.bodies
    assert "\x1b" not in told["text"] and "\n" not in told["text"] and "<" not in told["text"]
    assert "@all" not in told["text"] and "*bold*" not in told["text"] and told["mrkdwn"] is False
    assert "&lt;" in told["text"]


def test_a_command_gets_the_message_as_json(tmp_path: Path, journal: Journal):
    journal.append(EventName.DECISION, action="stop", reason="$(touch gone); x")
    out = tmp_path / "out"
    script = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    notifier(tmp_path, command=[sys.executable, "-c", script]).tell_news()
    assert json.loads(out.read_text())["text"] == "decision: stop: $(touch gone); x"


def test_a_message_that_was_not_taken_is_tried_again(tmp_path: Path, journal: Journal, receiver):
    hook, pauses = receiver(500, 503, 200), list[float]()
    journal.append(EventName.DECISION, action="stop", reason="x")
    notifier(tmp_path, hook.url, pauses).tell_news()
    assert len(hook.bodies) == 3 and pauses == [1, 2]


def test_a_message_that_is_never_taken_is_given_up(
    tmp_path: Path, journal: Journal, receiver, caplog: pytest.LogCaptureFixture
):  # fmt: skip
    hook, pauses = receiver(404), list[float]()
    journal.append(EventName.DECISION, action="stop", reason="x")
    with caplog.at_level(logging.DEBUG):
        notifier(tmp_path, hook.url, pauses, retries=2).tell_news()
    assert len(hook.bodies) == 3 and pauses == [1, 2]
    assert "it answered 404" in caplog.text and SECRET not in caplog.text
    notifier(tmp_path, hook.url, pauses).tell_news()
    assert len(hook.bodies) == 3


def test_no_redirect_is_followed(tmp_path: Path, journal: Journal, receiver):
    hook = receiver(302)
    journal.append(EventName.DECISION, action="stop", reason="x")
    notifier(tmp_path, hook.url, retries=0).tell_news()
    assert len(hook.bodies) == 1


@pytest.mark.parametrize("listens", [True, False], ids=["silent", "gone"])
def test_the_url_is_never_told(tmp_path: Path, journal: Journal, caplog: pytest.LogCaptureFixture, listens: bool):
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        if listens:
            dead.listen()
        url = f"http://127.0.0.1:{dead.getsockname()[1]}/{SECRET}"
        journal.append(EventName.DECISION, action="stop", reason="x")
        with caplog.at_level(logging.DEBUG):
            began_s = time.monotonic()
            notifier(tmp_path, url, retries=1, timeout_s=0.3).tell_news()
    assert time.monotonic() - began_s < 10 * slowness()
    assert "did not take a message" in caplog.text and SECRET not in caplog.text
    assert all(SECRET not in path.read_text() for path in tmp_path.iterdir())


@pytest.mark.parametrize("url", ["ftp://x", "https://a b", "file:///etc/passwd", "", "https://x\nhttps://y"])
def test_what_is_no_url_is_refused_without_repeating_it(url: str):
    with pytest.raises(UsageError, match="variable HOOK does not hold one URL") as error:
        webhook_url(NotifyConfig(webhook_variable="HOOK"), {"HOOK": url})
    assert not url or url not in str(error.value)


@pytest.mark.parametrize("url", ["http://[", "http://x:99999/", "https://\u200b"])
def test_an_odd_url_only_costs_the_message(tmp_path: Path, journal: Journal, url: str):
    journal.append(EventName.DECISION, action="stop", reason="x")
    try:
        told = notifier(tmp_path, url, retries=0, timeout_s=1)
    except UsageError:
        return
    told.tell_news()


def test_a_url_that_others_can_read_is_refused(tmp_path: Path):
    path = tmp_path / "url"
    path.write_text("https://hooks.example/x\n")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others may read"):
        webhook_url(NotifyConfig(webhook_file=path), {})
    path.chmod(0o600)
    assert webhook_url(NotifyConfig(webhook_file=path), {}) == "https://hooks.example/x"


def test_there_are_no_more_messages_than_the_limit(tmp_path: Path, journal: Journal, receiver):
    hook, now = receiver(), [time.time()]
    told = Notifier(tmp_path, NotifyConfig(webhook_variable="HOOK", per_hour=3), {"HOOK": hook.url},
                    clock=lambda: now[0], pause=lambda _: False)  # fmt: skip
    for number in range(10):
        journal.append(EventName.DECISION, action="stop", reason=str(number))
    told.tell_news()
    assert [each["text"][-1] for each in hook.bodies] == ["0", "1", "2"]
    now[0] += 3601
    journal.append(EventName.DECISION, action="stop", reason="later")
    told.tell_news()
    assert hook.bodies[-1]["left_out"] == 7 and hook.bodies[-1]["text"].endswith("later")


def test_old_events_are_no_news(tmp_path: Path, journal: Journal, receiver):
    hook = receiver()
    journal.append(EventName.DECISION, action="stop", reason="x")
    told = Notifier(tmp_path, NotifyConfig(webhook_variable="HOOK"), {"HOOK": hook.url},
                    clock=lambda: time.time() + 90_000, pause=lambda _: False)  # fmt: skip
    told.tell_news()
    assert hook.bodies == []


@pytest.mark.parametrize("state", ["", "{}", '{"format": 1, "offset": "x"}', '{"format": 1, "offset": -1, "head": ""}'])
def test_a_damaged_state_begins_anew(tmp_path: Path, journal: Journal, receiver, state: str):
    hook = receiver()
    (tmp_path / "notify.json").write_text(state)
    journal.append(EventName.DECISION, action="stop", reason="x")
    notifier(tmp_path, hook.url).tell_news()
    assert len(hook.bodies) == 1


def test_the_state_has_no_more_than_a_place(tmp_path: Path, journal: Journal, receiver):
    journal.append(EventName.DECISION, action="stop", reason="x")
    notifier(tmp_path, receiver().url).tell_news()
    state = json.loads((tmp_path / "notify.json").read_text())
    assert state["offset"] == os.path.getsize(journal.path) and set(state) == {"format", "offset", "head"}
