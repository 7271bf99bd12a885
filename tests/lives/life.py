"""One seed, one life: what is drawn for it, how it is lived, and what is said of it when something did not hold."""

import random
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lives.faults import Fault, drawn
from lives.timeline import Stuck
from lives.world import LONGEST_S, World, simulated
from slurmft.operations import rescue
from slurmft.policy.verdict import Cause
from slurmft.scheduler.slurm import expand
from slurmft.storage.journal import PASSED_OVER, Event, EventName

Scheduled = Sequence[tuple[float, Fault]]
"""Faults, each with the seconds from the beginning of the life at which it comes."""


@dataclass(frozen=True)
class Bounds:
    """What a life may cost, where that is known of its faults."""

    costless: bool = False
    """No step is done again."""

    decided: bool = False
    """The decision about every attempt is in the journal."""

    stops: bool = False
    """It is stopped long before its end."""

    placed: bool = False
    """No attempt begins with fewer nodes than it needs."""

    most_starts: int = 0
    """Each training fails before its first step, and there may be so many; 0: it trains."""

    most_agents: int = 0
    """No more of them are started, and of engines no more than one for each; 0: whatever it takes."""

    most_attempts: int = 0
    """No more of them begin; 0: whatever it takes."""

    within_s: float = 0.0
    """The run is over after so many seconds; 0: whenever."""

    longest_s: float = LONGEST_S
    """A life that goes on for longer will never end."""


NUMBER = re.compile(r"(restart|retry) (\d+)")

REQUEUED = "Slurm has requeued the job"
"""In the reason of a decision that was to be a restart."""

SAYS_HOW = frozenset({EventName.WORKER_FAILED, EventName.AGENT_LOST, EventName.WORKER_HUNG})
"""Events that say how an attempt has come to its end."""

TOO_FEW = "fewer than nodes="
"""In the verdict on an attempt that cannot begin."""

IN_SLURM = 0.6
"""Share of lives in Slurm; the others are of one machine."""

PATIENT = {"num_in_job_restarts": 200, "num_job_retries_on_failure": 200, "max_no_progress_cycles": 200}
"""Budgets that no life spends: the run has to end well."""


def live(seed: int, *, most: int = 6) -> World:
    """Live the life of this seed. What did not hold is in its ``violations``."""
    drawing = life_of(seed, most=most)
    return drawing.lived(drawing.faults, seed=seed)


@dataclass(frozen=True)
class Drawn:
    """All that a seed decides of its life."""

    faults: Scheduled
    until: int
    in_slurm: dict[str, Any] | None
    settings: dict[str, Any]
    kind: type[World] = World

    def lived(self, faults: Scheduled, *, seed: int) -> World:
        """Live it with these faults."""
        return lived(faults, until=self.until, seed=seed, in_slurm=self.in_slurm, kind=self.kind, **self.settings)


def life_of(seed: int, *, most: int = 6) -> Drawn:
    """What is drawn for this seed."""
    chance = random.Random(seed)
    settings: dict[str, Any] = {
        "nodes": (nodes := chance.choice((1, 2, 2, 3))), "nproc_per_node": chance.choice((1, 2)),
        "spare_nodes": chance.choice((0, 0, 1, 2)),
        "elastic": {"min_nodes": chance.choice((1, nodes, None))},
        "checkpoint": {"interval_steps": 10, "just_in_time": chance.random() < 0.7},
        "fault_tolerance": {**PATIENT, "agent_timeout_s": chance.choice((5.0, 10.0)),
                            "supervisor_lease_s": chance.choice((30.0, 60.0))},
    }  # fmt: skip
    in_slurm = slurm_of(chance, settings)
    faults = drawn(chance, most=most, in_slurm=in_slurm is not None)
    return Drawn(faults, chance.choice((20, 60, 150)), in_slurm, settings)


def slurm_of(chance: random.Random, settings: dict[str, Any]) -> dict[str, Any] | None:
    """How Slurm is, with what a run says of it added to its settings; None for a life on one machine."""
    if chance.random() >= IN_SLURM:
        return None
    in_slurm = {
        "limit_s": chance.choice((60, 120, 100_000, 100_000)), "kill_wait_s": chance.choice((5, 30)),
        "unnoticed_s": chance.choice((20.0, 60.0, 300.0)), "requeues_early": chance.random() < 0.5,
    }  # fmt: skip
    settings |= {
        "preemption": {"continue_by": chance.choice(("auto", "auto", "auto", "resubmit")), "signal_lead_s": 20},
        "slurm": {"partition": "low"},
    }  # fmt: skip
    return in_slurm


