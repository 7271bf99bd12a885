"""A state as an image and back: every kind of tensor, plain torch as a reader, damage anywhere, other models."""

import io
import json
import math
import pickle
import time
from dataclasses import replace

import pytest
import stored_state
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from slurmft.checkpoint import image as checkpoint_image
from slurmft.checkpoint.catalog import metadata_bytes
from slurmft.checkpoint.image import Layout, NoRoom, ObjectPacker, from_bytes, spread
from slurmft.checkpoint.image_file import Damage, Damaged, image_file, index_file, read_index, verified_index
from slurmft.checkpoint.loading import prepare
from slurmft.checkpoint.reading import Box, Source, Stored, Target
from slurmft.checkpoint.state import FlatState, Trainee, capture, flatten, key_of, unflatten
from slurmft.errors import CheckpointError, StorageError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Net(torch.nn.Module):
    """Tied weights, a scalar, an empty one, buffers of several kinds, one inner compiled module, extra state."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, width)
        self.head = torch.nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.inner = torch.compile(torch.nn.Linear(width, width), backend="eager")
        self.norm = torch.nn.BatchNorm1d(width)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("wave", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("low", torch.randn(3, 4).to(torch.bfloat16).t())
        self.counts = {"seen": 3, "history": [torch.ones(2), 5]}

    def get_extra_state(self):
        return self.counts

    def set_extra_state(self, state):
        self.counts = state

    def forward(self, x):
        return self.head(self.norm(self.inner(self.embedding(x)))) * self.scale


def trainee(seed: int = 0, steps: int = 2, model: torch.nn.Module | None = None) -> Trainee:
    torch.manual_seed(seed)
    model = model or Net()
    weights = [weight for weight in model.parameters() if weight.numel()]
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.1), amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        scheduler.step()
    return Trainee(model, optimizer, scheduler=scheduler)


def leaves(one: Trainee) -> dict[str, object]:
    model = {name: value for name, value in one.model.state_dict().items()}
    return flatten_state_dict({"model": model, "optimizer": one.optimizer.state_dict()})[0]


def differing(first: dict[str, object], second: dict[str, object]) -> list[str]:
    assert first.keys() == second.keys()
    return [key for key in first if not _equal(first[key], second[key])]


def _equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return bool(first == second)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint folder of one shard, and what was saved in it."""
    one = trainee()
    stored_state.save(tmp_path / "c", one, extra={"name": "x", "ema": torch.arange(3)})
    stored_state.commit(tmp_path / "c")
    return tmp_path / "c", one


# ---- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "with-state"])
def test_a_state_comes_back_exactly(saved, steps):
    folder, before = saved
    after = trainee(seed=9, steps=steps)
    addresses = [weight.data_ptr() for weight in after.model.parameters()]
    prepared = stored_state.load(folder, after)
    prepared.apply()
    assert differing(leaves(before), leaves(after)) == []
    assert after.model.counts["history"][1] == 5
    assert after.scheduler.state_dict() == before.scheduler.state_dict()
    assert prepared.extra["name"] == "x" and torch.equal(prepared.extra["ema"], torch.arange(3))
    assert [weight.data_ptr() for weight in after.model.parameters()] == addresses  # DDP and views hold on to them


def test_nothing_changes_before_it_is_applied(saved):
    folder, _ = saved
    after = trainee(seed=9)
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in leaves(after).items()}
    stored_state.load(folder, after)
    assert differing(before, leaves(after)) == []


