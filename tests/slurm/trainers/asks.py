"""Asks the engines of the role ``rollout`` until the trainer has ended its queue, and notes what it is told.

    python asks.py NOTES

A line for each answer: the newest version of the weights as the router knows it, before and after, and the answer.
"""

import contextlib
import itertools
import json
import os
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from slurmft import Queue, UsageError


def call(path: str, given: Any = None) -> tuple[Any, str | None]:
    """The answer as JSON, and the version of the weights in its header."""
    address = json.loads(Path(os.environ["SLURMFT_ENDPOINT_ROLLOUT_FILE"]).read_text())["routers"][0]["urls"][0]
    name, _, token = Path(os.environ["SLURMFT_ENDPOINT_ROLLOUT_HEADERS"]).read_text().strip().partition(": ")
    context = ssl.create_default_context(cafile=os.environ["SLURMFT_ENDPOINT_ROLLOUT_CA"])
    body = None if given is None else json.dumps(given).encode()
    request = urllib.request.Request(address + path, body, {name: token, "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return json.load(answer), answer.headers["X-Slurmft-Weights"]


with Path(sys.argv[1]).open("a") as notes, Queue("answers", max_waiting=4) as queue:
    for number in itertools.count():
        try:
            before = call("/status")[0]["weights"]
            answer, version = call("/v1/completions", {"model": "m", "prompt": f"p{number}"})
            after = call("/status")[0]["weights"]
        except (OSError, LookupError):
            time.sleep(0.1)
            continue
        told = {"prompt": f"p{number}", "before": before, "version": version, "after": after, "answer": answer}
        notes.write(json.dumps(told) + "\n")
        notes.flush()
        if version is None:  # the trainer has published nothing yet
            continue
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    queue.put(f"p{number}", answer["weights"], version=int(version), timeout_s=1)
                    break
        except UsageError:  # the queue has ended
            break
