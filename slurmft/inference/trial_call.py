"""Calls a function with the parameters of a trial: ``python -m slurmft.inference.trial_call package.module:name``.

What it returns is the trial's result. With ``--next`` it asks the function for trials, over its pipes. It imports
nothing of slurmft: thousands of trials begin with it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def function_of(name: str) -> Any:
    """The object that ``package.module:name`` names."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def main(name: str) -> None:
    """Call it, and write what it returns where the trial's result belongs."""
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as for a script
    with open(os.environ["SLURMFT_TRIAL_PARAMETERS"], encoding="utf-8") as stream:  # noqa: PTH123 - starts sooner
        parameters = json.load(stream)
    value = function_of(name)(**parameters)
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SystemExit(f"what {name} returned is no JSON: {error}") from error
    with open(os.environ["SLURMFT_TRIAL_RESULT"], "w", encoding="utf-8") as stream:  # noqa: PTH123
        stream.write(text)


def ask(name: str) -> None:
    """Answer lines of results, each a list of rows, with trials of the function's, until it returns None or fails."""
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as for a script
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the function prints is no answer
    function = None
    for line in sys.stdin:
        try:
            function = function or function_of(name)
            answer = {"trials": function(json.loads(line))}
            text = json.dumps(answer, allow_nan=False)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            answer = {"error": _told(error)}
            text = json.dumps(answer)
        answers.write(text + "\n")
        answers.flush()
        if answer.get("trials") is None:
            return


def _told(error: Exception) -> str:
    """The error, and where in the user's code it is; all of it goes to the log."""
    import traceback

    traceback.print_exception(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    places = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    where = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {error}"[:1000] + where


if __name__ == "__main__":
    ask(sys.argv[2]) if sys.argv[1] == "--next" else main(sys.argv[1])