def test_saving_steps_no_optimizer_and_draws_nothing():
    fresh = trainee(steps=0)
    draws = torch.get_rng_state()
    state = capture(fresh, None, rank=0)
    stored_state.stage(state)
    assert not fresh.optimizer.state and torch.equal(torch.get_rng_state(), draws)
    assert state.objects["optimizer.state"] == {}


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.tensor(3.5), id="scalar"),
        pytest.param(torch.empty(0), id="empty"),
        pytest.param(torch.empty(3, 0, 2, dtype=torch.int8), id="empty-of-three-dimensions"),
        pytest.param(torch.randn(4, 6).t()[1:, ::2], id="not-contiguous"),
        pytest.param(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), id="channels-last"),
        pytest.param(torch.randn(3).expand(5, 3), id="expanded"),
        pytest.param(torch.randn(3, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(torch.tensor([True, False]), id="bool"),
        pytest.param(torch.randn(7).to(torch.bfloat16), id="bfloat16"),
        pytest.param(torch.randn(7).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(torch.arange(7).to(torch.uint16), id="uint16"),
        pytest.param(torch.tensor([math.nan, -0.0, math.inf]), id="not-finite"),
    ],
)
def test_every_kind_of_dense_tensor(tmp_path, tensor):
    state = FlatState(tensors={"model.t": tensor})
    index = stored_state.write(tmp_path / "c", *stored_state.stage(state))
    (item,) = index.items
    assert item.data_offset % 64 == 0 or not item.data_length
    read = torch.empty(tensor.shape, dtype=tensor.dtype)
    stored_state.stored_in(tmp_path / "c", index).fill({"model.t": Target(read, (0,) * tensor.dim())})
    raw = (tmp_path / "c" / image_file(0)).read_bytes()
    plain = torch.load(io.BytesIO(raw[item.offset : item.offset + item.length]), weights_only=True)
    for found in (read, plain):
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        same_bits = found.contiguous().view(-1).view(torch.uint8), tensor.resolve_conj().contiguous().view(-1)
        assert torch.equal(same_bits[0], same_bits[1].view(torch.uint8))


@pytest.mark.parametrize("sizes", [(), (0, 2), (3, 5)], ids=["scalar", "empty", "matrix"])
def test_without_skip_data_the_archive_has_the_same_form(sizes, monkeypatch):
    def refused(*_arguments, **_more):
        raise RuntimeError("not in this version")

    usual = checkpoint_image._archive(torch.float32, sizes)
    monkeypatch.setattr(
        checkpoint_image, "_archive", checkpoint_image._archive.__wrapped__
    )  # what is known is not looked up
    monkeypatch.setattr(checkpoint_image, "skip_data", refused)
    other = checkpoint_image._archive(torch.float32, sizes)
    assert (len(other.head), other.data_bytes, len(other.tail)) == (len(usual.head), usual.data_bytes, len(usual.tail))
    values = torch.arange(other.data_bytes, dtype=torch.uint8)
    for archive in (usual, other):
        whole = archive.head + values.numpy().tobytes() + archive.tail
        back = torch.load(io.BytesIO(whole.ljust(archive.length, b"\0")), weights_only=True)
        assert torch.equal(back.reshape(-1).view(torch.uint8), values)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.eye(4).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8), id="quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_other_tensors_are_stored_as_objects(make):
    value = make()
    model = torch.nn.Linear(1, 1)
    model.register_buffer("odd", value)
    one = Trainee(model, torch.optim.SGD(model.parameters()))
    state = capture(one, None, rank=0)
    assert "model.odd" in state.objects and "model.weight" in state.tensors
    memory, index = stored_state.stage(state)
    (item,) = [item for item in index.items if item.key == "model.odd"]
    back = from_bytes(memory[item.data_offset : item.data_offset + item.data_length])
    assert back.layout == value.layout and back.is_quantized == value.is_quantized


# ---- plain torch reads it --------------------------------------------------------------------------------------------


