"""The look at all ranks before a kill: whom it asks, what the journal tells of it, and how ``explain`` shows it."""

import asyncio
import json
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import slowness

from slurmft.ipc.channel import encoded
from slurmft.ipc.messages import TakeEvidence
from slurmft.operations.control import look_told
from slurmft.policy.judge import Blame, Named, Summary, Where, WorkerEnd, blame
from slurmft.policy.stop import tick_of
from slurmft.storage.journal import Event, Journal
from slurmft.supervisor.agents import AgentLost
from slurmft.supervisor.hangs import MAX_LINES, as_event, ended_by_watchdog, look_at_all, with_ends


def facts(rank: int, kind: Where = Where.COLLECTIVE, **changes: Any) -> dict[str, Any]:
    known = {
        "rank": rank, "pid": 100 + rank, "kind": kind.value, "doing": "waits for the other ranks in all_reduce",
        "process": "S", "wchan": "futex_wait", "attached": True, "state": 2, "step": 7, "tick": tick_of(7),
        "sections": [], "python_top": ["/t.py:1 f"], "exit_code": None, "killed": False, "collectives": [],
    }  # fmt: skip
    return {**known, **changes}


class Link:
    """An agent that answers, or does not."""

    def __init__(self, node: int, ranks: list[dict[str, Any]] | None, takes_s: float = 0.0) -> None:
        self.node, self.host, self._ranks, self._takes_s = node, f"n{node}", ranks, takes_s
        self.address = f"10.0.0.{node}"
        self.channel: Any = None

    def ask_unread(self, call: TakeEvidence) -> tuple[int, asyncio.Future[bytes]]:
        return 1, asyncio.ensure_future(self._answer())

    def forget(self, number: int) -> None:
        assert number == 1

    def unanswered(self, call: TakeEvidence, timeout_s: float) -> AgentLost:
        assert 0 < call.within_s + call.dumps_within_s < timeout_s
        return AgentLost("too late")

    async def _answer(self) -> bytes:
        await asyncio.sleep(self._takes_s)
        if self._ranks is None:
            raise AgentLost("gone")
        return encoded({"kind": "reply", "ranks": self._ranks})


class Pool:
    def __init__(self, *links: Link) -> None:
        self.links = {link.node: link for link in links}
        self.members = list(links)


def look(tmp_path: Any, *links: Link, **options: Any) -> tuple[Blame, Event]:
    journal = Journal(tmp_path, attempt="7.0.0")
    taken = asyncio.run(look_at_all(Pool(*links), tmp_path / "at", per_node=2, **options))  # type: ignore[arg-type]
    found = taken.conclude(journal)
    (event,) = journal.read()
    return found, event


def end(rank: int, code: int, **changes: Any) -> WorkerEnd:
    values = {"rank": rank, "node": f"n{rank // 2}", "code": code, "attached": True, "stopped": False,
              "finished": False, "killed": False, "error": "", "step": 7}  # fmt: skip
    return WorkerEnd(**{**values, **changes})


def test_one_in_user_code_is_told_from_three_that_wait(tmp_path):
    odd = facts(
        2,
        Where.ELSEWHERE,
        doing="is in load (t.py:9)",
        sections=["step", "load"],
        python_top=["/t.py:9 load", "/t.py:20 main"],
    )
    found, event = look(tmp_path, Link(0, [facts(0), facts(1)]), Link(1, [odd, facts(3)]))
    assert [each.rank for each in found.culprits] == [2]
    rows = look_told([event])
    assert rows[0] == ("attempt", "7.0.0")
    told = [f"{name}: {text}" for name, text in rows[1:]]
    assert told == [
        "culprit: rank 2 on n1: is in load (t.py:9) at step 7, while 3 ranks wait for it in a collective",
        "section: step > load",
        "stack: /t.py:9 load",
        "stack: /t.py:20 main",
        "victims: ranks 0-1, 3: waits for the other ranks in all_reduce at step 7",
        f"files: {tmp_path / 'at'}",
    ]
    assert event.details["ranks"][0].startswith(
        "rank 2 on n1: elsewhere, is in load (t.py:9), step 7, process 102 in state S"
    )


def test_an_agent_that_does_not_answer_is_a_finding_and_costs_no_more_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("slurmft.supervisor.hangs.ROUND_TRIP_S", 0.1)
    began = time.monotonic()
    found, _ = look(tmp_path, Link(0, [facts(0), facts(1)]), Link(1, None), Link(2, [], takes_s=60.0))
    assert time.monotonic() - began < 5.0 * slowness()
    assert [(each.rank, each.node) for each in found.culprits] == [(2, "n1"), (3, "n1"), (4, "n2"), (5, "n2")]
    assert found.victims == (0, 1)


def test_a_reply_that_is_none_closes_its_connection_and_counts_as_no_answer(tmp_path):
    odd, closed = Link(1, [{"rank": -1}]), []
    odd.channel = SimpleNamespace(close=lambda: closed.append(odd.host))
    found, _ = look(tmp_path, Link(0, [facts(0), facts(1)]), odd)
    assert [(each.rank, each.node) for each in found.culprits] == [(2, "n1"), (3, "n1")]
    assert closed == ["n1"]


def test_the_journal_has_a_look_once_however_often_it_is_concluded(tmp_path):
    journal = Journal(tmp_path, attempt="7.0.0")
    pool: Any = Pool(Link(0, [facts(0), facts(1)]))
    taken = asyncio.run(look_at_all(pool, tmp_path / "at", per_node=2, ends=[end(1, -9)]))
    assert journal.read() == [], "the kill comes first"
    assert taken.conclude(journal) is taken.conclude(journal)
    assert len(journal.read()) == 1