def shortest(drawing: Drawn, *, seed: int) -> Scheduled:
    """The fewest of its faults with which a life still fails in the same way; none where it does not (ddmin)."""

    def fails(faults: Scheduled) -> set[str]:
        world = drawing.lived(faults, seed=seed)
        return {each.partition(":")[0] for each in world.violations}

    faults, found, size = list(drawing.faults), fails(drawing.faults), max(1, len(drawing.faults) // 2)
    while found and size:
        for at in range(0, len(faults), size):
            left = faults[:at] + faults[at + size :]
            if fails(left) & found:
                faults = left
                break
        else:
            size //= 2
    return faults if found else []


def lived(
    faults: Scheduled, *, until: int = 150, seed: int = 0, peers_fail: bool = True,
    in_slurm: dict[str, Any] | None = None, bounds: Bounds = Bounds(), kind: type[World] = World, **settings: Any,
) -> World:  # fmt: skip
    """Live the life in which these faults come.

    Args:
        bounds: what this life may cost.
        kind: what is lived.
        peers_fail: ranks that wait for one that is gone may fail of it by themselves, and keep nothing then.
        until: steps of the run, of 0.2 s each; every tenth is saved.
        seed: decides what is left to chance.
        settings: of the run's configuration.
    """
    in_memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="life-", dir=in_memory if in_memory.is_dir() else None))
    try:
        world = kind(folder, random.Random(seed), in_slurm=in_slurm, **settings)
        world.until, world.save_every = until, 10
        if not peers_fail:
            world.peers_fail_s = (1e9,)
        with pytest.MonkeyPatch.context() as patch, simulated(world, patch):
            world.most_starts = bounds.most_starts
            world.timeline.until_s = 1000.0 + bounds.longest_s
            for at_s, fault in faults:
                world.timeline.call_later(at_s, fault, world)
            try:
                code = world.live() if world.slurm is None else world.live_in_slurm()
            except Stuck as error:
                is_over = 0 < bounds.most_starts < len(world.starts)
                world.violate(
                    "budgets add up" if is_over else "every life ends", f"{error}; {len(world.starts)} starts"
                )
            except Exception as error:  # noqa: BLE001 - the other lives go on, and this one's seed is told
                at = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
                world.violate("nothing ends by an internal error", what)
            else:
                _judge(world, code)
                _judge_bounds(world, code, bounds)
                world.outlive()
        world.journal = [f"{event.at:%H:%M:%S.%f} {event.attempt} {event.event} {event.details}" for event in
                         world.events()]  # fmt: skip
        return world
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _judge_bounds(world: World, code: int, bounds: Bounds) -> None:
    pairs = zip(world.trainings, world.trainings[1:], strict=False)
    if bounds.costless and any(after.began_at != before.step for before, after in pairs):
        told = [(each.began_at, each.step) for each in world.trainings]
        world.violate("a planned stop costs no step", f"first and last steps are {told}")
    if bounds.stops and world.run.done() is not None:
        world.violate("stop means stop", "the run is complete all the same")
    if bounds.decided:
        events = world.events()
        attempts = [event.attempt for event in events if event.event == EventName.ATTEMPT_STARTED]
        decided = {event.attempt for event in events if event.event == EventName.DECISION}
        if missing := [attempt for attempt in attempts if attempt not in decided]:
            world.violate("the journal is whole", f"no decision about {missing} is in it")
    if bounds.placed and any(TOO_FEW in str(event.details.get("reason")) for event in world.events()):
        world.violate("an attempt has its nodes", "one has begun with too few")
    if bounds.most_starts and code == 0:
        world.violate("budgets add up", "a run that never trains ends well")
    if bounds.most_agents and bounds.most_agents < max(len(world.agents), world.engines):
        world.violate("agents outlive", f"{len(world.agents)} agents and {world.engines} engines were started")
    begun = sum(event.event == EventName.ATTEMPT_STARTED for event in world.events())
    if 0 < bounds.most_attempts < begun:
        world.violate("an attempt goes on", f"{begun} have begun, where {bounds.most_attempts} will do")
    if bounds.within_s and world.timeline.now_s - 1000.0 > bounds.within_s:
        world.violate("in time", f"it ends after {world.timeline.now_s - 1000.0:.0f} s, not {bounds.within_s:.0f}")