def test_torch_reads_it_without_slurmft(saved):
    folder, before = saved
    after = trainee(seed=9)
    state = {
        "model": get_model_state_dict(after.model),
        "optimizer": get_optimizer_state_dict(after.model, after.optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    after.model.load_state_dict(
        {name: state["model"][name.replace("_orig_mod.", "")] for name in after.model.state_dict()}
    )
    found = state["optimizer"]
    expected = get_optimizer_state_dict(before.model, before.optimizer)
    assert differing(flatten_state_dict(expected)[0], flatten_state_dict(found)[0]) == []
    assert torch.equal(after.model.head.weight, before.model.head.weight)


def test_the_keys_are_exactly_torchs():
    one = trainee()
    theirs, paths = flatten_state_dict(
        {
            "model": get_model_state_dict(one.model),
            "optimizer": get_optimizer_state_dict(one.model, one.optimizer),
        }
    )
    state = capture(one, None, rank=0)
    ours = {key: path for key, path in state.paths.items() if path[0] in ("model", "optimizer")}
    assert ours == paths
    assert list(state.tensors) == [key for key in ours if isinstance(theirs[key], torch.Tensor)]


def test_torchs_own_converter_reads_it(saved, tmp_path):
    folder, before = saved
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(whole["model"]["inner.weight"], before.model.inner.weight)
    assert [float(group["lr"]) for group in whole["optimizer"]["param_groups"]] == pytest.approx([0.01, 0.05])
    assert whole["extra"]["name"] == "x"


def test_the_metadata_is_what_torch_itself_would_have_written(saved, tmp_path):
    folder, one = saved
    dcp.save({"model": get_model_state_dict(one.model)}, checkpoint_id=tmp_path / "theirs")
    theirs, ours = (FileSystemReader(path).read_metadata() for path in (tmp_path / "theirs", folder))
    for key, value in theirs.state_dict_metadata.items():
        assert ours.state_dict_metadata[key] == value
        assert ours.planner_data[key] == theirs.planner_data[key]
    assert theirs.storage_data.keys() <= ours.storage_data.keys()
    assert (type(theirs), theirs.version) == (type(ours), ours.version)
    assert vars(theirs).keys() == vars(ours).keys()


def test_metadata_is_cheap_and_takes_large_numbers(tmp_path):
    tensors = {f"model.layer.{number}.weight": torch.empty(100, 3) for number in range(500)}
    _, index = stored_state.stage(FlatState(tensors=tensors, objects={"extra": {}}))
    far = index.items[-1]
    metadata = pickle.loads(metadata_bytes([index]))
    assert metadata.planner_data["extra"] == ("extra",) and far.key == "extra"
    took = min(_seconds(lambda: metadata_bytes([index])) for _ in range(5))
    assert took < 0.05  # some 5 ms on an idle core


def _seconds(function) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_anywhere_is_found(saved):
    folder, _ = saved
    path = folder / image_file(0)
    whole, after = path.read_bytes(), trainee(seed=9)
    generator = torch.Generator().manual_seed(1)
    places = {0, len(whole) - 1, *torch.randint(len(whole), (60,), generator=generator).tolist()}
    for place in sorted(places):
        broken = bytearray(whole)
        broken[place] ^= 0x10
        path.write_bytes(broken)
        with pytest.raises(Damaged, match=r"__0_0\.distcp has the wrong checksum: ") as caught:
            stored_state.load(folder, after)
        assert caught.value.damage is Damage.CHANGED
    path.write_bytes(whole)
    stored_state.load(folder, after)


@pytest.mark.parametrize(
    ("harm", "damage"),
    [
        pytest.param(lambda path: path.unlink(), Damage.MISSING, id="missing"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-100]), Damage.TRUNCATED, id="cut"),
        pytest.param(lambda path: (path.unlink(), path.mkdir()), Damage.UNREADABLE, id="a-folder"),
    ],
)
def test_what_else_can_happen_to_an_image(saved, harm, damage):
    folder, _ = saved
    harm(folder / image_file(0))
    with pytest.raises(Damaged, match=r"__0_0\.distcp") as caught:
        stored_state.load(folder, trainee())
    assert caught.value.damage is damage


def test_an_object_that_is_intact_and_no_archive_is_damage(tmp_path):
    state = FlatState(tensors={"model.t": torch.ones(1)}, objects={"extra": 1})
    memory, index = stored_state.stage(state)
    item = index.items[-1]
    memory[item.data_offset : item.data_offset + item.data_length] = b"x" * item.data_length
    index = stored_state.write(tmp_path / "c", memory, index)
    with pytest.raises(Damaged, match=r"__0_0\.distcp cannot be read: extra"):
        stored_state.stored_in(tmp_path / "c", index).load_objects(["extra"])


def test_shards_that_do_not_belong_together(tmp_path):
    state = FlatState(tensors={"model.a": torch.ones(2), "model.b": torch.ones(2)})
    first, second = (stored_state.stage(state, shard=shard, shards=2)[1] for shard in (0, 1))
    image = tmp_path / "x"
    for indexes, text in (
        ([], "__0_0.json is missing"),
        ([first], "__1_0.distcp is missing"),
        ([first, stored_state.stage(state, shard=1, shards=3)[1]], "__1_0.json cannot be read: it belongs to another"),
    ):
        with pytest.raises(Damaged, match=text):
            Stored({index.shard: Source(image=image, index=index) for index in indexes})
    both = {index.shard: Source(image=image, index=index) for index in (second, first)}
    assert set(Stored(both).tensors) == {"model.a", "model.b"}


