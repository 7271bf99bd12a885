"""The machine in a plain loop of one process: what is rejected, what is put back, what is proven and what is not."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import convert
from reported_evidence import read_evidence
from torch import nn

from slurmft.config.sections import RerunConfig
from slurmft.errors import UsageError
from slurmft.policy.reruns import Injection, Mode, Phase, RerunSettings, Seen
from slurmft.policy.verdict import Kind, Suspect
from slurmft.policy.worker_settings import WORKER_VARIABLE, WorkerSettings
from slurmft.storage.verdicts import EVIDENCE_VARIABLE, VERDICT_VARIABLE, read_verdict
from slurmft.trainer import savers
from slurmft.worker.rerun import Proceedings, Rejection, RerunStateMachine, Row
from slurmft.worker.rerun_data import IterationStart, RerunDataIterator, batch_hash

Spoil = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(step, run of this step, loss) -> loss"""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path) -> Iterator[None]:
    for name in ("RANK", "SLURMD_NODENAME", WORKER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv(EVIDENCE_VARIABLE, str(tmp_path / "evidence"))
    monkeypatch.setenv(VERDICT_VARIABLE, str(tmp_path / "verdict"))
    yield


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in itertools.count():
        generator = torch.Generator().manual_seed(number)
        yield torch.rand(4, 3, generator=generator), torch.rand(4, 1, generator=generator)


class Loop:
    """A training with everything that a rerun must put back: data, dropout, BatchNorm, three generators."""

    def __init__(self, settings: RerunSettings | None = None, **options: Any) -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = RerunDataIterator(batches())
        self.machine = RerunStateMachine(settings or RerunSettings(), model=self.model, **options)
        self.runs: list[int] = []

    def run(self, until: int, start: int = 0, spoil: Spoil = lambda step, run, loss: loss) -> tuple[bool, bool, int]:
        for step in range(start, until):
            self.runs.append(0)
            while self.machine.should_run_forward_backward(self.data):
                inputs, targets = next(self.data)
                noise = random.random() + float(np.random.normal())
                loss = (self.model(inputs) + noise - targets).square().mean()
                loss = spoil(step, self.runs[-1], loss)
                self.runs[-1] += 1
                self.machine.validate_loss(loss)
                self.optimizer.zero_grad()
                loss.backward()
            ending = self.machine.should_checkpoint_and_exit()
            if ending[1]:
                return ending
            self.optimizer.step()
        return False, False, 0

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def saved(self) -> Any:
        """As a checkpoint would keep it."""
        file = io.BytesIO()
        torch.save(
            {"model": self.model.state_dict(), "machine": self.machine.state_dict(), "data": self.data.state_dict(),
             "rng": savers.capture()}, file,
        )  # fmt: skip
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved: Any) -> Loop:
        """The loader has no position of its own, so it goes on behind the saved batches."""
        self.model.load_state_dict(saved["model"])
        self.data.load_state_dict(saved["data"])
        self.machine.load_state_dict(saved["machine"])
        savers.restore(saved["rng"])
        return self


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def clean() -> dict[str, torch.Tensor]:
    loop = Loop(RerunSettings(mode=Mode.DISABLED))
    loop.run(6)
    assert loop.runs == [1] * 6
    return loop.state()


def wrong(value: float, at: int = 3, runs: int = 1) -> Spoil:
    return lambda step, run, loss: loss * value if step == at and run < runs else loss


def evidence(tmp_path) -> list[Kind]:
    return [one.kind for one in read_evidence(tmp_path / "evidence") if one is not None]


# in place


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read after the backward pass"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_transient_error_leaves_no_trace_in_the_training(clean, tmp_path, value, late):
    loop = Loop(reads_late=late)
    assert loop.run(6, spoil=wrong(value)) == (False, False, 0)
    assert loop.runs == [1, 1, 1, 2, 1, 1]
    assert same(loop.state(), clean)
    assert evidence(tmp_path) == [Kind.RERUN_TRANSIENT]
    assert not (tmp_path / "verdict").exists()


