"""The supervisor's side: reports of all nodes in, verdicts out; the past survives restarts."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmft.config.run import RunConfig, validate
from slurmft.ipc.messages import RankTimings, TimingsReport
from slurmft.policy.stragglers import StragglerVerdict
from slurmft.storage import history
from slurmft.storage.journal import Journal
from slurmft.supervisor.stragglers import NodePast, StragglerWatch

NODES = 4
FAST, SLOW = 0.1, 0.3


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A watch whose nodes report what the test says."""

    def __init__(self, folder: Path, *, nproc: int = 1, hosts: tuple[str, ...] = ("n1", "n2", "n3", "n4"),
                 **settings: Any) -> None:  # fmt: skip
        self.config = configured(folder, nodes=len(hosts), nproc=nproc, **settings)
        self.folder, self.hosts, self.nproc, self.clock = folder, hosts, nproc, Clock()
        self.journal = Journal(folder, attempt="1.0.0")
        self.watch = StragglerWatch(self.config, folder, self.journal, workload="w", clock=self.clock)
        self.watch.exchange()
        self.number = 0

    def window(self, *work: float | None, step: float = 0.5, role: str | list[str] = "") -> StragglerVerdict | None:
        """One window with each rank's own work; None: it reports nothing."""
        self.number += 1
        self.clock.now += 300
        for node, host in enumerate(self.hosts):
            ranks = [
                facts(rank, own, step, role if isinstance(role, str) else role[rank])
                for rank in range(node * self.nproc, (node + 1) * self.nproc)
                if (own := work[rank]) is not None
            ]
            self.watch.note(host, timings(self.number, *ranks))
        return self.watch.verdict()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [dict(event.details) for event in self.journal.read() if event.event == name]


def configured(folder: Path, *, nodes: int, nproc: int, **settings: Any) -> RunConfig:
    return validate(
        {"command": "x", "run_folder": str(folder), "nodes": nodes, "nproc_per_node": nproc,
         "straggler_detection": settings}, source="test",
    )  # fmt: skip


def facts(rank: int, work: float, step: float, role: str) -> RankTimings:
    sections = (("own work", work, 10), ("step", step, 10), ("data", FAST / 2, 10))
    return RankTimings(rank=rank, role=role, device=1, sections=sections)


def timings(window: int, *ranks: RankTimings) -> TimingsReport:
    return TimingsReport(window=window, ranks=ranks)


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


def test_a_slow_node_is_convicted_in_the_third_of_five_windows_and_once(bench, caplog):
    caplog.set_level(logging.INFO)
    verdicts = [bench.window(FAST, FAST, SLOW, FAST) for _ in range(5)]
    assert [verdict is not None for verdict in verdicts] == [False, False, True, False, False]
    found = verdicts[2]
    assert found is not None
    assert (found.nodes, found.ranks, found.stop, found.follows_rank) == (("n3",), (2,), False, False)
    assert found.score == pytest.approx(FAST / SLOW)
    assert found.work_ratio == pytest.approx(3.0)
    assert found.slowdown == pytest.approx(0.5 / 0.3)  # 0.2 s of a step of 0.5 s are waited for it
    assert found.step_s == 0.5
    assert "n3: own work takes 3.00 times as long" in found.text
    assert bench.events("straggler suspected") == [{"nodes": ["n3"], "ranks": [2], "score": 0.333}]
    (event,) = bench.events("straggler detected")
    assert (event["nodes"], event["slowdown"]) == (["n3"], 1.667)
    assert "STRAGGLER DETECTION WARNING: Some CPUs have worse relative performance. Affected ranks: [2]" in caplog.text
    assert " Straggler report processing time: 0.0" in caplog.text


def test_a_node_that_stays_slow_is_convicted_once_and_one_that_recovers_may_be_again(bench):
    slow, fine = [FAST, FAST, SLOW, FAST], [FAST] * 4
    assert sum(bench.window(*slow) is not None for _ in range(20)) == 1
    assert len(bench.events("straggler suspected")) == 1
    for _ in range(5):
        bench.window(*fine)
    assert sum(bench.window(*slow) is not None for _ in range(20)) == 1


