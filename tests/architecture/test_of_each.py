"""A test over many values fails with every value that is wrong, and cannot pass without any."""

from pathlib import Path
from typing import Any

import pytest
from of_each import of_each


def outcome(test: Any, **fixtures: Any) -> str:
    try:
        test(**fixtures)
    except (AssertionError, pytest.fail.Exception) as error:
        return str(error)
    return ""


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path):
    seen = []

    @of_each(first=[1, 2], second__third=[(1, "a"), (2, "b")])
    def test(first: int, second: int, third: str, tmp_path: Path) -> None:
        assert not list(tmp_path.iterdir()), "each has a folder of its own"
        (tmp_path / "x").touch()
        seen.append((first, third))
        if first != second:
            pytest.fail("unlike")

    told = outcome(test, tmp_path=tmp_path)
    assert seen == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert told.startswith("2 of 4:\n1, 2, 'b': Failed: unlike\n2, 1, 'a': Failed: unlike")


def test_nothing_to_test_is_no_success():
    @of_each(value=[])
    def test(value: int) -> None:
        pass

    assert "there are no values" in outcome(test)


def test_a_timeout_ends_it_and_says_where():
    seen = []

    @of_each(value=[1, 2])
    def test(value: int) -> None:
        seen.append(value)
        pytest.fail("Timeout (>9s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception, match="from pytest-timeout") as caught:
        test()
    assert (seen, caught.value.__notes__) == ([1], ["with [1]"])


def test_a_value_that_cannot_be_tried_here_hides_no_other():
    @of_each(value=[1, 2])
    def test(value: int) -> None:
        if value == 1:
            pytest.skip("only root can")
        assert value == 1

    assert outcome(test).startswith("1 of 2:\n2: AssertionError")