# ---- fit -------------------------------------------------------------------------------------------------------------


def _without_head() -> torch.nn.Module:
    model = Net()
    del model.norm
    return model


def _with_more() -> torch.nn.Module:
    model = Net()
    model.more = torch.nn.Linear(1, 1)
    return model


@pytest.mark.parametrize(
    ("model", "text"),
    [
        pytest.param(lambda: Net(width=6), r"embedding.weight is \[5, 8\] there and \[5, 6\] here", id="shape"),
        pytest.param(_with_more, "it lacks more.bias, more.weight", id="missing"),
        pytest.param(_without_head, "this model has no norm.bias, norm.num_batches_tracked, .* and 2 more", id="extra"),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_name(saved, model, text):
    folder, _ = saved
    with pytest.raises(Damaged, match=text) as caught:
        stored_state.load(folder, trainee(model=model()))
    assert caught.value.damage is Damage.MISFIT


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        pytest.param(lambda weights: [{"params": weights}], "has 2 parameter groups there and 1 here", id="groups"),
        pytest.param(lambda weights: [{"params": weights[:3]}, {"params": weights[3:]}],
                     "optimizer group 0 lacks inner.bias|optimizer group 0 lacks", id="other-groups"),
        pytest.param(lambda weights: [{"params": weights[:2]}, {"params": weights[2:-1]}],
                     "optimizer group 1 has no norm.bias here", id="fewer"),
    ],
)  # fmt: skip
def test_another_optimizer_is_refused_by_name(saved, groups, text):
    folder, _ = saved
    model = Net()
    weights = [weight for weight in model.parameters() if weight.numel()]
    with pytest.raises(Damaged, match=text):
        stored_state.load(folder, Trainee(model, torch.optim.AdamW(groups(weights))))


def test_parameters_beside_the_model_are_known_by_their_place(tmp_path):
    def one(value):
        model, free = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.full((3,), value))
        optimizer = torch.optim.SGD([*model.parameters(), free], lr=0.1, momentum=0.9)
        free.grad = free.detach().clone()
        optimizer.step()
        return Trainee(model, optimizer)

    before, after = one(2.0), one(5.0)
    assert "optimizer.state.group_0.param_2.momentum_buffer" in capture(before, None, rank=0).tensors
    stored_state.save(tmp_path / "c", before)
    stored_state.load(tmp_path / "c", after).apply()
    assert torch.equal(after.optimizer.state_dict()["state"][2]["momentum_buffer"], torch.full((3,), 2.0))


# ---- objects ---------------------------------------------------------------------------------------------------------


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(Custom(), "Custom", id="own-class"),
        pytest.param({"deep": [{"x": print}]}, "print", id="function"),
        pytest.param(lambda: 1, "lambda", id="lambda"),
    ],
)
def test_what_could_not_be_loaded_is_refused_at_save(value, text):
    with pytest.raises(CheckpointError, match=f"(?s)extra cannot be part of a checkpoint.*{text}"):
        ObjectPacker().pack({"extra": value})


def test_unchanged_objects_are_packed_once():
    packer, value = ObjectPacker(), {"a": [1, 2.0, None], "b": ("x", True)}
    first = packer.pack({"extra": value})[0].data
    assert packer.pack({"extra": {"a": [1, 2.0, None], "b": ("x", True)}})[0].data is first
    value["a"].append(3)  # in place
    assert from_bytes(packer.pack({"extra": value})[0].data) == value


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ("1", 1)],
    ids=["int-bool", "int-float", "sign-of-zero", "list-tuple", "order", "text-int"],
)
def test_equal_is_not_the_same(first, second):
    packer = ObjectPacker()
    packer.pack({"k": first})
    found = from_bytes(packer.pack({"k": second})[0].data)
    assert repr(found) == repr(second)


# ---- layout ----------------------------------------------------------------------------------------------------------