def _judge(world: World, code: int) -> None:
    """What must hold at the end of a life."""
    events = world.events()
    if code == 0 and not world.stop_asked_s and world.run.done() is None:
        world.violate("the run ends complete", "it ends well, and no mark of it is in the run folder")
    known = {event.details.get("generation") for event in events if event.event == EventName.ATTEMPT_STARTED}
    if unknown := {*world.starts} - known - world.never_written if world.folder_is_well else set():
        world.violate("the journal is whole", f"generations {sorted(unknown)} are not in it")
    left = [] if world.slurm is None else [job.job_id for job in world.slurm.mine() if not job.is_held]
    if left and world.run.done() is not None:
        world.violate("one continuation", f"jobs {left} are left of a complete run")
    if left and world.slurm is not None and world.stop_asked_s and not world.slurm.errs:
        world.violate("stop means stop", f"jobs {left} are left")
    # a job that is gone before slurmft has begun in it looks like one that its user has cancelled in the queue
    _judge_rescues(world, events)
    is_given_up = world.rescues >= rescue.MAX_RESCUES
    if code != 0 and not (world.stop_asked_s or world.most_starts or is_given_up) and world.run.owner() is not None:
        decided = [event.details.get("reason") for event in events if event.event == EventName.DECISION][-1:]
        world.violate("the run goes on", f"it ends with {code}: {decided}")
    elif code == 0 and world.saved != world.until:
        world.violate("the run ends complete", f"it ends well at {world.saved} of {world.until}")
    for event in events:
        facts = event.details
        if event.event == EventName.EVIDENCE and (facts.get("kind"), facts.get("node")) not in world.accusable:
            world.violate("no evidence without a cause", str(facts))
    decided: dict[str, set[str]] = {}
    for event in events:
        if event.event == EventName.DECISION:
            decided.setdefault(event.attempt, set()).add(str(event.details.get("action")))
    for attempt, actions in decided.items():
        if len(actions) > 1:
            world.violate("one decision", f"attempt {attempt} has {sorted(actions)}")
    _judge_journal(world, events)


def _judge_journal(world: World, events: Sequence[Event]) -> None:
    """What the lines must be, one with the other."""
    if [event for event in world.run.journal().read() if event.event not in PASSED_OVER] != events:
        world.violate("the journal is what was written", "a start of the run reads it otherwise")
    started = {
        event.attempt: event.details["generation"] for event in events if event.event == EventName.ATTEMPT_STARTED
    }
    times: dict[str, float] = {}
    for event in events if not world.has_jumped else ():
        if event.attempt and event.seconds() < times.get(event.attempt, 0.0):
            world.violate("the journal is in order", f"{event.event} of {event.attempt} comes too late")
            break
        times[event.attempt] = event.seconds()
    if [*started.values()] != sorted({*started.values()}):
        world.violate("one owner", f"generations {[*started.values()]} follow each other")
    ended = {event.attempt for event in events if event.event in (EventName.DECISION, EventName.SUPERSEDED)}
    if open_ones := [
        each for each, generation in started.items() if generation in world.to_decide and each not in ended
    ]:
        world.violate("every end is decided", f"no decision about {open_ones} is in the journal")
    seen = {event.attempt for event in events if event.event in SAYS_HOW and not event.details.get("spare")}
    causes = {event.attempt: event.details["cause"] for event in events if event.event == EventName.VERDICT}
    if unknown := [attempt for attempt, cause in causes.items() if cause == Cause.UNKNOWN and attempt in seen]:
        world.violate("every end is known", f"the verdict on {unknown} says that nothing was seen")
    lost = {event.details["node"] for event in events if event.event == EventName.AGENT_LOST}
    may_go = {node for kind, node in world.accusable if kind in ("node lost", "agent lost")}
    if wrongly := sorted(lost - world.ended - may_go):
        world.violate("no node is lost without a cause", f"{wrongly}")
    asked: set[str] = set()
    for event in events:
        if event.event == EventName.REQUEUEING:
            asked = {*expand(str(event.details.get("excluded") or ""))}
        elif event.event == EventName.AVOIDING:  # too many, says cron
            asked -= {why.partition(":")[0] for why in event.details["dropped"]}
        is_well = world.slurm is not None and not world.slurm.errs
        if event.event == EventName.EXCLUSION_ESCAPED and is_well and (again := asked & {*event.details["nodes"]}):
            world.violate("excluded nodes", f"{sorted(again)} again, which the requeue was to keep off")
    told = Counter(
        (event.event, event.attempt, event.details.get("rank"), event.details.get("node"), event.details.get("kind"))
        for event in events
        if event.event in (EventName.WORKER_FAILED, EventName.EVIDENCE)
    )
    if twice := [fact for fact, times in told.items() if times > 1]:
        world.violate("once", f"{twice} are in the journal more than once")
    _judge_budgets(world, events)


