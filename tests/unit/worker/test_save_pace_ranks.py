"""Two real ranks whose clocks and speeds differ: they save by seconds, before the same steps."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from worker_variable import worker_variable

SCRIPT = """
import json, sys, time
from pathlib import Path
from slurmft import start_session

rank, out = int(sys.argv[1]), Path(sys.argv[2])
now = time.monotonic_ns
time.monotonic_ns = lambda: now() + rank * 10**15  # another node's clock
saved, began = [], time.monotonic()
with start_session(backend="gloo") as session:
    for step in session.steps(start=5, until=205, save=lambda step: saved.append([step, time.monotonic() - began])):
        time.sleep(0.004 + 0.006 * rank)
(out / f"rank-{rank}.json").write_text(json.dumps(saved))
"""


def test_they_save_before_the_same_steps(tmp_path: Path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        **worker_variable(checkpoint={"interval": "seconds", "interval_seconds": 0.4}),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)], env=common | {"RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        ) for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors
    finally:
        for rank in ranks:
            rank.kill()
    steps, others = (
        [step for step, _ in json.loads((tmp_path / f"rank-{rank}.json").read_text())] for rank in range(2)
    )
    assert steps == others
    assert steps[-1] == 205
    assert 3 <= len(steps) <= 12  # 200 steps of 10 ms and more are 2 s and more