def test_a_layout_stays_until_the_tensors_change():
    state = capture(trainee(), None, rank=0)
    layout = Layout.plan(state.tensors, shard=0, shards=1)
    assert layout.matches(state.tensors)
    assert layout.fingerprint == Layout.plan(state.tensors, shard=0, shards=1).fingerprint < 2**63
    others = [
        dict(reversed(state.tensors.items())),
        {**state.tensors, "model.new": torch.ones(1)},
        {**state.tensors, "model.scale": torch.ones(2)},
        {**state.tensors, "model.scale": torch.tensor(1.0, dtype=torch.float64)},
    ]
    for other in others:
        assert not layout.matches(other)
        assert layout.fingerprint != Layout.plan(other, shard=0, shards=1).fingerprint


def test_all_ranks_have_one_fingerprint_and_share_the_bytes():
    tensors = {f"model.{number}": torch.ones(number + 1) for number in range(40)}
    layouts = [Layout.plan(tensors, shard=shard, shards=4) for shard in range(4)]
    assert len({layout.fingerprint for layout in layouts}) == 1
    keys = [item.key for layout in layouts for item in layout.items]
    assert sorted(keys) == sorted(tensors)
    sizes = [sum(item.data_length for item in layout.items) for layout in layouts]
    assert max(sizes) - min(sizes) <= 40 * 4


def test_memory_that_is_too_small_is_said_before_anything_is_written():
    state = FlatState(tensors={"model.a": torch.ones(1000)}, objects={"extra": "x" * 500})
    layout = Layout.plan(state.tensors, shard=0, shards=1)
    packed = layout.pack(state.objects)
    for size, call in (
        (layout.tensor_bytes - 1, layout.write_fixed),
        (layout.tensor_bytes - 1, layout.views),
        (layout.size_bytes(packed) - 1, lambda m: layout.with_objects(m, packed, identity=stored_state.IDENTITY)),
    ):
        memory = bytearray(size)
        with pytest.raises(NoRoom) as caught:
            call(memory)
        assert f" {size + 1} bytes" in str(caught.value) and not any(memory)


def test_the_meta_device_has_nothing_to_save():
    with pytest.raises(UsageError, match=r"model\.a is on the meta device"):
        Layout.plan({"model.a": torch.ones(1, device="meta")}, shard=0, shards=1)


# ---- pure parts ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**12), max_size=60), st.integers(1, 12))
def test_spread_is_balanced_and_repeatable(sizes, holders):
    chosen = spread(sizes, holders)
    assert chosen == spread(list(sizes), holders)
    loads = [sum(size for size, to in zip(sizes, chosen, strict=True) if to == holder) for holder in range(holders)]
    assert max(loads) <= sum(sizes) / holders + max(sizes, default=0)
    counts = [chosen.count(holder) for holder in range(holders)]
    if len(set(sizes)) == 1:
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("sizes", "holders"), [([1], 0), ([-1], 2)], ids=["nobody", "negative"])
def test_spread_refuses_nonsense(sizes, holders):
    with pytest.raises(ValueError, match="cannot be spread"):
        spread(sizes, holders)


_values = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.just(torch.ones(1))),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=3), _values, min_size=1, max_size=3))
def test_flat_keys_are_torchs_and_come_back(nested):
    ours = {path: value for name, each in nested.items() for path, value in flatten((name,), each, torch.is_tensor)}
    _, paths = flatten_state_dict(nested)
    assert {key_of(path): path for path in ours} == paths
    assert unflatten(ours) == nested


@pytest.mark.parametrize("value", [{}, {1: torch.ones(1)}, {"a": {}}, [{}]], ids=["empty", "number", "deep", "in-list"])
def test_dicts_that_torch_would_lose_come_back(value):
    leaves = dict(flatten(("x",), value, torch.is_tensor))
    assert unflatten(leaves) == {"x": value}


@pytest.mark.parametrize(
    "paths",
    [[("a",), ("a", "b")], [("a", "b"), ("a", 0)], [("a", 1)]],
    ids=["value-and-dict", "dict-and-list", "gap"],
)
def test_paths_that_contradict_each_other(paths):
    with pytest.raises(ValueError, match=r"holds values|twice|neither"):
        unflatten({path: number for number, path in enumerate(paths)})


@st.composite
def _two_boxes(draw):
    shape = draw(st.lists(st.integers(1, 4), max_size=3))

    def box():
        starts = [draw(st.integers(0, size - 1)) for size in shape]
        return Box(tuple(starts), tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, starts, strict=True)))

    return shape, box(), box()