def test_the_first_iteration_can_be_rerun_too(clean):
    loop = Loop()
    loop.run(6, spoil=wrong(float("nan"), at=0))
    assert loop.runs[0] == 2
    assert same(loop.state(), clean)


def test_an_error_that_is_never_twice_the_same_goes_elsewhere_and_is_not_called_reproducible(tmp_path, caplog):
    loop = Loop()
    garbage = [float("inf"), float("nan")]
    ending = loop.run(6, spoil=lambda step, run, loss: loss * garbage[run] if step == 3 else loss)
    assert ending == (True, True, 16)
    assert evidence(tmp_path) == [Kind.RERUN_UNDECIDED]
    assert "result is not reproducible within the tolerance, and was rejected again" in caplog.text
    assert "Need to rerun on a different GPU to verify correctness" in caplog.text
    assert "is reproducible" not in caplog.text and "reproduced" not in caplog.text
    departure = loop.machine._proceedings.departure
    assert departure is not None and "different when run again in place, and rejected again" in departure.message


def test_a_full_disk_costs_the_evidence_only(clean, monkeypatch):
    monkeypatch.setenv(EVIDENCE_VARIABLE, "/dev/full")
    loop = Loop()
    loop.run(6, spoil=wrong(float("nan")))
    assert same(loop.state(), clean)


def test_another_result_that_is_rejected_in_the_rerun_gets_its_own_rerun(clean):
    loop = Loop()
    seen: list[int] = []

    def both(step: int, run: int, loss: torch.Tensor) -> torch.Tensor:
        if step == 3:
            seen.append(run)
            loop.machine.validate_result(torch.tensor(float("nan") if run == 1 else 1.0), message="norm")
        return loss * float("nan") if step == 3 and run == 0 else loss

    assert loop.run(6, spoil=both) == (False, False, 0)
    assert seen == [0, 1, 2]
    assert same(loop.state(), clean)


# elsewhere


def stopped(spoil: Spoil) -> Any:
    loop = Loop()
    assert loop.run(6, spoil=spoil) == (True, True, 16)
    assert loop.runs[3] == 2
    return loop.saved()


@pytest.fixture
def elsewhere(monkeypatch) -> Callable[[Any], Loop]:
    """A start on n2 from a checkpoint; the loader begins behind the batches of steps 0 to 3."""

    def begin(saved: Any, settings: RerunSettings | None = None) -> Loop:
        monkeypatch.setenv("SLURMD_NODENAME", "n2")
        loop = Loop(settings)
        loop.data = RerunDataIterator(itertools.islice(batches(), 4, None))
        return loop.load(saved)

    return begin


def test_the_saved_gradients_and_buffers_are_those_of_before_the_iteration():
    saved = stopped(wrong(float("nan"), runs=2))
    before = Loop()
    before.run(3)
    assert same(saved["model"], before.state())


def test_what_is_wrong_in_another_way_elsewhere_proves_nothing(tmp_path, elsewhere):
    loop = elsewhere(stopped(wrong(float("nan"), runs=2)))
    assert loop.run(6, 3, spoil=wrong(float("inf"))) == (False, True, 17)
    verdict = read_verdict(tmp_path / "verdict")
    assert verdict is not None and verdict.rerun == "inconclusive"
    assert evidence(tmp_path) == [Kind.RERUN_UNDECIDED]


def test_saved_batches_that_were_damaged_prove_nothing(tmp_path, elsewhere):
    saved = stopped(wrong(float("nan"), runs=2))
    saved["data"]["batches"][0][0][0, 0] += 1
    assert elsewhere(saved).run(6, 3) == (False, True, 17)
    assert "damaged" in read_verdict(tmp_path / "verdict").message


def test_a_stop_before_the_rerun_loses_nothing(clean, elsewhere):
    again = elsewhere(stopped(wrong(float("nan"), runs=2))).saved()
    loop = elsewhere(again)
    assert loop.run(6, 3) == (False, False, 0)
    assert same(loop.state(), clean)


