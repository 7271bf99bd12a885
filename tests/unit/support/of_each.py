"""One test over many values: one item, and one message that lists every value that is wrong."""

import asyncio
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

_SHOWN = 200


def of_each(**lists: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like ``parametrize`` over all combinations, but as one test. ``a__b=`` takes pairs, for the arguments a and b.

    The fixtures are the same ones for all values, except ``tmp_path``, which is a folder of each value's own.
    """
    names = [name for key in lists for name in key.split("__")]

    def whole(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            wrong, count, skipped = [], 0, 0
            for count, values in enumerate(itertools.product(*lists.values()), start=1):
                flat = [each for key, value in zip(lists, values, strict=True)
                        for each in (value if "__" in key else (value,))]  # fmt: skip
                given = fixtures | dict(zip(names, flat, strict=True))
                if "tmp_path" in fixtures:
                    given["tmp_path"] = _folder(fixtures["tmp_path"], count)
                try:
                    if inspect.iscoroutinefunction(test):
                        asyncio.run(test(**given))
                    else:
                        test(**given)
                except pytest.skip.Exception:
                    skipped += 1
                except (Exception, pytest.fail.Exception) as error:
                    if "from pytest-timeout" in str(error):  # no alarm is set for those that would come
                        error.add_note(f"with {flat}")
                        raise
                    wrong.append(f"{', '.join(map(ascii, flat))[:_SHOWN]}: {type(error).__name__}: {error}")
            assert count, "there are no values"
            if count == skipped:
                pytest.skip("each of them")
            assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)

        left = [each for name, each in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        del run.__wrapped__
        return run

    return whole


def _folder(above: Path, number: int) -> Path:
    folder = above / str(number)
    folder.mkdir()
    return folder
