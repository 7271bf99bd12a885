"""Counts from journals, values of living runs, and where they are published."""

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as old_families

from slurmft.cli.status import Watcher
from slurmft.inference.endpoint import HighAvailabilityCluster, RouterAddress
from slurmft.policy.verdict import Cause
from slurmft.reporting import metrics as reporting_metrics
from slurmft.reporting.metrics import MAX_SERIES, RunMetrics, families, looks_at
from slurmft.storage import run_folder
from slurmft.storage.journal import EventName, JournalTail
from slurmft.storage.run_folder import LiveView, RunFolder
from slurmft.system.exposition import encoded, text
from slurmft.system.files import LOG_LIMIT_BYTES, write_json


def line(event: str, at: float = 0.0, attempt: str = "7.0.0", **details: object) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(1_800_000_000 + at)) + "+00:00"
    return json.dumps({"format": 1, "at": when, "attempt": attempt, "event": event, **details}) + "\n"


LIFE = [
    line("submitted", 0, "", job="7"),
    line("attempt started", 10, nodes="n[1-2]"),
    line("first step", 25),
    line("worker failed", 100, rank=1, node="n1"),
    line("verdict", 100, cause="node lost", first_step=0, last_step=80, saved_step=50),
    line("decision", 100, action="continue"),
    line("requeued", 105, job="7"),
    line("attempt started", 165, "7.1.0", nodes="n[3-4]"),
    line("first step", 180, "7.1.0"),
]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "gpt")
    folder.path.mkdir()
    append(folder, LIFE)
    return folder


def append(run: RunFolder, lines: Sequence[str], *, end: str = "") -> None:
    with run.journal().path.open("a") as stream:
        stream.write("".join(lines) + end)


def values(body: str) -> dict[str, float]:
    """Name with the labels that differ from run to run left out -> value."""
    found = {}
    for family in old_families(body):
        for sample in family.samples:
            own = [f"{key}={sample.labels[key]}" for key in ("cause", "category") if key in sample.labels]
            found[" ".join([sample.name.removeprefix("slurmft_run_"), *own])] = sample.value
    return found