def test_a_case_of_another_step_is_dropped(elsewhere):
    saved = stopped(wrong(float("nan"), runs=2))
    saved["machine"]["iteration"] = 5
    loop = elsewhere(saved)
    assert loop.run(7, 5) == (False, False, 0)


@pytest.mark.parametrize("mode", [Mode.DISABLED, Mode.REPORT_STATS])
def test_where_nothing_is_judged_the_case_is_closed_and_no_batch_is_lost(clean, elsewhere, mode):
    loop = elsewhere(stopped(wrong(float("nan"), runs=2)), RerunSettings(mode=mode))
    assert loop.run(6, 3) == (False, False, 0)
    assert same(loop.state(), clean)


# what a rerun cannot prove


def test_a_batch_that_the_loop_has_written_into_proves_nothing(tmp_path):
    loop = Loop()

    def write(step: int, run: int, loss: torch.Tensor) -> torch.Tensor:
        loop.data._taken[0][0][1].mul_(2)  # the targets, which no gradient needs
        return wrong(float("nan"))(step, run, loss)

    assert loop.run(6, spoil=write) == (False, True, 17)
    assert "written into a batch" in read_verdict(tmp_path / "verdict").message


def test_without_an_iterator_nothing_is_proven(tmp_path):
    machine = RerunStateMachine(RerunSettings())
    for run in range(9):
        if not machine.should_run_forward_backward():
            break
        machine.validate_loss(float("nan") if run == 0 else 1.0)
    assert machine.should_checkpoint_and_exit() == (False, True, 17)
    assert "no RerunDataIterator" in read_verdict(tmp_path / "verdict").message


