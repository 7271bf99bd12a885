"""States of everyday types go into a checkpoint and come back as they were."""

import io
import json
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmft.checkpoint.state import MAX_JSON_TENSOR_BYTES, TAG, as_json, as_plain, original
from slurmft.errors import CheckpointError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.sampled_from([TAG, "a", "items", ""]) | st.integers(0, 5) | st.tuples(st.integers(0, 5), st.booleans())
VALUES = st.recursive(
    SCALARS | st.binary(max_size=5) | st.sets(st.integers()) | st.frozensets(st.text(max_size=3)) | st.complex_numbers(
        allow_nan=False) | st.just(range(2, 9, 3)) | st.just(slice(None, 4)) | st.just(Path("/a b/'c'")),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.lists(inner, max_size=3).map(lambda items: deque(items, 5)) | st.dictionaries(KEYS, inner, max_size=3)
    | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
    max_leaves=8,
)  # fmt: skip


def through_a_file(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, np.ndarray | np.generic):
        return first.dtype == second.dtype and first.shape == second.shape and bool((first == second).all())
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple | deque):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


@given(VALUES)
def test_what_goes_in_comes_out(value):
    assert same(original(through_a_file(as_plain(value))), value)
    assert same(original(json.loads(json.dumps(as_json(value)))), value)


@pytest.mark.parametrize(
    "value",
    [
        np.float64(1.5), np.int64(-3), np.bool_(True), np.float32(0.1), np.uint64(1 << 63),
        np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 3)), np.array(5), np.arange(6)[::-2],
        torch.arange(4).reshape(2, 2), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 2), torch.tensor(True),
        {"state": np.random.RandomState(3).get_state(legacy=False)},
    ],
    ids=["float64", "int64", "bool", "float32", "uint64", "array", "empty array", "array of no dimension", "strided",
         "tensor", "bfloat16", "empty tensor", "bool tensor", "generator"],
)  # fmt: skip
def test_numpy_and_tensors_keep_type_and_shape(value):
    assert same(original(through_a_file(as_plain(value))), value)
    assert same(original(json.loads(json.dumps(as_json(value)))), value)


def test_a_128_bit_generator_of_numpy_continues_where_it_was():
    generator = np.random.default_rng(7)
    generator.random(5)
    state = through_a_file(as_plain({"rng": generator.bit_generator.state}))
    expected = generator.random(3).tolist()
    other = np.random.default_rng(0)
    other.bit_generator.state = original(state)["rng"]
    assert other.random(3).tolist() == expected


def test_what_is_read_only_or_of_the_other_byte_order_keeps_its_values():
    frozen = np.arange(3)
    frozen.setflags(write=False)
    swapped = np.arange(3, dtype=">i4")
    assert original(as_plain(frozen)).tolist() == original(as_plain(swapped)).tolist() == [0, 1, 2]


def test_a_large_tensor_is_no_text():
    large = torch.zeros(MAX_JSON_TENSOR_BYTES + 1, dtype=torch.uint8)
    assert as_json({"batch": large})["batch"] is large


class Odd:
    pass


@pytest.mark.parametrize("value", [Odd(), np.array(["text"]), np.array([None])], ids=["object", "text", "objects"])
def test_an_unknown_type_is_left_to_the_save_to_refuse(value):
    assert as_plain(value) is value


def test_a_value_that_contains_itself_is_refused():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="contains itself"):
        as_plain(endless)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({TAG: "quaternion", "items": []}, "'quaternion', which this slurmft does not know"),
        ({TAG: "tensor", "dtype": "load", "shape": [1], "hex": "00"}, "'tensor' is damaged"),
        ({TAG: "tensor", "dtype": "int64", "shape": [9], "hex": "00"}, "'tensor' is damaged"),
        ({TAG: "numpy", "values": 3, "is_scalar": True, "shape": []}, "'numpy' is damaged"),
        ({TAG: "deque", "items": []}, "'deque' is damaged"),
        ({TAG: "range", "items": ["a"]}, "'range' is damaged"),
        ({TAG: "dict", "items": [[[], 1]]}, "'dict' is damaged"),
        ({TAG: "path", "items": []}, "'path' is damaged"),
        ({TAG: 7}, "'7' is damaged"),
    ],
    ids=["newer", "no dtype", "too short", "no tensor", "no limit", "no numbers", "no key", "empty", "no name"],
)
def test_a_damaged_tag_is_one_clear_error(value, why):
    with pytest.raises(CheckpointError, match=why):
        original({"loader": [value]})
