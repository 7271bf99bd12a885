"""A verdict and a decision in; what the run changes about itself, and the decision that follows, out."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from slurmft.config.run import validate
from slurmft.policy.verdict import Action, Cause, Decision, Evidence, Kind, Verdict
from slurmft.storage.checkpoint_names import MANIFEST, read_quarantine, usable
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.storage.verdicts import note_batches, note_resuming
from slurmft.supervisor.act import Remedies
from slurmft.supervisor.cluster import Start
from slurmft.supervisor.observations import batch_divisor_of

OLD, NEW = "step-00000020.g1.c1", "step-00000040.g1.c2"
RESTART = Decision(action=Action.RESTART, reason="as decided", exit_code=1)
SPENT = Decision(action=Action.STOP, reason="spent", exit_code=1)


class Thread:
    """Does at once what the folder's thread would do."""

    def call(self, work, *, timeout_s):
        return work()


class Journal:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def append(self, event: str, **details) -> Event:
        self.events.append(Event(at=datetime.now(UTC), event=event, attempt="7.0.3", details=details))
        return self.events[-1]

    def named(self, name: str) -> list[dict]:
        return [event.details for event in self.events if event.event == name]


class Case:
    """One run that has just ended, with two checkpoints."""

    def __init__(self, path, *, cluster: str = "slurm", history=(), **settings) -> None:
        self.run = RunFolder(path / 'a "run" with\nodd words')
        section = {"poison_after": 2, **settings.pop("fault_tolerance", {})}
        config = {"command": "python x.py", "run_folder": str(path / "run"), "fault_tolerance": section, **settings}
        self.config = validate(config, source="test").model_copy(update={"run_folder": self.run.path})
        self.attempt = self.run.attempts / "7.0.3"
        self.attempt.mkdir(parents=True)
        for name in (OLD, NEW):
            (self.config.checkpoint_dir / name).mkdir(parents=True)
            (self.config.checkpoint_dir / name / MANIFEST).write_text("{}")
        self.journal, self.accused = Journal(), list[Evidence]()
        place = SimpleNamespace(name=cluster, attempt=Attempt(job="7", restart=0, cycle=3))
        self.start = Start(
            cluster=place,
            run=self.run,
            journal=self.journal,
            thread=Thread(),
            generation=1,
            history=history,
            secret=b"",
        )

    def after(self, verdict: Verdict, decision: Decision = RESTART, *, has_nodes: bool = True) -> Decision:
        sender = SimpleNamespace(add=self.accused.extend)
        return Remedies(self.config, self.start, sender, has_nodes=has_nodes).applied(verdict, decision)


def death(node: str = "n1", cause: Cause = Cause.WORKER_ERROR, **more) -> Verdict:
    return Verdict(cause=cause, reason="rank 0 died", exit_code=more.pop("exit_code", 1), node=node, **more)


def tried(node: str, checkpoint: str = NEW) -> Event:
    details = {"checkpoint": checkpoint, "cause": "worker error", "nodes": [node], "committed": False}
    return Event(at=datetime.now(UTC), event="checkpoint tried", attempt="7.0.2", details=details)


OUT_OF_MEMORY = Verdict(cause=Cause.DEVICE_OUT_OF_MEMORY, reason="no memory", exit_code=1)
REDUCE = {"oom": {"action": "reduce_batch", "min_batch": 2}}


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "has_nodes", "action"),
    [(RESTART, True, Action.RESTART), (SPENT, True, Action.RESTART), (SPENT, False, Action.CONTINUE)],
)
def test_a_smaller_batch_goes_on_even_where_the_budget_is_spent(tmp_path, decision, has_nodes, action):
    case = Case(tmp_path, **REDUCE)
    note_batches(case.attempt, [8], 1)
    found = case.after(OUT_OF_MEMORY, decision, has_nodes=has_nodes)
    assert (found.action, found.reason) == (action, "no memory; next with a micro-batch of 4 and the same global batch")
    assert batch_divisor_of(case.journal.events) == 2


def test_no_smaller_batch_is_a_clear_end(tmp_path):
    case = Case(tmp_path, **REDUCE)
    note_batches(case.attempt, [8], 4)
    found = case.after(OUT_OF_MEMORY)
    assert (found.action, found.exit_code) == (Action.STOP, 93) and "oom.min_batch=2" in found.reason
    assert batch_divisor_of(case.journal.events) == 1


def test_a_trainer_that_takes_no_part_fails_as_ever_and_it_is_said(tmp_path):
    case = Case(tmp_path, **REDUCE)
    assert case.after(OUT_OF_MEMORY) is RESTART
    assert "session.micro_batch" in case.journal.named("batch not reduced")[0]["reason"]
    (tmp_path / "default").mkdir()
    default = Case(tmp_path / "default")
    note_batches(default.attempt, [8], 1)
    assert default.after(OUT_OF_MEMORY) is RESTART and default.journal.events == []