def test_a_single_bad_window_names_nobody_in_the_journal(bench):
    bench.window(FAST, FAST, SLOW, FAST)
    bench.window(FAST, SLOW, FAST, FAST)
    assert bench.events("straggler suspected") == []


def test_outliers_in_two_of_five_windows_are_forgiven(bench):
    slow = [FAST, FAST, SLOW, FAST]
    fine = [FAST] * 4
    assert [bench.window(*each) for each in (slow, fine, slow, fine, fine, fine, slow, slow)] == [None] * 8
    assert bench.window(*slow) is not None


def test_a_node_that_is_missing_is_neither_accused_nor_forgiven(bench):
    assert [bench.window(FAST, FAST, SLOW, FAST) for _ in range(2)] == [None, None]
    for _ in range(9):
        assert bench.window(FAST, FAST, None, FAST) is None  # closed by the next window's first report
    assert "Partial coverage: 3/4 ranks" in bench.watch.last_report
    assert bench.window(FAST, FAST, SLOW, FAST) is not None


@pytest.mark.parametrize(
    ("work", "nproc"),
    [
        pytest.param([FAST, SLOW] * 4, 2, id="a slow stage on every node, without roles"),
        pytest.param([FAST, FAST, FAST, 0.001], 1, id="a fast node"),
        pytest.param([FAST, FAST, SLOW, SLOW], 1, id="half of the nodes"),
        pytest.param([0.001, 0.001, 0.004, 0.001], 1, id="steps of milliseconds"),
        pytest.param([1e-9] * 3 + [5.0], 1, id="no past at all but one wild node is fine to accuse"),
    ],
)
def test_who_is_never_accused(tmp_path, work, nproc):
    bench = Bench(tmp_path, nproc=nproc)
    verdicts = [bench.window(*work) for _ in range(6)]
    wild = work[-1] == 5.0
    assert any(verdicts) is wild


def test_roles_tell_a_slow_rank_from_a_slow_stage(tmp_path):
    bench = Bench(tmp_path, nproc=2)
    roles = ["first", "last"] * 4
    work = [FAST, SLOW] * 4
    assert [bench.window(*work, role=roles) for _ in range(6)] == [None] * 6
    work[3] = 1.0
    found = [bench.window(*work, role=roles) for _ in range(3)][-1]
    assert found is not None
    assert (found.nodes, found.ranks) == (("n2",), (3,))


def test_of_two_nodes_only_the_past_can_tell(tmp_path):
    bench = Bench(tmp_path, hosts=("n1", "n2"))
    assert [bench.window(FAST, FAST) for _ in range(4)] == [None] * 4
    verdicts = [bench.window(FAST, SLOW) for _ in range(3)]
    assert verdicts[-1] is not None
    assert verdicts[-1].nodes == ("n2",)


def test_work_that_changes_for_all_accuses_nobody(tmp_path):
    bench = Bench(tmp_path, hosts=("n1", "n2"))
    assert [bench.window(FAST, FAST) for _ in range(4)] == [None] * 4
    assert [bench.window(SLOW, SLOW) for _ in range(6)] == [None] * 6


def test_the_past_survives_a_restart_on_other_ranks(tmp_path):
    first = Bench(tmp_path)
    for _ in range(4):
        first.window(FAST, FAST, FAST, FAST)
    for _ in range(2):
        assert first.window(FAST, FAST, SLOW, FAST) is None
    first.watch.exchange()
    second = Bench(tmp_path, hosts=("n3", "n1", "n2", "n4"))
    second.clock.now = first.clock.now
    found = second.window(SLOW, FAST, FAST, FAST)
    assert found is not None
    assert (found.nodes, found.ranks) == (("n3",), (0,))
    assert "CPU individual performance:" in second.watch.last_report


def test_windows_of_yesterday_are_forgotten(tmp_path):
    bench = Bench(tmp_path)
    assert [bench.window(FAST, FAST, SLOW, FAST) for _ in range(2)] == [None, None]
    bench.clock.now += 2 * 86_400
    assert [bench.window(FAST, FAST, SLOW, FAST) is None for _ in range(3)] == [True, True, False]


