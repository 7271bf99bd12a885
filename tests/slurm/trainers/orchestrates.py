"""An orchestrator: asks the engines of the role ``rollout``, and puts what they say into the trainer's queue.

    python orchestrates.py STEPS RANKS

It knows nothing of slurmft's restarts: begun again, it asks for what is not in the queue yet.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from slurmft import Queue

PATIENCE_S = 60.0


def ask(prompt: str) -> str:
    """The engine's text, from whichever router lives."""
    began = time.monotonic()
    while True:
        routers = json.loads(Path(os.environ["SLURMFT_ENDPOINT_ROLLOUT_FILE"]).read_text())["routers"]
        name, _, token = Path(os.environ["SLURMFT_ENDPOINT_ROLLOUT_HEADERS"]).read_text().strip().partition(": ")
        context = ssl.create_default_context(cafile=os.environ["SLURMFT_ENDPOINT_ROLLOUT_CA"])
        for router in routers:
            body = json.dumps({"model": "m", "prompt": prompt}).encode()
            headers = {name: token, "Content-Type": "application/json"}
            request = urllib.request.Request(f"{router['urls'][0]}/v1/completions", body, headers)
            try:
                with urllib.request.urlopen(request, timeout=10, context=context) as answer:
                    return str(json.load(answer)["choices"][0]["text"])
            except (OSError, ValueError):
                continue
        if time.monotonic() > began + PATIENCE_S:
            raise TimeoutError(prompt)
        time.sleep(0.1)


steps, ranks = map(int, sys.argv[1:])
with Queue("rollouts", max_waiting=16) as queue:
    for step in range(steps):
        for rank in range(ranks):
            if f"{step}-{rank}" in queue:
                continue
            text = ask(f"step {step} rank {rank}")
            queue.put(f"{step}-{rank}", [int(text[at : at + 2], 16) / 256 for at in range(0, 16, 2)])
print("orchestrated", steps, flush=True)