def test_counts_come_from_the_journal(run: RunFolder):
    found = values(text(families([RunMetrics(run).look()])))
    expected = {
        "attempts_total": 2, "requeues_total": 1, "worker_failures_total": 1, "lost_steps_total": 30,
        "ends_total cause=node lost category=failure": 1, "seconds_total category=queue": 70,
        "seconds_total category=start": 30, "seconds_total category=work": 75,
        "seconds_total category=between attempts": 5, "active": 1, "finished": 0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert "waiting_since_timestamp_seconds" not in found and "step" not in found


def test_only_what_is_new_is_read(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    metrics = RunMetrics(run)
    metrics.look()
    append(run, LIFE * 2000)
    metrics.look()
    read = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *given: read.append(part := real(*given)) or part)
    append(run, [line("attempt started", 900, "7.2.0")])
    assert metrics.look().counts["attempts"] == 4003
    assert sum(map(len, read)) < 1000


def test_a_line_counts_when_it_is_whole(run: RunFolder):
    metrics = RunMetrics(run)
    append(run, [], end=(half := line("worker hung", 200))[:30])
    assert metrics.look().counts["hangs"] == 0
    append(run, [], end=half[30:])
    assert metrics.look().counts["hangs"] == 1


@pytest.mark.parametrize("keeps_inode", [True, False], ids=["cut", "replaced"])
def test_counts_never_go_back(run: RunFolder, keeps_inode: bool):
    metrics = RunMetrics(run)
    before = metrics.look()
    path = run.journal().path
    if not keeps_inode:
        path.unlink()
    path.write_text(line("attempt started", 500, "8.0.0"))
    after = metrics.look()
    assert all(after.counts[name] >= value for name, value in before.counts.items())
    assert after.info["job"] == "8"
    append(run, [line("attempt started", 500 + restart, f"8.{restart}.0") for restart in range(1, 5)])
    assert metrics.look().counts["attempts"] == 5


def test_a_replaced_journal_of_the_same_length_is_noticed(run: RunFolder):
    tail = JournalTail(run.path)
    assert len(list(tail.news())) == len(LIFE)
    size = run.journal().path.stat().st_size
    run.journal().path.write_text(other := line("cancelled", 5).rstrip("\n").ljust(size - 1) + "\n")
    assert len(other) == size
    assert [entry.event for entry in tail.news()] == ["cancelled"]


def test_damage_is_left_out(run: RunFolder):
    append(run, ["nonsense\n", "[1]\n", '{"format": 99, "at": "2027-01-01T00:00:00+00:00", "event": "worker hung"}\n',
                 "x" * 100 + "\x00\n", line("verdict", 300, cause=["odd"], first_step="x"),
                 line("replica ready", 301, node=["n"], replica={})])  # fmt: skip
    look = RunMetrics(run).look()
    assert look.counts["hangs"] == 0
    assert look.ends == {"node lost": 1, "other": 1}


def test_a_line_without_an_end_is_no_burden(run: RunFolder):
    append(run, [], end="x" * (9 << 20))
    tail = JournalTail(run.path)
    assert len(list(tail.news())) == len(LIFE)
    append(run, ["\n", line("worker hung", 300)])
    assert [entry.event for entry in tail.news()][-1:] == ["worker hung"]


def test_a_journal_that_is_mostly_a_hole_is_not_read(run: RunFolder) -> None:
    """It costs its maker nothing, and would keep every look at all runs busy for hours."""
    os.truncate(run.journal().path, LOG_LIMIT_BYTES + 1)
    looks, problems = looks_at([run])
    assert (looks, problems) == ([], [f"{run.name}: is longer than {LOG_LIMIT_BYTES} bytes"])
    assert Watcher([run], run).look().problem.startswith("the journal cannot be read: is longer than")


def living(run: RunFolder) -> None:
    now = time.time()
    run.write_progress(
        at=now, attempt="7.1.0", step=90, until=100, saved=50, metric=2.5, world_size=4, state="training"
    )
    run_folder.write(run.path, LiveView(at=now, attempt="7.1.0", heartbeat_s=0.5, hang_used=0.25, restarts_left=3,
                                       save_interval_steps=25))  # fmt: skip


def test_the_living_run(run: RunFolder):
    living(run)
    found = values(text(families([RunMetrics(run).look()])))
    expected = {"step": 90, "until_step": 100, "saved_step": 50, "loss": 2.5, "ranks": 4, "failed_saves": 0,
                "heartbeat_age_seconds": 0.5, "hang_budget_used_ratio": 0.25, "restarts_left": 3,
                "save_interval_steps": 25}  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert time.time() - found["progress_timestamp_seconds"] < 10


def test_what_an_earlier_attempt_reported_is_not_shown(run: RunFolder):
    living(run)
    append(run, [line("attempt started", 900, "7.2.0")])
    found = values(text(families([RunMetrics(run).look()])))
    assert "step" not in found and "restarts_left" not in found


def test_the_newest_progress_keeps_its_time(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    clock = iter([100.0, 100.0, 200.0, 300.0, 300.0]).__next__
    monkeypatch.setattr(run_folder.time, "time", clock)

    def told(**facts: int | str) -> tuple[float, float]:
        run.write_progress(at=1.0, **facts)
        progress = run.progress() or {}
        return progress["progressed_at"], progress["saved_at"]

    assert told(attempt="a", step=1, saved=0) == (100, 100)
    assert told(attempt="a", step=1, saved=0) == (100, 100)
    assert told(attempt="a", step=2, saved=0) == (200, 100)
    assert told(attempt="b", step=1, saved=0) == (300, 300)  # it has gone back, and that is progress of its own


def test_no_run_has_more_series_than_promised(run: RunFolder):
    append(run, [line("verdict", 400 + at, cause=str(cause)) for at, cause in enumerate([*Cause, "new", "newer"])])
    append(
        run, [line("requeued", 499), line("attempt started", 500, "7.1.0"), line("replica ready", node="n", replica=1)]
    )
    living(run)
    body = text(families([RunMetrics(run).look()]))
    assert len([each for each in body.splitlines() if not each.startswith("#")]) <= MAX_SERIES


def test_both_formats_can_be_read_whatever_a_run_is_called(tmp_path: Path):
    run = RunFolder(tmp_path / 'x"\\ \n{}\udcff')
    run.path.mkdir()
    append(run, LIFE)
    found = families([RunMetrics(run).look()])
    assert values(text(found))["attempts_total"] == 2
    body, kind = encoded(found, "application/openmetrics-text; version=1.0.0")
    assert "openmetrics" in kind and list(text_string_to_metric_families(body.decode()))


def test_runs_of_one_name_do_not_spoil_the_file(tmp_path: Path, run: RunFolder):
    other = RunFolder(tmp_path / "elsewhere" / "gpt")
    other.path.mkdir(parents=True)
    append(other, LIFE)
    looks, problems = looks_at([run, other])
    assert len(looks) == 1 and "another run" in problems[0]


def test_one_unreadable_run_hides_no_other(tmp_path: Path, run: RunFolder):
    odd = RunFolder(tmp_path / "odd")
    odd.path.mkdir()
    os.mkfifo(odd.journal().path)
    looks, problems = looks_at([odd, run])
    assert [look.labels["run"] for look in looks] == ["gpt"] and problems[0].startswith("odd: ")


def test_the_file_is_for_all_and_replaced(tmp_path: Path, run: RunFolder):
    path = reporting_metrics.textfile_of(tmp_path, "an/n", "../gpt x")
    assert path.parent == tmp_path and path.name == "slurmft-an_n-.._gpt_x.prom"
    reporting_metrics.write_textfile(path, families([RunMetrics(run).look()]))
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".tmp"] == []


def scraped(port: int, path: str = "/metrics", token: str = "", accept: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def test_a_scrape_needs_the_token(run: RunFolder):
    metrics = RunMetrics(run)
    scrapes = reporting_metrics.Scrapes("127.0.0.1", 0, lambda: families([metrics.look()]), token="s" * 20)
    try:
        assert scraped(scrapes.port)[0] == 401
        assert scraped(scrapes.port, token="t" * 20)[0] == 401
        assert scraped(scrapes.port, "/", token="s" * 20)[0] == 404
        code, body = scraped(scrapes.port, token="s" * 20)
        assert code == 200 and values(body)["attempts_total"] == 2
        assert scraped(scrapes.port, token="s" * 20, accept="application/openmetrics-text")[1].endswith("# EOF\n")
    finally:
        scrapes.close()


def test_slow_strangers_keep_no_scrape_out(run: RunFolder):
    scrapes = reporting_metrics.Scrapes("127.0.0.1", 0, list, token="s" * 20)
    slow = []
    try:
        for _ in range(3 * reporting_metrics.MAX_SCRAPES):
            slow.append(one := socket.create_connection(("127.0.0.1", scrapes.port), timeout=10))
            one.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            asked = urllib.request.Request(
                f"http://127.0.0.1:{scrapes.port}/metrics", headers={"Authorization": "Bearer " + "s" * 20}
            )
            with urllib.request.urlopen(asked, timeout=10) as answer:
                assert answer.status == 200
    finally:
        for each in slow:
            each.close()
        scrapes.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a run of another user")
@pytest.mark.parametrize("which", ["the run", "its note"])
def test_the_hosts_that_other_users_choose_are_no_targets(run: RunFolder, which: str):
    write_json(run.path / reporting_metrics.PORT_FILE, {"address": "0.0.0.0", "host": "evil.example", "port": 80})
    HighAvailabilityCluster((RouterAddress(0, "n", ("evil.example",), 81),)).write(run.path)
    assert len(reporting_metrics.targets([run])) == 2
    if which == "the run":
        os.chown(run.path, 4711, 4711)
    for path in run.path.iterdir():
        os.chown(path, 4711, 4711)
    assert reporting_metrics.targets([run]) == []


def test_targets_are_those_that_can_be_reached(tmp_path: Path, run: RunFolder):
    def told(**facts: object) -> list[str]:
        (run.path / reporting_metrics.PORT_FILE).write_text(json.dumps({"format": 1, **facts}))
        return [target for each in reporting_metrics.targets([run]) for target in each["targets"]]

    here = os.uname().nodename
    assert told(address="10.0.0.7", host="n7", port=91) == ["10.0.0.7:91"]
    assert told(address="fd00::7", host="n7", port=91) == ["[fd00::7]:91"]
    assert told(address="0.0.0.0", host="n7", port=91) == ["n7:91"]
    assert told(address="127.0.0.1", host=here, port=91) == ["127.0.0.1:91"]
    assert told(address="127.0.0.1", host="elsewhere", port=91) == []
    assert told(address="evil host/", host="n7", port=91) == told(address="10.0.0.7", host="n7", port="x") == []
    (run.path / reporting_metrics.PORT_FILE).unlink()
    reporting_metrics.write_targets(tmp_path / "targets.json", [run])
    assert json.loads((tmp_path / "targets.json").read_text()) == []


def test_the_events_that_are_counted_exist():
    from slurmft.reporting import metrics as reporting_metrics

    assert set(reporting_metrics._COUNTED) | set(reporting_metrics._BEGINS) <= set(EventName)


def test_an_idle_endpoint_does_not_stand_still(run: RunFolder):
    run.write_progress(at=time.time(), attempt="7.1.0", resumed=0, step=90, saved=90, state="running")
    assert "progress_timestamp_seconds" not in RunMetrics(run).look().gauges


def test_events_that_count_nothing_are_skipped_but_odd_lines_are_looked_at(run: RunFolder):
    append(run, [line("agents ready", 1), '{"event": "worker hung", "at": "2027-01-01T00:00:00+00:00", "format": 1}\n'])
    assert [entry.event for entry in JournalTail(run.path, names={"worker hung"}).news()] == ["worker hung"]
