"""How far a batch can be reduced, by whom it is known, and what follows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each
from worker_variable import worker_variable

from slurmft.errors import UsageError
from slurmft.policy.worker_settings import MAX_DIVISOR, Irreducible, Smaller, divisor_in, pieces, smaller, split_batch
from slurmft.storage.verdicts import BATCH_FILE, AskedBatches, noted_batches
from slurmft.worker.session import Batches


def steps(micro_batch: int, min_batch: int = 1) -> list[int]:
    """The micro-batches of one start after another, each of which runs out of memory."""
    divisor, sizes = 1, [micro_batch]
    while isinstance(found := smaller([micro_batch], divisor=divisor, min_batch=min_batch), Smaller):
        assert found.micro_batches == (micro_batch // pieces(micro_batch, found.divisor),)
        divisor = found.divisor
        sizes += found.micro_batches
    return sizes


@of_each(
    micro_batch__min_batch__sizes=[
        (8, 1, [8, 4, 2, 1]),
        (8, 3, [8, 4]),
        (8, 4, [8, 4]),
        (8, 5, [8]),
        (8, 100, [8]),
        (12, 1, [12, 6, 3, 1]),
        (7, 1, [7, 1]),
        (7, 2, [7]),
        (30, 1, [30, 15, 6, 3, 1]),
        (1, 1, [1]),
        (1_000_003, 1, [1_000_003, 1]),
    ]
)
def test_each_step_at_least_halves(micro_batch, min_batch, sizes):
    assert steps(micro_batch, min_batch) == sizes


@given(st.integers(1, 10**9), st.integers(1, 2**30))
def test_pieces_are_equal_and_as_few_as_may_be(micro_batch, at_least):
    number = pieces(micro_batch, at_least)
    assert micro_batch % number == 0
    assert number == micro_batch or number >= at_least


@given(st.sets(st.integers(1, 200), min_size=1, max_size=4), st.integers(1, 10))
def test_it_ends_and_never_goes_below_the_limit(asked, min_batch):
    divisor = 1
    for _ in range(9):  # 200 is halved 8 times at most
        now = [size // pieces(size, divisor) for size in sorted(asked)]
        found = smaller(asked, divisor=divisor, min_batch=min_batch)
        if isinstance(found, Irreducible):
            break
        assert max(found.micro_batches) < max(now)
        assert all(size >= min_batch or size in asked for size in found.micro_batches)
        divisor = found.divisor
    assert isinstance(found, Irreducible)


def test_words_for_people():
    assert smaller([1], divisor=1, min_batch=1) == Irreducible(
        reason="the micro-batch of 1 sample cannot be made smaller"
    )
    found = smaller([4], divisor=1, min_batch=3)
    assert found == Irreducible(reason="the micro-batch of 4 samples could next be 2, below oom.min_batch=3")


@pytest.mark.parametrize(
    ("values", "divisor"),
    [([], 1), ([2], 2), ([2, 4], 4), ([2, None, "8", -1, True, 0, 2.5, MAX_DIVISOR + 1], 2)],
    ids=str,
)
def test_a_damaged_journal_changes_nothing(values, divisor):
    assert divisor_in(values) == divisor


def batches(tmp_path, divisor: str = "1", rank: str = "0") -> Batches:
    return Batches(
        worker_variable({}, batch_divisor=int(divisor) if divisor.isdecimal() else divisor)
        | {"SLURMFT_ERROR_DIR": str(tmp_path), "RANK": rank}
    )


def test_without_a_divisor_nothing_changes(tmp_path):
    plain = Batches({})
    assert (plain.micro_batch(8), plain.accumulation(3), plain.accumulation()) == (8, 3, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("samples", "divisor", "micro_batch", "accumulation"),
    [(8, "2", 4, 6), (6, "4", 1, 18), (6, "2", 3, 6), (1, "8", 1, 3)],
)
def test_the_global_batch_stays(tmp_path, samples, divisor, micro_batch, accumulation):
    cut = batches(tmp_path, divisor)
    assert (cut.micro_batch(samples), cut.accumulation(3)) == (micro_batch, accumulation)
    assert micro_batch * accumulation == samples * 3


@of_each(text=["", "x", "-2", "0", "2.5", "9" * 30])
def test_a_divisor_that_is_none_counts_as_1(tmp_path, text):
    assert batches(tmp_path, text).micro_batch(8) == 8


def test_the_lead_says_what_was_asked_for(tmp_path):
    lead, other = batches(tmp_path, "2"), batches(tmp_path, "2", rank="1")
    other.micro_batch(8)
    assert noted_batches(tmp_path) is None
    lead.micro_batch(8)
    lead.split(64, 2, 4)
    assert noted_batches(tmp_path) == AskedBatches(asked=(4, 8), divisor=2)


def test_an_elastic_split_keeps_the_global_batch_on_any_world_size(tmp_path):
    cut = batches(tmp_path, "2")
    for world_size in (1, 3, 5):
        split = cut.split(30, world_size, 8)
        assert (split.global_batch, split.max_micro_batch) == (30, 4)


def test_a_folder_that_is_gone_is_no_reason_to_fail(tmp_path):
    assert batches(tmp_path / "gone").micro_batch(8) == 8


@of_each(content=["", "{", "[]", '{"format": 1}', '{"format": 1, "asked": [], "divisor": 1}',
     '{"format": 99, "asked": [1], "divisor": 1}',
     '{"format": 1, "asked": [0], "divisor": 1}', '{"format": 1, "asked": [NaN], "divisor": 1}',
     '{"format": 1, "asked": [1], "divisor": "2"}', '{"format": 1, "asked": {"1": 1}, "divisor": 1}'])  # fmt: skip
def test_a_note_that_is_damaged_is_none(tmp_path, content):
    (tmp_path / BATCH_FILE).write_text(content)
    assert noted_batches(tmp_path) is None


@of_each(number=[0, -1, 2.0, True, float("nan"), "8", None])
def test_nonsense_is_refused(tmp_path, number):
    with pytest.raises(UsageError):
        batches(tmp_path).micro_batch(number)
    with pytest.raises(UsageError):
        batches(tmp_path).accumulation(number)


# --- Global batches spread over ranks and micro-batches: nothing lost, nothing counted twice ---


@of_each(
    global_batch__world_size__max_micro_batch__samples__micro_batches=[
        (8, 2, 4, (4, 4), ((4,), (4,))),
        (8, 2, 2, (4, 4), ((2, 2), (2, 2))),
        (8, 3, 4, (3, 3, 2), ((3,), (3,), (2,))),
        (10, 3, 2, (4, 3, 3), ((2, 2), (2, 1), (2, 1))),
        (10, 4, 2, (3, 3, 2, 2), ((2, 1), (2, 1), (2,), (2,))),
        (3, 3, 100, (1, 1, 1), ((1,), (1,), (1,))),
    ]
)
def test_examples(global_batch, world_size, max_micro_batch, samples, micro_batches):
    split = split_batch(global_batch, world_size, max_micro_batch)
    assert split.samples == samples
    assert tuple(split.micro_batches(rank) for rank in range(world_size)) == micro_batches
    assert split.accumulation == max(map(len, micro_batches))


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 5000))
def test_every_sample_has_one_place_and_all_weights_add_up(global_batch, world_size, max_micro_batch):
    if world_size > global_batch:
        with pytest.raises(UsageError, match="idle"):
            split_batch(global_batch, world_size, max_micro_batch)
        return
    split = split_batch(global_batch, world_size, max_micro_batch)
    spans = [split.span(rank) for rank in range(world_size)]
    assert [place for first, end in spans for place in range(first, end)] == list(range(global_batch))
    assert max(split.samples) - min(split.samples) <= 1
    parts = [split.micro_batches(rank) for rank in range(world_size)]
    assert tuple(map(sum, parts)) == split.samples == tuple(sorted(split.samples, reverse=True))
    assert all(0 < size <= max_micro_batch for each in parts for size in each)
    assert split.accumulation == max(map(len, parts)) <= min(map(len, parts)) + 1
    assert sum(split.loss_scale(size) for each in parts for size in each) == pytest.approx(world_size)


def test_ten_thousand_ranks_cost_nothing():
    split = split_batch(4_000_003, 10_000, 7)
    assert split.accumulation == 58 and split.span(9_999)[1] == 4_000_003


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
def test_the_gradient_is_that_of_the_whole_batch_on_any_world_size(world_size):
    torch.manual_seed(0)
    inputs, weight = torch.rand(23, 4, dtype=torch.double), torch.rand(4, dtype=torch.double, requires_grad=True)
    (whole,) = torch.autograd.grad((inputs @ weight).square().mean(), weight)
    split = split_batch(23, world_size, 3)
    total = torch.zeros_like(weight)
    for rank in range(world_size):
        first, end = split.span(rank)
        for part in inputs[first:end].split(list(split.micro_batches(rank))):
            loss = (part @ weight).square().mean() * split.loss_scale(len(part))
            total += torch.autograd.grad(loss, weight)[0]
    assert torch.allclose(total / world_size, whole, rtol=1e-12)


@of_each(numbers=[(0, 1, 1), (8, 0, 1), (8, 2, 0), (-8, 2, 1), (8.0, 2, 1), (8, True, 1)])
def test_nonsense_of_batches_is_refused(numbers):
    with pytest.raises(UsageError, match="positive"):
        split_batch(*numbers)