def test_a_rank_that_is_slow_wherever_it_runs_is_not_moved_again(tmp_path):
    first = Bench(tmp_path, stop_if_detected=True)
    found = [first.window(FAST, SLOW, FAST, FAST) for _ in range(3)][-1]
    assert found is not None
    assert found.stop
    assert [each.suspect.node for each in found.evidence(1.0)] == ["n2"]
    first.watch.exchange()
    elsewhere = Bench(tmp_path, hosts=("n1", "n9", "n3", "n4"), stop_if_detected=True)
    elsewhere.clock.now = first.clock.now
    again = [elsewhere.window(FAST, SLOW, FAST, FAST) for _ in range(3)][-1]
    assert again is not None
    assert (again.nodes, again.follows_rank, again.stop) == (("n9",), True, False)
    assert again.evidence(1.0) == []
    assert "no node's fault" in again.text


def test_whether_it_pays_has_both_numbers(tmp_path):
    bench = Bench(tmp_path, requeue_cost_s=100)
    found = [bench.window(FAST, SLOW, FAST, FAST) for _ in range(3)][-1]
    assert found is not None
    enough, little = bench.watch.pays(found, steps_left=10_000), bench.watch.pays(found, steps_left=100)
    assert (enough.worth, little.worth) == (True, False)
    assert enough.gain_s == pytest.approx(0.4 * 5000 * 4)
    assert "8000" in enough.reason
    assert "400" in enough.reason


def test_without_a_session_named_sections_are_compared(tmp_path):
    bench = Bench(tmp_path)
    found = None
    for number in range(1, 4):
        for rank, host in enumerate(bench.hosts):
            sections = (("data", 1.0 if rank == 3 else 0.2, 9), ("math", 0.3, 9))
            message = RankTimings(rank=rank, role="", device=2, sections=sections)
            bench.watch.note(host, timings(number, message))
        found = bench.watch.verdict() or found
    assert found is not None
    assert (found.nodes, found.step_s == found.step_s) == (("n4",), False)
    assert not bench.watch.pays(found, steps_left=10**6).worth
    assert "GPU relative performance:" in bench.watch.last_report


def test_late_double_and_foreign_reports_change_nothing(bench):
    bench.window(FAST, FAST, SLOW, FAST)
    report = bench.watch.last_report
    for window, rank in ((1, 0), (0, 0), (-5, 1), (2, 4), (2, 10**6)):
        message = timings(window, facts(rank, 99.0, 1.0, ""))
        bench.watch.note("n1", message)
    assert bench.watch.last_report == report
    assert bench.window(FAST, FAST, SLOW, FAST) is None
    assert bench.window(FAST, FAST, SLOW, FAST) is not None