def _judge_rescues(world: World, events: Sequence[Event]) -> None:
    """Rescues in a row, without a step that is new, and what a start of the job has decided after another one."""
    furthest, newest, started, releases = 0, "", list[str](), 0
    for event in events:
        facts = event.details
        releases = releases + 1 if event.event == EventName.RELEASED else releases
        if event.event in (EventName.ATTEMPT_STARTED, EventName.SUBMITTED):
            releases = 0
        if releases > rescue.MAX_RELEASES:
            world.violate("budgets add up", f"release {releases} without a start")
            break
        if event.event == EventName.RESCUING:
            world.rescues += 1
        elif event.event == EventName.FIRST_STEP and facts["resumed_from"] > furthest:
            furthest, world.rescues = facts["resumed_from"], 0
        elif event.event == EventName.VERDICT:
            if (facts.get("saved_step") or 0) > facts["first_step"]:
                world.rescues = 0
            if event.attempt in started and event.attempt != newest:
                world.violate("one owner", f"{event.attempt} is judged, and {newest} has begun")
        elif event.event == EventName.ATTEMPT_STARTED:
            started.append(newest := event.attempt)
        elif event.event == EventName.STALE_REQUEST_DROPPED and not event.attempt.endswith(".0"):
            world.violate("requests are answered", f"{event.attempt} drops {facts['request']}, which is for this start")
        if world.rescues > rescue.MAX_RESCUES:
            world.violate("budgets add up", f"rescue {world.rescues} without progress")
            break


def _judge_budgets(world: World, events: Sequence[Event]) -> None:
    """Each retry and restart has the number that follows from those before it, since the run has last progressed."""
    causes: dict[str, str] = {}
    spent: Counter[str] = Counter()
    undecided: Counter[str] = Counter()
    counted: set[str] = set()
    decided = {event.attempt for event in events if event.event == EventName.DECISION}
    for event in events:
        facts, attempt = event.details, event.attempt
        if event.event == EventName.VERDICT:
            causes[attempt] = str(facts["cause"])
            if (facts.get("saved_step") or 0) > facts["first_step"]:
                spent.clear()
                undecided.clear()
            if attempt not in decided:  # it was killed with its guardian, and is a failure all the same
                undecided.update((attempt.rpartition(".")[0], causes[attempt]))
        elif event.event == EventName.DECISION and attempt not in counted and (said := NUMBER.search(facts["reason"])):
            counted.add(attempt)  # one that a killed supervisor has left is decided again in the same way
            purse = attempt.rpartition(".")[0] if said[1] == "restart" else causes[attempt]
            spent[purse] += 1
            if not spent[purse] <= int(said[2]) <= spent[purse] + undecided[purse]:
                world.violate("budgets add up", f"{said[0]} after attempt {attempt} is number {spent[purse]}")
            undecided[purse] -= int(said[2]) - spent[purse]
            spent[purse] = int(said[2])
        elif event.event == EventName.DECISION and attempt not in counted and REQUEUED in facts["reason"]:
            counted.add(attempt)  # in place of a restart that has its number
            undecided[causes[attempt]] += 1


def story(world: World) -> str:
    """All that happened, for the person who mends it."""
    return "\n".join([*world.story, *world.violations, *world.journal])