@given(_two_boxes())
def test_overlaps_and_runs_are_what_slicing_says(case):
    shape, first, second = case
    whole = torch.arange(math.prod(shape)).reshape(shape)
    ones, others = (
        set(whole[tuple(slice(s, s + n) for s, n in zip(b.starts, b.sizes, strict=True))].flatten().tolist())
        for b in (first, second)
    )
    part = first.overlap(second)
    if part is None:
        assert not ones & others
        return
    own = whole[tuple(slice(s, s + n) for s, n in zip(first.starts, first.sizes, strict=True))]
    values = own[first.slices(part)].flatten().tolist()
    assert set(values) == ones & others
    if (start := first.run_of(part)) is not None:
        assert own.flatten().tolist()[start : start + part.count] == values
    else:
        flat = own.flatten().tolist()
        assert any(flat[at : at + part.count] == values for at in range(len(flat))) is False


def test_an_index_keeps_its_paths(tmp_path):
    index = stored_state.save(tmp_path / "c", trainee())
    (again,) = stored_state.commit(tmp_path / "c")
    assert again == index
    assert {item.path for item in index.items} >= {("optimizer", "param_groups", 1, "lr"), ("model", "inner.weight")}
    assert (tmp_path / "c" / index_file(0)).exists()
    prepare(trainee(), stored_state.stored_in(tmp_path / "c", again), rank=0, world_size=1)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"dtype": "float32\nos\nsystem"}, id="dtype-that-would-be-code-in-a-pickle"),
        pytest.param({"dtype": ""}, id="no-dtype"),
        pytest.param({"path": ["model", "other"]}, id="other-path"),
        pytest.param({"path": ["model", 1.5]}, id="path-of-a-fraction"),
        pytest.param({"offset": 64}, id="gap"),
        pytest.param({"data_offset": 10**9}, id="outside"),
        pytest.param({"data_length": -1}, id="negative"),
        pytest.param({"length": True}, id="bool"),
        pytest.param({"sizes": [2]}, id="dimensions"),
        pytest.param({"kind": "code"}, id="kind"),
        pytest.param({"key": 3}, id="key"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path, change):
    state = FlatState(tensors={"model.t": torch.ones(2, 3)}, paths={"model.t": ("model", "t")})
    stored_state.write(tmp_path, *stored_state.stage(state))
    path = tmp_path / index_file(0)
    value = json.loads(path.read_text())
    value["items"][0] |= change
    path.write_text(json.dumps(value))
    with pytest.raises(StorageError, match="is not the index of a shard"):
        read_index(path)


def test_an_index_of_a_newer_slurmft_says_so(tmp_path):
    path = tmp_path / "index.json"
    path.write_text('{"format": 99, "items": "of another kind"}')
    raw = path.read_bytes()
    with pytest.raises(Damaged) as caught:
        verified_index(path, len(raw), xxhash.xxh3_128_hexdigest(raw))
    assert caught.value.damage is Damage.NEWER


@pytest.mark.parametrize(
    "change",
    [{"dtype": "Tensor"}, {"dtype": "no_such"}, {"dtype": "float64"}, {"shape": (2, 4)}, {"starts": (1, 0)},
     {"shape": (3, 3)}],
    ids=["no-dtype-of-torch", "unknown-dtype", "other-width", "part-missing", "outside", "row-missing"],
)  # fmt: skip
def test_items_that_do_not_cover_their_tensor_are_damage(tmp_path, change):
    _, index = stored_state.stage(FlatState(tensors={"model.t": torch.ones(2, 3)}))
    wrong = replace(index, items=(replace(index.items[0], **change),))
    with pytest.raises(Damaged, match=r"__0_0\.json cannot be read: .*model\.t"):
        stored_state.stored_in(tmp_path, wrong)


def test_odd_names_come_back(tmp_path):
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(1, 1) for name in ("a b", "quote'\"", "line\nbreak", "\u00fc\u4e2d", "0")}
    )
    one, other = (Trainee(model, torch.optim.SGD(model.parameters(), momentum=0.5)) for _ in range(2))
    stored_state.save(tmp_path / "c", one, extra={"line\nbreak": "\ud800"})
    stored_state.commit(tmp_path / "c")
    prepared = stored_state.load(tmp_path / "c", other)
    prepared.apply()
    assert prepared.extra == {"line\nbreak": "\ud800"}
    dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "c")
