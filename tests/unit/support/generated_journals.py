"""Journals of runs that were never there, as long as a test wants them, in the words of real ones."""

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

BEGIN_S = 1_790_000_000.0
CAUSES = ("signal crash", "hang", "node lost", "worker error", "preempted")


class JournalWriter:
    """Writes lines at a clock of its own."""

    def __init__(self, stream: TextIO, at_s: float = BEGIN_S) -> None:
        self._stream, self.at_s, self.attempt, self.lines = stream, at_s, "", 0

    def write(self, event: str, after_s: float = 0.0, **details: Any) -> None:
        self.at_s += after_s
        at = datetime.fromtimestamp(self.at_s, UTC).isoformat(timespec="milliseconds")
        line = {"format": 1, "at": at, "attempt": self.attempt, "event": event, **details}
        self._stream.write(json.dumps(line) + "\n")
        self.lines += 1


def write_run(folder: Path, *, attempts: int, chatter: int = 0, seed: int = 1, nodes: int = 8) -> dict[str, float]:
    """A run of so many attempts with ``chatter`` further events in each; returns the seconds of each category."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("command: [python]\n")
    dice, step, reached = random.Random(seed), 0, 0
    sums = dict.fromkeys(("queue", "launch", "import", "setup", "load", "training", "saves", "redone", "detection",
                          "evidence", "shutdown"), 0.0)  # fmt: skip

    def spent(category: str, low_s: float, high_s: float) -> float:
        seconds = round(dice.uniform(low_s, high_s), 3)
        sums[category] += seconds
        return seconds

    with (folder / "journal.jsonl").open("w") as stream:
        journal = JournalWriter(stream)
        journal.write("submitting", cluster="slurm", who="ada@login", command="sbatch")
        journal.write("submitted", job="100", host="login")
        for number in range(attempts):
            journal.attempt = f"100.{number}.0"
            journal.write("attempt started", spent("queue", 5, 600), generation=number + 1, cluster="slurm", host="n1",
                          nodes=f"n[1-{nodes}]", folder="/home/ada")  # fmt: skip
            journal.write("agents ready", hosts=[f"n{each}" for each in range(1, nodes + 1)])
            journal.write("workers started", spent("launch", 1, 9), world_size=nodes * 8)
            attached_s = journal.at_s + spent("import", 5, 30)
            load_s = spent("load", 1, 20)
            loop_s = attached_s + spent("setup", 1, 10) + load_s
            first_s = loop_s + 1.0
            journal.write("first step", first_s + 0.25 - journal.at_s, resumed_from=step, attached_at=attached_s,
                          loop_at=loop_s, load_s=load_s, first_step_at=first_s)  # fmt: skip
            began_s, stall_s = loop_s, 0.0
            if reached > step:
                seconds = spent("redone", 20, 200)
                journal.write("caught up", began_s + seconds - journal.at_s, step=reached, step_at=began_s + seconds,
                              stall_s=0.0, saves_done=0)  # fmt: skip
                began_s += seconds
            work_s, stall_s = spent("training", 600, 7000), round(dice.uniform(1, 30), 3)
            sums["training"] -= stall_s
            sums["saves"] += stall_s
            for _ in range(chatter):
                journal.write("straggler suspected", nodes=["n3"], ranks=[17], score=0.71, reason="a window says so")
            last_step_s = began_s + work_s
            cause = dice.choice(CAUSES) if number < attempts - 1 else "finished"
            last = max(step, reached) + 1000
            if cause == "preempted":
                journal.write("stop requested", last_step_s - journal.at_s, cause=cause, reason="SIGTERM",
                              signal_at=last_step_s, seconds_left=60.0)  # fmt: skip
            elif cause != "finished":
                journal.write("worker failed", last_step_s - journal.at_s + spent("detection", 0.1, 300), rank=3,
                              node=f"n{1 + number % nodes}", code=-9, error="")  # fmt: skip
            seconds = spent("shutdown" if cause in ("preempted", "finished") else "evidence", 0.5, 20)
            end_s = (last_step_s if cause in ("preempted", "finished") else journal.at_s) + seconds
            journal.write("measured", end_s - journal.at_s, step_at=last_step_s, stall_s=stall_s, saves_done=12,
                          attached=True)  # fmt: skip
            node = f"n{1 + dice.randrange(nodes)}"
            blamed = cause not in ("preempted", "finished")
            saved = last if not blamed else last - 300
            journal.write("verdict", cause=cause, reason=f"rank 3 on {node}: {cause}", exit_code=1, first_step=step,
                          last_step=last, saved_step=saved, node=node if blamed else "",
                          suspects=[{"node": node}] if blamed else [])  # fmt: skip
            journal.write("decision", action="continue" if cause != "finished" else "finish", reason="so it goes on")
            if cause != "finished":
                journal.write("requeued", spent("shutdown", 0.1, 2), job="100", delay_s=0)
            step, reached = saved, last
    return sums