def test_a_rank_that_was_killed_is_the_culprit_and_its_echoes_are_victims(tmp_path):
    echo = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234"
    dead = [facts(rank, Where.DEAD, exit_code=code) for rank, code in ((0, 1), (1, -9))]
    found, event = look(
        tmp_path, Link(0, dead), Link(1, [facts(2), facts(3)]), ends=[end(0, 1, error=echo), end(1, -9)]
    )
    assert [each.rank for each in found.culprits] == [1]
    assert ("victims", "rank 0: ended with code 1 at step 7") in look_told([event])
    assert "rank 1 on n0: dead, ended with code -9" in event.details["ranks"][0]


def test_ends_on_a_node_that_is_gone_are_not_lost(tmp_path):
    found, _ = look(tmp_path, Link(0, None), Link(1, [facts(2), facts(3)]), ends=[end(0, -11)])
    assert [(each.rank, each.reason) for each in found.culprits] == [(0, "was ended by signal 11")]


def test_no_agent_at_all(tmp_path):
    found, event = look(tmp_path)
    assert found.culprits == ()
    assert look_told([event])[1] == ("culprit", "not found: no rank was alive any more")


def test_the_order_of_ends_is_kept():
    summaries = with_ends([_summary(0), _summary(1), _summary(2)], [end(2, 1), end(9, 1)])
    assert [summary.rank for summary in summaries] == [2, 9, 0, 1]


def _summary(rank: int, doing: str = "waits") -> Summary:
    return Summary(
        rank=rank, node=f"n{rank}", where=Where.COLLECTIVE, doing=doing, attached=True, step=1, tick=tick_of(1)
    )


def progress(entered: int) -> list[dict[str, Any]]:
    return [{"group": "0", "description": "default_pg", "members": [[0, 3]], "entered": entered, "done": 6,
             "operation": "all_reduce of [8]" if entered > 6 else "", "called_from": "step (t.py:9)"}]  # fmt: skip


def test_explain_shows_who_had_not_entered_the_collective_that_all_wait_for(tmp_path):
    """On a device all ranks look alike: each waits in ``.item()``, the one that comes too late as well."""
    alike = {"kind": Where.ELSEWHERE, "doing": "is in item (t.py:9)"}
    ranks = [facts(rank, collectives=progress(6 if rank == 2 else 7), **alike) for rank in range(4)]
    found, event = look(tmp_path, Link(0, ranks[:2]), Link(1, ranks[2:]), overdue=dict.fromkeys(range(4), "too long"))
    assert [(each.rank, each.node) for each in found.culprits] == [(2, "n1")]
    rows = dict(look_told([event])[1:])
    assert rows["culprit"].startswith(
        "rank 2 on n1: has not entered all_reduce of [8], number 7 of the group 0 (default_pg), which 3 ranks"
    )
    assert rows["collective"].startswith(
        "all_reduce of [8], number 7 of the group 0 (default_pg): entered by ranks 0-1,"
    )
    assert "not entered by rank 2" in rows["collective"]


def test_what_ranks_that_we_have_killed_recorded_proves_nothing(tmp_path):
    ranks = [facts(rank, collectives=progress(6 if rank == 2 else 7)) for rank in range(4)]
    ranks[2] |= {"kind": Where.DEAD, "killed": True, "exit_code": -9}
    found, event = look(tmp_path, Link(0, ranks[:2]), Link(1, ranks[2:]))
    assert not found.culprits
    assert "no record of rank 2" in event.details["collectives"][0]


@pytest.mark.parametrize(("code", "killed", "is_it"), [(-6, False, True), (-6, True, False), (1, False, False)])
def test_dumps_are_waited_for_where_torchs_watchdog_may_have_ended_a_rank(code, killed, is_it):
    assert ended_by_watchdog([end(0, code, killed=killed)]) is is_it


@pytest.mark.parametrize("alike", [True, False])
def test_the_journal_line_stays_short_with_20_000_ranks(alike):
    summaries = [_summary(rank, "waits" if alike else f"is in f{rank}") for rank in range(20_000)]
    found = blame(summaries)
    culprits = tuple(Named(rank=rank, node=f"n{rank}", reason="x" * 1000) for rank in range(64))
    for each in (found, Blame(culprits=culprits, victims=tuple(range(64, 20_000)))):
        event = as_event(each, summaries, {})
        assert len(json.dumps(event)) < 60_000
        assert len(event["ranks"]) == MAX_LINES
        assert event["ranks_left_out"] == 20_000 - MAX_LINES


@pytest.mark.parametrize(
    "details",
    [
        {},
        {"culprits": 3, "victims": {"a": 1}, "folder": None, "undecided": ["x"]},
        {"culprits": [1, None, {"rank": "x", "stack": 4, "sections": "a", "step": "y"}], "victims": [None]},
        {"culprits": [{"rank": number} for number in range(100)]},
    ],
)
def test_a_damaged_event_is_told_as_far_as_it_goes(details):
    rows = look_told([Event(at=datetime.now(UTC), event="last look", attempt="1.0.0", details=details)])
    assert rows[0] == ("attempt", "1.0.0")
    assert rows[1][0] == "culprit"
    assert all(isinstance(text, str) for _, text in rows)
    assert len(rows) < 40


def test_nothing_is_told_where_nobody_was_looked_at():
    assert look_told([]) == []
    assert look_told([Event(at=datetime.now(UTC), event="verdict", attempt="1.0.0", details={})]) == []