def test_the_log_can_be_switched_off_and_named(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    Bench(tmp_path, enable_logging=False).window(FAST, FAST, FAST, FAST)
    assert caplog.records == []
    Bench(tmp_path, logger_name="mine").window(FAST, FAST, FAST, FAST)
    assert {record.name for record in caplog.records} == {"mine"}


def test_more_section_names_than_there_is_room_for(tmp_path):
    bench = Bench(tmp_path)
    for rank, host in enumerate(bench.hosts):
        sections = tuple((f"{rank}.{number}", 1.0, 9) for number in range(30))
        message = RankTimings(rank=rank, role=f"r{rank}", device=1, sections=sections)
        bench.watch.note(host, timings(1, message))
    assert bench.watch.verdict() is None


# its file


def test_a_past_that_is_read_late_is_added_to_what_happened_meanwhile(tmp_path):
    first = Bench(tmp_path)
    for _ in range(2):
        first.window(FAST, FAST, SLOW, FAST)
    first.watch.exchange()
    second = Bench(tmp_path)
    second.clock.now = first.clock.now
    second.watch = StragglerWatch(second.config, tmp_path, second.journal, workload="w", clock=second.clock)
    assert second.window(FAST, FAST, FAST, FAST) is None
    second.watch.exchange()  # reads; writes nothing, since what it has read is not taken in yet
    assert len(history.read_stragglers(tmp_path, "w").nodes["n3"].outcomes) == 2
    assert second.window(FAST, FAST, SLOW, FAST) is not None
    second.watch.exchange()
    found = history.read_stragglers(tmp_path, "w")
    assert len(found.nodes["n1"].outcomes) == 4
    assert found.nodes["n1"].best[0].seconds == (FAST,) * 3


def test_a_second_thread_writes_while_windows_come(tmp_path):
    bench = Bench(tmp_path)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            bench.watch.exchange()

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(100):
        bench.window(FAST, FAST, FAST, FAST)
    stop.set()
    thread.join()
    bench.watch.exchange()
    found = history.read_stragglers(tmp_path, "w")
    assert found.nodes["n1"].best[0].seconds == (FAST,) * 3
    assert len(found.nodes["n1"].outcomes) == 5


def test_another_workload_keeps_only_who_was_convicted(tmp_path):
    bench = Bench(tmp_path)
    for _ in range(4):
        bench.window(FAST, SLOW, FAST, FAST)
    bench.watch.exchange()
    assert history.read_stragglers(tmp_path, "w").nodes != {}
    other = history.read_stragglers(tmp_path, "another")
    assert other.nodes == {}
    assert [each.nodes for each in other.convictions] == [("n2",)]


PAST = '{"format": 1, "workload": "w", "convictions": [], "nodes": %s}'


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 99}',
        '{"format": 1}',
        PAST % '{"a": 1}',
        PAST % '[["a", {"best": {"0": ["", [NaN]]}, "outcomes": []}]]',
        PAST.replace("[]", '[{"nodes": 1}]') % "[]",
        "\0\xff",
    ],
)
def test_a_damaged_past_is_ignored_and_replaced(tmp_path, content, caplog):
    path = tmp_path / history.HISTORY_FILE
    path.write_text(content)
    bench = Bench(tmp_path)
    assert "is ignored" in caplog.text
    bench.window(FAST, FAST, FAST, FAST)
    bench.watch.exchange()
    assert json.loads(path.read_text())["nodes"]


def test_odd_names_come_back_as_they_were(tmp_path):
    hosts = ("a b", 'q"uote', "new\nline", "\u00fc")
    bench = Bench(tmp_path, hosts=hosts)
    bench.window(FAST, FAST, FAST, FAST)
    bench.watch.exchange()
    assert list(history.read_stragglers(tmp_path, "w").nodes) == list(hosts)


def test_a_full_disk_keeps_the_old_file_and_the_next_write_works(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    bench.window(FAST, FAST, FAST, FAST)
    with monkeypatch.context() as patch:
        patch.setattr(history, "write_json", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            bench.watch.exchange()
    bench.watch.exchange()
    assert history.read_stragglers(tmp_path, "w").nodes != {}


def test_the_file_stays_bounded(tmp_path):
    node = history.NodeHistory(outcomes=[(1.0, True)])
    nodes = {f"n{number}": node for number in range(history.MAX_NODES + 7)}
    history.write_stragglers(tmp_path, "w", history.History(nodes=nodes))
    found = history.read_stragglers(tmp_path, "w")
    assert len(found.nodes) == history.MAX_NODES
    assert "n0" not in found.nodes


def test_the_best_time_is_no_lucky_one(tmp_path):
    past = NodePast(tmp_path, "w", 2, 1, 5)
    past.place(0, "a", "")
    past.place(1, "b", "")
    for window in ([1.0, np.nan], [0.1, 2.0], [1.1, 2.0]):
        assert np.isnan(past.best_s()).all()
        past.measured(np.array(window))
    assert past.best_s()[0] == 1.1
    assert np.isnan(past.best_s()[1])
    past.measured(np.array([9.0, 9.0]))
    assert past.best_s().tolist() == [1.1, 9.0]
    past.place(0, "a", "another role")
    assert np.isnan(past.best_s()[0])