def test_a_step_of_the_optimizer_inside_the_loop_proves_nothing(tmp_path):
    loop = Loop()

    def step_early(step: int, run: int, loss: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            loop.model[0].weight.add_(0.1)
        return wrong(float("nan"))(step, run, loss)

    assert loop.run(6, spoil=step_early) == (False, True, 17)
    assert "step the optimizer after the loop" in read_verdict(tmp_path / "verdict").message


class Counting:
    """A loader with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def batches_of(machine: RerunStateMachine, steps: int) -> list[int]:
    found = []
    for _ in range(steps):
        while machine.should_run_forward_backward():
            found.append(next(machine.data))
    return found


def test_a_save_between_two_steps_repeats_no_batch():
    machine = RerunStateMachine(RerunSettings(), data=RerunDataIterator(Counting()))
    assert batches_of(machine, 3) == [1, 2, 3]
    resumed = RerunStateMachine(RerunSettings(), data=RerunDataIterator(Counting()))
    resumed.load_state_dict(machine.state_dict())
    assert batches_of(resumed, 2) == [4, 5]


def test_a_save_within_a_step_keeps_its_batches():
    machine = RerunStateMachine(RerunSettings(), data=RerunDataIterator(Counting()))
    batches_of(machine, 3)
    assert machine.should_run_forward_backward()
    assert next(machine.data) == 4
    resumed = RerunStateMachine(RerunSettings(), data=RerunDataIterator(Counting()))
    resumed.load_state_dict(machine.state_dict())
    assert batches_of(resumed, 2) == [4, 5]


class Drawing(Counting):
    """A loader that draws from all three generators, as augmentations do."""

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.position += 1
        return torch.rand(4, 3), torch.full((4, 1), random.random() + float(np.random.rand()))


@pytest.mark.parametrize("at", [0, 3])
def test_a_loader_that_draws_random_numbers_has_drawn_them_in_the_rerun_too(at):
    ends = []
    for spoil in (lambda step, run, loss: loss, wrong(float("nan"), at=at)):
        loop = Loop()
        loop.data = RerunDataIterator(Drawing())
        loop.run(6, spoil=spoil)
        ends.append(loop.state())
    assert loop.runs[at] == 2
    assert same(*ends)


def test_what_a_loader_has_drawn_is_drawn_elsewhere_too():
    loops = [Loop(), Loop()]
    for loop in loops:
        loop.data = RerunDataIterator(Drawing())
    first, second = loops
    ending = first.run(6, spoil=wrong(float("nan"), runs=9))
    assert ending == (True, True, 16)
    second.load(first.saved())
    second.machine._proceedings._own_hardware = Suspect(node="n2")
    second.run(6, start=3)
    clean_loop = Loop()
    clean_loop.data = RerunDataIterator(Drawing())
    clean_loop.run(6)
    assert second.runs == [1, 1, 1]
    assert same(second.state(), clean_loop.state())


def test_a_loop_that_is_left_early_is_an_error():
    machine = RerunStateMachine(RerunSettings(), data=RerunDataIterator(Counting()))
    while machine.should_run_forward_backward():
        break
    with pytest.raises(UsageError, match="left before it was over"):
        machine.should_checkpoint_and_exit()


@pytest.mark.parametrize("producers", [[], [5], [-1]], ids=str)
def test_somebody_is_suspected_whoever_is_named(producers):
    rejection = Rejection(
        rank=0, invocation=0, message="odd", values=(1.0,), tolerance=0.0, producers=tuple(producers)
    )  # fmt: skip
    assert rejection.on([Suspect(node="n1")]).suspects == (Suspect(node="n1"),)


def test_a_plain_iterator_is_refused():
    with pytest.raises(UsageError, match="RerunDataIterator"):
        RerunStateMachine(RerunSettings()).should_run_forward_backward(iter([1]))  # type: ignore[arg-type]


# what is rejected


def test_what_is_not_fatal_is_only_reported(caplog):
    machine, data = RerunStateMachine(RerunSettings()), RerunDataIterator([1, 2])
    runs = 0
    while machine.should_run_forward_backward(data):
        runs += 1
        machine.validate_result(torch.tensor([1.0, float("nan")]), message="weights", fatal=False)
    assert runs == 1
    assert "invocation #1 (message='weights'); not fatal" in caplog.text


def test_checks_of_ones_own():
    machine, data = RerunStateMachine(RerunSettings()), RerunDataIterator([1, 2])
    machine.add_check(lambda loss: loss > 5, "loss above 5")
    seen = []
    while machine.should_run_forward_backward(data):
        seen.append(1)
        machine.validate_loss(torch.tensor(6.0 if len(seen) == 1 else 4.0))
    assert len(seen) == 2


@pytest.mark.parametrize("late", [False, True])
def test_a_spiky_loss_is_run_again_and_the_recent_losses_are_saved(late):
    settings = RerunSettings(check_for_spiky_loss=True)

    def run(machine: RerunStateMachine, losses: list[float]) -> int:
        data, runs = RerunDataIterator(itertools.count()), 0
        for loss in losses:
            first = True
            while machine.should_run_forward_backward(data):
                machine.validate_loss(torch.tensor(loss if first else 1.0))
                runs, first = runs + 1, False
        return runs

    usual = [1.0 + 0.01 * (number % 5) for number in range(30)]
    machine = RerunStateMachine(settings, reads_late=late)
    assert run(machine, [9.0, *usual, 9.0]) == 33  # the first one could not be known to be one
    resumed = RerunStateMachine(settings, reads_late=late)
    resumed.load_state_dict(machine.state_dict())
    assert run(resumed, [9.0]) == 2


def test_a_tolerance_decides_what_is_reproduced():
    def ending(tolerance: float) -> int:
        machine, data = RerunStateMachine(RerunSettings()), RerunDataIterator(itertools.count())
        values = iter([100.0, 100.001, 100.0, 100.0])
        while machine.should_run_forward_backward(data):
            value = next(values)
            machine.validate_result(
                torch.tensor(value), lambda result: result == 100.0, message="odd", tolerance=tolerance
            )
        return machine.should_checkpoint_and_exit()[2]

    assert (ending(0.0), ending(1e-3)) == (0, 16)


def test_what_a_result_may_be():
    machine, data = RerunStateMachine(RerunSettings()), RerunDataIterator(itertools.count())
    while machine.should_run_forward_backward(data):
        for result in (1, 1.0, torch.tensor(1), torch.tensor([1.0, 2.0]), torch.ones(2, dtype=torch.bfloat16)):
            machine.validate_result(result)
    with pytest.raises(UsageError, match="at most"):
        while machine.should_run_forward_backward(data):
            machine.validate_result(torch.full((5000,), torch.nan))


NAN = float("nan")


@pytest.mark.parametrize(
    ("result", "code"),
    [
        ((1.0, NAN), 16), ([1, 2], 0), ((), 0), ([[1.0], (2.0, NAN)], 16), (np.float32("nan"), 16),
        (np.array([1.0, NAN]), 16), ((torch.tensor(1.0), torch.tensor([[NAN]])), 16), ([torch.tensor(1), 2.0], 0),
        (torch.tensor(complex(0, NAN)), 16), (True, 0), (1e300, 0),
    ],
    ids=repr,
)  # fmt: skip
def test_a_result_of_several_numbers_is_judged_as_one(result, code):
    machine, data = RerunStateMachine(RerunSettings()), RerunDataIterator(itertools.count())
    while machine.should_run_forward_backward(data):
        next(data)
        machine.validate_result(result)
        machine.validate_result(result, rejection_func=torch.isinf)
    assert machine.should_checkpoint_and_exit()[2] == code


@pytest.mark.parametrize(
    "result", [None, "1", b"1", {"loss": 1.0}, (1.0, None), object(), 10**400], ids=lambda result: type(result).__name__
)
def test_a_result_that_is_no_number_is_refused(result):
    machine = RerunStateMachine(RerunSettings())
    assert machine.should_run_forward_backward(RerunDataIterator(itertools.count()))
    with pytest.raises(UsageError, match="a result to validate"):
        machine.validate_result(result)


@pytest.mark.parametrize("verdict", [(False, False), [], np.array([False, False]), torch.tensor([False, False]), 0])
def test_what_a_rejection_function_may_say(verdict):
    machine, data = RerunStateMachine(RerunSettings()), RerunDataIterator(itertools.count())
    while machine.should_run_forward_backward(data):
        machine.validate_result(1.0, rejection_func=lambda _result: verdict)
    assert machine.should_checkpoint_and_exit()[2] == 0


# injection


def test_errors_are_injected_in_all_three_kinds_by_rate(clean):
    for kind, code in (
        (Injection.TRANSIENT_ERROR, 0),
        (Injection.PERSISTENT_ERROR, 16),
        (Injection.CORRECT_RESULT, 16),
    ):
        loop = Loop(RerunSettings(error_injection_rate=3, error_injection_type=kind, error_injection_seed=4))
        assert loop.run(6)[2] == code
        assert max(loop.runs) == 2
        assert code or same(loop.state(), clean)


# settings


def test_the_settings_are_those_of_the_configuration():
    assert RerunSettings() == convert(RerunConfig().model_dump(mode="json"), RerunSettings)
    assert RerunSettings() == WorkerSettings.from_environment({}).rerun
    changed = RerunConfig(mode="report_stats", error_injection_step=4, error_injection_node="n 1")
    text = WorkerSettings(rerun=convert(changed.model_dump(mode="json"), RerunSettings)).as_text()
    settings = WorkerSettings.from_environment({WORKER_VARIABLE: text}).rerun
    assert {name: getattr(settings, name) for name in type(changed).model_fields} == changed.model_dump()


# data


def test_batches_are_handed_out_again_and_forgotten():
    data = RerunDataIterator(range(5))
    assert [next(data), next(data)] == [0, 1]
    data.rewind()
    assert [next(data), next(data), next(data)] == [0, 1, 2]
    data.rewind()
    assert next(data) == 0
    data.advance()
    assert list(data) == [1, 2, 3, 4]  # what the rerun did not take comes next


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        ({"a": 1}, {"b": 1}),
        ([1, [2]], [[1], 2]),
        ("1", 1),
        (b"1", "1"),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
    ],
)
def test_different_batches_have_different_hashes(one, other):
    assert batch_hash(one) != batch_hash(other)
    assert batch_hash(one) == batch_hash(one)


def test_a_batch_has_one_hash_wherever_it_lies_in_memory():
    whole = torch.arange(12).reshape(3, 4)
    assert batch_hash(whole.t()) == batch_hash(whole.t().contiguous())
    assert batch_hash(whole[1]) == batch_hash(torch.tensor([4, 5, 6, 7]))
    assert batch_hash(torch.zeros(0)) == batch_hash(torch.zeros(0))
    assert batch_hash(torch.eye(2).to_sparse()) != batch_hash(torch.zeros(2, 2).to_sparse())
    assert batch_hash(torch.ones(2, dtype=torch.bfloat16)) != batch_hash(torch.zeros(2, dtype=torch.bfloat16))


def test_the_state_of_a_loader_without_the_wrapper_loads():
    machine = RerunStateMachine(RerunSettings(), data=RerunDataIterator(Counting()))
    machine.load_state_dict({"position": 7})
    assert next(machine.data) == 8
    machine.data.advance()
    again = RerunStateMachine(RerunSettings(), data=RerunDataIterator(Counting()))
    again.load_state_dict(machine.state_dict())
    assert next(again.data) == 9


# random numbers

DRAWS: list[Callable[[], object]] = [
    random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.normal, lambda: torch.rand(2).tolist(),
    lambda: random.seed(5), lambda: np.random.seed(5), lambda: None, lambda: [random.random() for _ in range(624)],
    lambda: np.random.bytes(4 * 624),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_the_start_of_each_iteration_is_remembered_whatever_was_drawn(seed):
    choose, start = random.Random(seed), IterationStart()
    for _ in range(150):
        for draw in choose.choices(DRAWS, k=2):
            draw()
        start.mark()
        now, remembered = savers.capture(), start.state()
        assert now["python"] == remembered["python"] and now["numpy"] == remembered["numpy"]
        assert torch.equal(now["torch"], remembered["torch"])
    drawn = [draw() for draw in DRAWS[:5]]
    start.restore()
    assert [draw() for draw in DRAWS[:5]] == drawn


# ten thousand ranks


class ManyRanks:
    """Rank 7,000 of 10,000; all others say what it says, from nodes of their own."""

    rank, size, is_distributed = 7000, 10_000, True

    def exchange(self, row: Any, kind: Any) -> list[Any]:
        if isinstance(row, tuple):
            own, rejection = row
            others = [None if rejection is None else replace(rejection, rank=n, producers=(n,)) for n in range(10_000)]
            return [(replace(own, node=f"n{n}", rank=n), others[n]) for n in range(10_000)]
        return [row] * 10_000


def test_when_all_ranks_reject_a_result_the_case_stays_small():
    ranks: Any = ManyRanks()
    case = Proceedings(RerunSettings(), ranks, Suspect(node="n7000", rank=7000))
    rejection = Rejection(
        rank=7000, invocation=0, message="loss is NaN", values=(float("nan"),), tolerance=0.0, producers=(7000,)
    )
    assert case.open(rejection, 3)
    assert case.own is None  # 256 others were remembered
    departure, again = case.conclude(Phase.IN_PLACE, Row(seen=Seen.REPRODUCED, doubt="", is_finite=True))
    assert departure is not None and not again
    assert (departure.exit_code, len(departure.suspects), departure.has_say) == (16, 256, False)
    assert len(departure.message) < 1000
    file = io.BytesIO()
    torch.save(case.state_dict(), file)
    assert len(file.getvalue()) < 100_000