# ---- poison ----------------------------------------------------------------------------------------------------------


def test_a_first_death_is_remembered_and_changes_nothing(tmp_path):
    case = Case(tmp_path)
    note_resuming(case.attempt, NEW)
    assert case.after(death()) is RESTART
    assert case.journal.named("checkpoint tried") == [
        {"checkpoint": NEW, "cause": "worker error", "nodes": ["n1"], "committed": False}
    ]


@pytest.mark.parametrize("decision", [RESTART, SPENT])
def test_two_nodes_quarantine_the_checkpoint(tmp_path, decision):
    case = Case(tmp_path, history=[tried("n2")])
    note_resuming(case.attempt, NEW)
    found = case.after(death("n1"), decision)
    assert found.action is Action.RESTART and f"it is quarantined, next from {OLD}" in found.reason
    assert usable(case.config.checkpoint_dir) == [OLD]
    assert case.journal.named("checkpoint quarantined")[0]["step"] == 40
    mark = read_quarantine(case.config.checkpoint_dir / NEW)
    assert mark is not None and "on n1, n2" in mark.reason and not mark.from_scratch


def test_one_node_is_accused_and_left(tmp_path):
    case = Case(tmp_path, history=[tried("n1")])
    note_resuming(case.attempt, NEW)
    found = case.after(death("n1"))
    assert (found.action, found.avoid) == (Action.CONTINUE, ("n1",))
    assert [(each.kind, each.suspect.node) for each in case.accused] == [(Kind.REPEATED_DEATH, "n1")]
    assert usable(case.config.checkpoint_dir) == [NEW, OLD]


def test_whoever_wants_no_retries_gets_none(tmp_path):
    none = {"fault_tolerance": {"num_in_job_restarts": 0, "num_job_retries_on_failure": 0}}
    case = Case(tmp_path, history=[tried("n2")], **none)
    note_resuming(case.attempt, NEW)
    assert case.after(death("n1"), SPENT) is SPENT
    assert usable(case.config.checkpoint_dir) == [OLD], "and the next submission does not begin with it"


@pytest.mark.parametrize(
    "verdict",
    [
        death(cause=Cause.NODE_LOST),
        death(cause=Cause.PREEMPTED),
        death(cause=Cause.COMMUNICATION_ERROR),
        death(exit_code=2),
        death(exit_code=127),
        death(saved_step=60, first_step=40),
    ],
    ids=lambda verdict: f"{verdict.cause.value} {verdict.exit_code}",
)
def test_what_does_not_count(tmp_path, verdict):
    case = Case(tmp_path, history=[tried("n2")])
    note_resuming(case.attempt, NEW)
    assert case.after(verdict) is RESTART
    assert usable(case.config.checkpoint_dir) == [NEW, OLD]


def test_a_failure_that_was_mapped_to_the_end_is_the_end(tmp_path):
    case = Case(tmp_path, history=[tried("n2")], exit_actions={"FAIL": "1"})
    note_resuming(case.attempt, NEW)
    assert case.after(death("n1"), SPENT) is SPENT
    assert usable(case.config.checkpoint_dir) == [NEW, OLD]


@pytest.mark.parametrize("from_scratch", [False, True])
def test_the_last_checkpoint(tmp_path, from_scratch):
    case = Case(tmp_path, history=[tried("n2", OLD)], fault_tolerance={"poison_from_scratch": from_scratch})
    (case.config.checkpoint_dir / NEW / "quarantined.json").write_text('{"format": 1, "reason": "damaged"}')
    note_resuming(case.attempt, OLD)
    found = case.after(death("n1"))
    if from_scratch:
        assert found.action is Action.RESTART and "next from the beginning" in found.reason
        assert usable(case.config.checkpoint_dir) == []
    else:
        assert (found.action, found.exit_code) == (Action.STOP, 93) and "no other checkpoint" in found.reason
        assert usable(case.config.checkpoint_dir) == [OLD], "what is the last one stays for whoever looks into it"


def test_without_word_of_a_checkpoint_nothing_follows(tmp_path):
    case = Case(tmp_path, history=[tried("n2")])
    assert case.after(death()) is RESTART
    for content in ("", "{", '{"format": 1, "checkpoint": 5}', '{"format": 1, "checkpoint": "step-x"}'):
        (case.attempt / "resuming.json").write_text(content)
        assert case.after(death()) is RESTART
    assert case.journal.events == []


def test_a_checkpoint_that_is_gone_or_cannot_be_marked_changes_nothing(tmp_path):
    case = Case(tmp_path, history=[tried("n2")])
    note_resuming(case.attempt, NEW)
    (case.config.checkpoint_dir / NEW / MANIFEST).unlink()
    (case.config.checkpoint_dir / NEW).rmdir()
    assert case.after(death("n1")) is RESTART
    assert case.journal.named("checkpoint quarantined") == []
