"""What a history has spent, verdicts, grace, exit codes; what follows in each state is in ``test_policy_decisions``."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from of_each import of_each

from slurmft.config.run import validate
from slurmft.policy.decide import Budget, decide
from slurmft.policy.judge import Circumstances, WorkerEnd, judge
from slurmft.policy.sbatch import OWNED_OPTIONS, SBATCH_OPTIONS
from slurmft.policy.stop import JobTimes, cause_of_signal
from slurmft.policy.verdict import Action, Cause, ExitAction, Verdict, explicit_action, parse_codes
from slurmft.storage.journal import Event
from slurmft.supervisor.observations import budget_of

# decide


def verdict(cause: Cause, *, code: int = 0, first: int = 0, last: int = 10, saved: int | None = None) -> Verdict:
    saved = last if saved is None and last > first else saved
    return Verdict(cause=cause, reason="why", exit_code=code, first_step=first, last_step=last, saved_step=saved)


def budget(failures: int = 0, *, idle: int = 0) -> Budget:
    return Budget(failures_so_far=failures, max_failures=2, idle_cycles=idle, max_no_progress_cycles=3)


FINISH, STOP = Action.FINISH, Action.STOP


def test_the_reason_names_the_knob():
    assert "num_job_retries_on_failure=2" in decide(verdict(Cause.WORKER_ERROR, code=1), budget(2)).reason
    assert "slurm.time" in decide(verdict(Cause.TIME_LIMIT, last=0), budget(idle=2)).reason
    assert "retry 2 of 2" in decide(verdict(Cause.WORKER_ERROR, code=1), budget(1)).reason


ACTIONS = {ExitAction.COMPLETE: "42", ExitAction.RESCHEDULE: "11-20", ExitAction.FAIL: "1,77"}


def test_a_rescheduled_code_still_spends_the_budget():
    assert decide(verdict(Cause.WORKER_ERROR, code=12), budget(2), ACTIONS).action is STOP


@pytest.mark.parametrize("cause", [Cause.NODE_LOST, Cause.LAUNCH_FAILURE, Cause.CANCELLED])
def test_an_attempt_without_an_exit_code_is_not_complete(cause):
    documented = {ExitAction.COMPLETE: "0", ExitAction.RESCHEDULE: "11-20", ExitAction.FAIL: "17"}
    assert decide(verdict(cause), budget(), documented).action is not FINISH


# what the history has spent


def event(name: str, **details: object) -> Event:
    return Event(at=datetime.now(UTC), event=name, attempt="1.0.0", details=details)


CONFIG = validate({"command": ["true"], "run_folder": "/tmp/x"}, source="test")
STUCK = verdict(Cause.WORKER_ERROR, code=1, first=10, last=10)


@pytest.mark.parametrize(
    ("history", "failures", "idle"),
    [
        pytest.param([], 0, 0, id="nothing happened yet"),
        pytest.param([("worker error", 10, 10)] * 2, 2, 2, id="two failures without progress"),
        pytest.param([("worker error", 0, 0), ("worker error", 0, 10)], 1, 0, id="progress forgives what was before"),
        pytest.param([("node lost", 10, 10), ("worker error", 10, 10)], 1, 2, id="each cause has its own budget"),
        pytest.param([("rerun elsewhere", 10, 10)] * 2, 0, 2, id="exit 16 is free, but must get somewhere"),
        pytest.param([("straggler", 10, 10)], 0, 1, id="so is a move away from a slow node"),
        pytest.param([("a cause of tomorrow", 10, 10)], 0, 1, id="a newer slurmft's cause"),
        pytest.param([("", "x", None), (7, 10.5, float("nan"))], 0, 2, id="damaged"),
        pytest.param([("preempted", 10, 10), ("stopped by user", 10, 10)], 0, 0, id="planned stops are free"),
        pytest.param([("time limit", 10, 10)] * 2, 0, 2, id="time limits without progress"),
        pytest.param([("time limit", 8, 8), ("preempted", 8, 10)], 0, 0, id="progress forgives idle time limits"),
    ],
)
def test_what_was_spent(history, failures, idle):
    events = [event("verdict", cause=cause, first_step=first, saved_step=saved) for cause, first, saved in history]
    spent = budget_of([event("attempt started"), *events], STUCK, CONFIG)
    assert (spent.failures_so_far, spent.idle_cycles) == (failures, idle)


def restarts(*ends: tuple[int, int]) -> list[Event]:
    """Failures of attempts that began at the first step and saved the second."""
    return [event("verdict", cause="worker error", first_step=first, saved_step=saved) for first, saved in ends]


@pytest.mark.parametrize("cause", [Cause.WORKER_ERROR, Cause.RERUN_ELSEWHERE, Cause.TIME_LIMIT])
def test_a_run_whose_saves_are_of_no_use_comes_to_an_end(cause):
    """The newest checkpoint cannot be loaded, so each restart saves it again and fails behind it."""
    now = verdict(cause, code=1, first=10, last=21, saved=20)
    ends = [restarts(*[(10, 20)] * number) for number in range(4)]
    actions = [decide(now, replace(budget_of(past, now, CONFIG), max_restarts=0)).action for past in ends]
    assert actions == [Action.CONTINUE, Action.CONTINUE, Action.STOP, Action.STOP]


def restart(attempt: str, *, first: int, saved: int) -> list[Event]:
    """A failure that a restart in the same allocation followed."""
    facts = {"cause": "worker error", "first_step": first, "saved_step": saved}
    events = [event("verdict", **facts), event("decision", action="restart")]
    return [replace(each, attempt=attempt) for each in events]


@pytest.mark.parametrize(
    ("past", "now", "restarts_so_far", "failures", "idle"),
    [
        pytest.param([], (10, 10), 0, 0, 0, id="the first failure"),
        pytest.param([("7.0.0", 10, 10), ("7.0.1", 10, 10)], (10, 10), 2, 0, 0, id="restarts cost no retries"),
        pytest.param([("7.0.0", 10, 10), ("7.0.1", 10, 20)], (20, 20), 1, 0, 0, id="progress before the last of them"),
        pytest.param([("7.0.0", 10, 10)] * 3, (10, 20), 0, 0, 0, id="progress now"),
        pytest.param([("7.0.0", 10, 10)] * 3 + [("7.1.0", 10, 10)], (10, 10), 1, 0, 0, id="of an earlier start"),
        pytest.param([("6.1.0", 10, 10)] * 3, (10, 10), 0, 0, 0, id="of an earlier job"),
        pytest.param([("7.1.0", 10, 20), ("7.1.1", 10, 20)], (10, 20), 2, 0, 0, id="saves that are of no use"),
    ],
)
def test_restarts_in_the_allocation_have_a_budget_of_their_own(past, now, restarts_so_far, failures, idle):
    start = past[-1][0].rpartition(".")[0] if past and past[-1][0] != "6.1.0" else "7.1"
    events = [each for name, first, saved in past for each in restart(name, first=first, saved=saved)]
    given = verdict(Cause.WORKER_ERROR, code=1, first=now[0], last=now[1], saved=now[1])
    spent = budget_of(events, given, CONFIG, f"{start}.9")
    assert (spent.restarts_so_far, spent.failures_so_far, spent.idle_cycles) == (restarts_so_far, failures, idle)


def test_after_the_restarts_comes_the_queue():
    spent = Budget(failures_so_far=0, max_failures=2, restarts_so_far=2, max_restarts=3)
    assert decide(STUCK, spent).action is Action.RESTART
    assert decide(STUCK, replace(spent, restarts_so_far=3)).action is Action.CONTINUE
    assert decide(STUCK, replace(spent, restarts_so_far=3, failures_so_far=2)).action is Action.STOP
    for cause in (Cause.LAUNCH_FAILURE, Cause.SUPERVISOR_LOST, Cause.DATA_CORRUPTION):
        assert decide(verdict(cause), spent).action is Action.CONTINUE
    assert decide(verdict(Cause.SUPERVISOR_LOST), replace(spent, outlived=True)).action is Action.RESTART
    for budget in (replace(spent, outlived=True, has_nodes=False), replace(spent, outlived=True, restarts_so_far=3)):
        assert decide(verdict(Cause.SUPERVISOR_LOST), budget).action is Action.CONTINUE
    assert decide(verdict(Cause.NODE_LOST), spent).action is Action.RESTART, "a spare takes over"
    for cause in (Cause.NODE_LOST, Cause.HANG, Cause.RESIZED):
        assert decide(verdict(cause), replace(spent, has_nodes=False)).action is Action.CONTINUE, "nobody is left"


def test_a_run_that_begins_further_on_is_on_its_way():
    """Also one that was set back once, or whose last attempt did not come to its first step."""
    now = verdict(Cause.WORKER_ERROR, code=1, first=30, last=41, saved=40)
    for past in ([(10, 20), (20, 30)], [(1000, 1010), (0, 10), (10, 20), (20, 30)], [(10, 20), (10, 30)]):
        assert budget_of(restarts(*past), now, CONFIG).lost_cycles == 0
    nowhere = verdict(Cause.WORKER_ERROR, code=1, first=0, last=0)
    assert budget_of(restarts((10, 20), (20, 30)), nowhere, CONFIG).lost_cycles == 0


def test_a_run_that_a_person_submits_again_begins_a_new_count():
    events = [event("verdict", cause="worker error", first_step=10, saved_step=10)] * 3
    again = [*events, event("decision", action="stop"), events[0]]
    assert budget_of(again, STUCK, CONFIG).failures_so_far == 1
    assert budget_of(again, STUCK, CONFIG).idle_cycles == 1
    assert budget_of([*events, event("decision", action="continue")], STUCK, CONFIG).failures_so_far == 3


def test_a_cause_may_have_a_budget_of_its_own():
    own = {"command": ["true"], "run_folder": "/tmp/x", "fault_tolerance": {"retries": {"node_lost": 5}}}
    config = validate(own, source="test")
    of_node = budget_of([], verdict(Cause.NODE_LOST), config)
    assert (of_node.max_failures, of_node.knob) == (5, "fault_tolerance.retries: node lost")
    assert budget_of([], STUCK, config).max_failures == 2


def test_an_attempt_that_made_progress_starts_a_new_count():
    events = [event("verdict", cause="worker error", first_step=10, last_step=10)] * 5
    assert budget_of(events, verdict(Cause.WORKER_ERROR, first=10, last=11), CONFIG).failures_so_far == 0


def test_exit_16_never_spends_the_failure_budget():
    events = [event("verdict", cause="rerun elsewhere", first_step=10, last_step=10)] * 2
    assert budget_of(events, STUCK, CONFIG).failures_so_far == 0


# judge


def end(rank: int, code: int = 0, **facts: object) -> WorkerEnd:
    return WorkerEnd(rank=rank, node=f"n{rank}", code=code, **{"attached": True, "step": 7, **facts})


DONE = [end(0, finished=True), end(1, finished=True)]
STOPPED = [end(0, 75, stopped=True), end(1, 75, stopped=True)]
PREEMPTION = Circumstances(planned=Cause.PREEMPTED, planned_reason="SIGTERM at n0")


@pytest.mark.parametrize(
    ("ends", "seen", "cause", "code", "words"),
    [
        pytest.param(DONE, Circumstances(), Cause.FINISHED, 0, "all 2 ranks finished at step 7", id="all finish"),
        pytest.param(DONE, PREEMPTION, Cause.FINISHED, 0, "finished", id="all finish while a stop was asked for"),
        pytest.param(
            DONE, Circumstances(outside=Cause.CANCELLED), Cause.FINISHED, 0, "finished", id="finished, then scancel"
        ),
        pytest.param(
            [end(0, attached=False), end(1, attached=False)], Circumstances(), Cause.FINISHED, 0, "exited with 0",
            id="plain scripts that end well",
        ),
        pytest.param(
            STOPPED, PREEMPTION, Cause.PREEMPTED, 0, "all ranks stopped at step 7", id="all stop at the agreed step"
        ),
        pytest.param(
            [STOPPED[0], end(1, -15)], PREEMPTION, Cause.PREEMPTED, 0, "1 of 2 ranks stopped", id="one dies of the TERM"
        ),
        pytest.param(
            [STOPPED[0], end(1, 1, error="OSError: disk full")], PREEMPTION, Cause.PREEMPTED, 0,
            "no save at the stop: rank 1 on n1 exited with 1: OSError: disk full", id="one fails in its save",
        ),
        pytest.param(
            [end(0, 1, error="ValueError: x")], Circumstances(), Cause.WORKER_ERROR, 1,
            "rank 0 on n0 exited with 1: ValueError: x", id="an exception",
        ),
        pytest.param(
            [end(1, -11), end(0, 1, error="peer is gone")], Circumstances(), Cause.SIGNAL_CRASH, 139,
            "rank 1 on n1 was killed by SIGSEGV", id="the first to fail is to blame",
        ),
        pytest.param(
            [end(0, -9, killed=True), end(1, 3)], Circumstances(), Cause.WORKER_ERROR, 3, "rank 1", id="victims are not"
        ),
        pytest.param([end(0, -40)], Circumstances(), Cause.SIGNAL_CRASH, 168, "signal 40", id="a real-time signal"),
        pytest.param([end(0, 1), end(1, 16)], Circumstances(), Cause.RERUN_ELSEWHERE, 16, "rank 1", id="16 beats 1"),
        pytest.param([end(0, 16), end(1, 17)], Circumstances(), Cause.VALIDATION_FAILED, 17, "", id="17 beats 16"),
        pytest.param([end(0, 17)], PREEMPTION, Cause.VALIDATION_FAILED, 17, "", id="17 beats a planned stop"),
        pytest.param(
            [end(0, -15)], Circumstances(outside=Cause.CANCELLED, outside_reason="scancel"), Cause.CANCELLED, 0,
            "scancel", id="cancelled",
        ),
        pytest.param(
            [], Circumstances(launch_error="2 of 4 agents did not report"), Cause.LAUNCH_FAILURE, 0, "2 of 4",
            id="agents missing",
        ),
        pytest.param(
            [end(0, -9, killed=True)], Circumstances(lost_nodes=("n1", "n2")), Cause.NODE_LOST, 0, "n1, n2",
            id="nodes lost",
        ),
        pytest.param([end(0)], Circumstances(), Cause.UNKNOWN, 0, "1 of 2 ranks disappeared", id="a rank vanished"),
        pytest.param(
            [end(0, 3, finished=True), end(1, finished=True)], Circumstances(), Cause.WORKER_ERROR, 3, "rank 0",
            id="failed after its loop",
        ),
    ],
)  # fmt: skip
def test_the_verdict(ends, seen, cause, code, words):
    found = judge(ends, world_size=2, seen=seen)
    assert (found.cause, found.exit_code) == (cause, code)
    assert words in found.reason


def test_the_verdicts_steps_are_those_of_the_circumstances():
    found = judge(STOPPED, world_size=2, seen=Circumstances(reached=(5, 9), saved=8))
    assert (found.first_step, found.last_step, found.saved_step) == (5, 9, 8)


@pytest.mark.parametrize(
    ("first", "last", "saved", "progressed"),
    [(0, 10, 10, True), (10, 20, 15, True), (10, 20, None, False), (10, 20, 10, False), (0, 0, None, False)],
)
def test_only_what_is_saved_is_progress(first, last, saved, progressed):
    given = Verdict(cause=Cause.PREEMPTED, reason="", first_step=first, last_step=last, saved_step=saved)
    assert given.progressed is progressed


# grace

LIMIT = JobTimes(start=1000.0, end=4600.0, limit_s=3600.0)


@pytest.mark.parametrize(
    ("times", "now", "cause"),
    [
        pytest.param(LIMIT, 4480.0, Cause.TIME_LIMIT, id="exactly the lead"),
        pytest.param(LIMIT, 4450.0, Cause.TIME_LIMIT, id="lead and jitter"),
        pytest.param(LIMIT, 4599.0, Cause.TIME_LIMIT, id="late"),
        pytest.param(LIMIT, 4447.0, Cause.SIGNALLED, id="earlier than Slurm ever warns"),
        pytest.param(LIMIT, 1001.0, Cause.SIGNALLED, id="by hand, at the start"),
        pytest.param(JobTimes(start=1000.0, end=1100.0, limit_s=3600.0), 1080.0, Cause.PREEMPTED, id="end moved"),
        pytest.param(JobTimes(start=1000.0, end=4597.0, limit_s=3600.0), 4577.0, Cause.PREEMPTED, id="moved a little"),
        pytest.param(JobTimes(start=1000.0, end=4599.0, limit_s=3600.0), 4580.0, Cause.TIME_LIMIT, id="clocks differ"),
        pytest.param(JobTimes(start=1000.0, end=1100.0, limit_s=None), 1080.0, Cause.PREEMPTED, id="end, but no limit"),
        pytest.param(JobTimes(start=None, end=None, limit_s=None), 0.0, Cause.SIGNALLED, id="Slurm does not answer"),
        pytest.param(JobTimes(start=1000.0, end=None, limit_s=None), 0.0, Cause.SIGNALLED, id="no limit at all"),
    ],
)
def test_why_a_term_came(times, now, cause):
    assert cause_of_signal(times, now=now, lead_s=120.0) is cause


# exit codes


@of_each(
    text__codes=[
        ("0", {0}),
        ("1,3", {1, 3}),
        ("11-13", {11, 12, 13}),
        (" 11-12 , 42 ", {11, 12, 42}),
        ("7-7", {7}),
        ("0-255", set(range(256))),
        ("1,1-2", {1, 2}),
    ]
)
def test_exit_codes(text, codes):
    assert parse_codes(text) == codes


@of_each(text=["", "a", "1-", "-1", "5-3", "256", "0-256", "1,,2", "1 2", "1--2", "0x10", "1.0", "+1"])
def test_what_is_no_exit_code(text):
    with pytest.raises(ValueError, match="exit code"):
        parse_codes(text)


@pytest.mark.parametrize(("code", "action"), [(42, "COMPLETE"), (11, "RESCHEDULE"), (20, "RESCHEDULE"), (77, "FAIL")])
def test_a_code_has_its_action(code, action):
    assert explicit_action(code, ACTIONS) == action


@pytest.mark.parametrize("code", [0, 10, 21, 255])
def test_a_code_that_is_not_named_has_none(code):
    assert explicit_action(code, ACTIONS) is None


# options of sbatch


def test_options_are_spelt_as_on_the_command_line():
    assert all(option == option.lower() and "_" not in option for option in SBATCH_OPTIONS | OWNED_OPTIONS.keys())


def test_no_option_is_both_free_and_ours():
    # options of sbatch that are refused with a better word than "unknown"
    assert SBATCH_OPTIONS & OWNED_OPTIONS.keys() <= {"array", "open-mode", "no-requeue"}


SECTION_KEYS = {"requeue", "no-kill"}


def test_every_long_option_of_this_machines_sbatch_is_known(tmp_path):
    """Of whatever version is installed: free, ours, or a key of the section; the rest prints, waits, or submits."""
    import re
    import shutil
    import subprocess

    if (sbatch := shutil.which("sbatch")) is None:
        pytest.skip("no sbatch on this machine to compare with")
    (conf := tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")  # it reads one first
    text = subprocess.run(
        [sbatch, "--help"], capture_output=True, text=True, timeout=20, check=True, env={"SLURM_CONF": str(conf)}
    ).stdout
    offered = set(re.findall(r"(?:^|\s)--([a-z0-9][a-z0-9-]*)", text))
    assert len(offered) > 80
    left_out = {"help", "usage", "version", "test-only", "wait", "parsable"}
    assert offered - SBATCH_OPTIONS - OWNED_OPTIONS.keys() - SECTION_KEYS - left_out == set()


# a script's own bug

TRACE = 'Traceback (most recent call last):\n  File "/w/train.py", line {}, in <module>\n    step()\n{}\n'
BUG = TRACE.format(3, "ModuleNotFoundError: No module named 'x'")


def ended(traceback: str, *, last: int = 0, seconds: int = 5, **more: object) -> list[Event]:
    """An attempt that began with the epoch of this module, in the journal."""
    began = event("workers started", world_size=1)
    facts = {"cause": "worker error", "first_step": 0, "last_step": last, "traceback": traceback, **more}
    end = replace(event("verdict", **facts), at=began.at + timedelta(seconds=seconds))
    return [began, end, event("decision", action="restart")]


@of_each(
    before__now__stops=[
        (ended(BUG), BUG, True),
        (ended(BUG), TRACE.format(3, "ModuleNotFoundError: No module named 'y'"), True),
        (ended(TRACE.format(9, "repo.Odd")), TRACE.format(9, "repo.Odd"), True),
        (ended(BUG) + ended(""), BUG, False),
        ([], BUG, False),
        (ended(BUG), TRACE.format(4, "ModuleNotFoundError: No module named 'x'"), False),
        (ended(BUG), TRACE.format(3, "ValueError: x"), False),
        (ended(BUG, last=7), BUG, False),
        (ended(BUG, seconds=3600), BUG, False),
        ([*ended(BUG), event("decision", action="stop")], BUG, False),
        (ended("killed"), "killed", False),
        *(
            (ended(TRACE.format(3, words)), TRACE.format(3, words), False)
            for words in (
                "FileNotFoundError: [Errno 2] No such file or directory: '/data'",
                "requests.exceptions.ConnectionError: no route",
                "RuntimeError: CUDA error: unspecified launch failure",
                "TimeoutError",
                "FloatingPointError: loss is nan",
            )
        ),
    ]
)
def test_the_same_exception_twice_before_any_step_is_the_scripts_own(before, now, stops):
    given = replace(verdict(Cause.WORKER_ERROR, code=1, first=0, last=0), traceback=now, saved_step=None)
    spent = replace(budget_of(before, given, CONFIG, "1.0.1"), max_restarts=3)
    decision = decide(given, spent)
    assert (decision.action is STOP) is stops
    assert decision.avoid == ()
    if stops:
        assert decision.exit_code == 1
        assert decide(given, spent, {ExitAction.RESCHEDULE: "1"}).action is Action.RESTART


def test_an_exception_behind_a_step_is_no_bug_of_the_start():
    given = replace(verdict(Cause.WORKER_ERROR, code=1, first=0, last=1), traceback=BUG)
    assert not budget_of(ended(BUG), given, CONFIG, "1.0.1").is_same_bug
