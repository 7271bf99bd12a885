"""A stop before the time limit that no notice of Slurm's asks for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.config.run import validate
from slurmft.policy.grace import NOTICE_S, JobTimes, SlurmClock, Terms
from slurmft.policy.verdict import Cause
from slurmft.storage.run_folder import Attempt
from slurmft.supervisor.guardian import log_signal
from slurmft.supervisor.stops import Stops

LEAD_S, NOW = 120.0, 50_000.0
UNKNOWN = JobTimes(start=None, end=None, limit_s=None)


def ending_in(seconds: float, *, limit_s: float = 3600.0) -> JobTimes:
    return JobTimes(start=NOW + seconds - limit_s, end=NOW + seconds, limit_s=limit_s)


class Word:
    """Slurm's answers, one after the other; the last one again and again."""

    def __init__(self, *answers: JobTimes) -> None:
        self.answers = list(answers)
        self.terms = Terms(SlurmClock(NOW, time.monotonic()))
        self.kill_at_s = float("inf")

    async def read_terms(self) -> None:
        pass

    async def times(self) -> JobTimes:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def asked(tmp_path: Path, *answers: JobTimes, lease: object = True, within_s: float = 1.0) -> list[Any]:
    """The stops that were asked for, as cause and seconds."""
    raw = {"command": "x", "run_folder": str(tmp_path / "run"), "preemption": {"signal_lead_s": LEAD_S}}
    start = SimpleNamespace(journal=None, lease=lease, run=SimpleNamespace(attempts=tmp_path),
                            cluster=SimpleNamespace(name="slurm", attempt=Attempt(job="7", restart=0)))  # fmt: skip
    found: list[Any] = []

    async def watch() -> None:
        stops = Stops(
            validate(raw, source="test"),
            start,
            None,
            None,
            Word(*answers),  # type: ignore[arg-type]
            over=asyncio.Event(),
            background=None,
        )  # type: ignore[arg-type]

        def stop_for(cause: Cause, _: str, *, within_s: float) -> None:
            stops.planned = cause
            found.append((cause, within_s, stops.ends_at_s))

        stops.stop_for = stop_for  # type: ignore[method-assign]
        try:
            await asyncio.wait_for(stops.watch_limit(), within_s)
        except TimeoutError:
            found.append("waits")

    asyncio.run(watch())
    return found


def test_it_comes_once_the_notice_is_late(tmp_path: Path) -> None:
    [(cause, within_s, ends_at_s)] = asked(tmp_path, ending_in(LEAD_S - NOTICE_S - 1))
    assert cause is Cause.TIME_LIMIT
    assert LEAD_S - NOTICE_S - 5 < within_s < LEAD_S - NOTICE_S - 1, "the requeue has to fit in, too"
    assert within_s < ends_at_s - time.monotonic() < LEAD_S
    assert asked(tmp_path, ending_in(LEAD_S), within_s=0.2) == ["waits"]


def test_a_controller_that_falls_silent_does_not_prevent_it(tmp_path: Path) -> None:
    [(cause, *_)] = asked(tmp_path, ending_in(LEAD_S - NOTICE_S + 0.2), UNKNOWN)
    assert cause is Cause.TIME_LIMIT


PREEMPTED = JobTimes(start=NOW - 60, end=NOW + 15, limit_s=3600.0, preempted=NOW)


@pytest.mark.parametrize("times", [UNKNOWN, ending_in(30.0, limit_s=LEAD_S + 10), PREEMPTED, ending_in(-4000.0)],
                         ids=["unknown", "no time before the notice", "preempted", "a wrong clock"])  # fmt: skip
def test_what_is_no_usable_limit_asks_for_nothing(
    tmp_path: Path, times: JobTimes
) -> None:  # fmt: skip
    assert asked(tmp_path, times, within_s=0.2) == ["waits"]


def test_a_limit_that_was_extended_counts(tmp_path: Path) -> None:
    assert asked(tmp_path, ending_in(LEAD_S - NOTICE_S + 0.2), ending_in(9000.0), within_s=0.6) == ["waits"]


def test_without_a_standby_the_notice_is_relied_on(tmp_path: Path) -> None:
    assert asked(tmp_path, ending_in(1.0), lease=None) == []


@pytest.mark.parametrize(("name", "number"), [("SIGTERM", 15), ("SIGUSR1", 10), ("no signal", 0)])
def test_a_signal_is_logged_in_megatrons_words_whatever_its_name(name: str, number: int, caplog) -> None:
    with caplog.at_level("INFO"):
        log_signal("Received signal %d, initiating graceful stop", name)
    assert f"Received signal {number}, initiating graceful stop" in caplog.text
