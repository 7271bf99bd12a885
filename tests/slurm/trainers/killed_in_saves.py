"""Two ranks of the Trainer, killed again and again in the middle of a save; each start goes on from the last good one.

    python killed_in_saves.py FOLDER --kills 100 --seed 1

Ranks are forked from this process, which has imported everything: a start takes a fraction of a second. Prints the
digest of the weights at the end; the same with ``--kills 0`` is that of a training that was left alone.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import hf_trainer

from slurmft.integrations.finished_folders import finished_steps, step_folders
from slurmft.ipc.pages.heartbeat import PAGE_VARIABLE, Page, Slot, State

RANKS, STEPS_PER_KILL = 2, 3


def fork(rank: int, page: Path, port: int, argv: list[str], log: Path) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), PAGE_VARIABLE: str(page),
        }  # fmt: skip
        sys.argv = argv
        hf_trainer.main()
        code = 0
    except BaseException:  # noqa: BLE001 - a forked child must not return into the parent's code
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_start(folder: Path, number: int, argv: list[str], moment: tuple[int, float, str] | None) -> bool:
    """Whether the training ended by itself; with a ``moment``, kill the ranks (or one) in that save, so much later."""
    pages, pids, port = [], [], free_port()
    for rank in range(RANKS):
        path = folder / f"page-{number}-{rank}"
        pages.append(Page.create(path, rank=rank, generation=1))
        pids.append(fork(rank, path, port, argv, folder / f"rank-{rank}.log"))
    left, saves, was_saving, killed = dict(zip(pids, range(RANKS), strict=True)), 0, False, False
    try:
        while left:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                del left[pid]
                if status and not killed:
                    log = (folder / f"rank-{pids.index(pid)}.log").read_text()
                    raise SystemExit(f"start {number}: rank {pids.index(pid)} failed: {status}\n{log[-3000:]}")
                continue
            is_saving = State.SAVING in (pages[0][Slot.STATE], pages[1][Slot.STATE])
            saves += is_saving and not was_saving
            was_saving = is_saving
            if moment and not killed and is_saving and saves == moment[0]:
                time.sleep(moment[1])
                killed = True
                victims = {"both": list(left), "first": pids[:1], "second": pids[1:]}[moment[2]]
                for victim in victims:
                    os.kill(victim, signal.SIGKILL)
                time.sleep(0.02)  # what the other one does in the meantime is part of it
                for victim in left:
                    os.kill(victim, signal.SIGKILL)
            time.sleep(0.0005)
    finally:
        for page in pages:
            page.close()
    return not killed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="as for another number of kills")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    steps = options.steps or max(6, STEPS_PER_KILL * options.kills)
    argv = ["train", f"--output={options.folder}/out", "--delay=0", "--samples=40", "--epochs=1000",
            f"--max_steps={steps}", "--save_steps=1", "--eval_strategy=no", "--wide=1"]  # fmt: skip
    chance = random.Random(options.seed)
    kills = starts = unfinished = 0
    is_over = False
    while not is_over:
        moment = None
        if kills < options.kills:
            moment = (chance.randint(1, 3), chance.uniform(0.0, 0.06), chance.choice(["both", "first", "second"]))
        is_over = one_start(options.folder, starts, argv, moment)
        starts += 1
        kills += not is_over
        folders = step_folders(options.folder / "out")
        newest = max(folders, default=0)
        unfinished += not is_over and newest not in finished_steps(options.folder / "out")
        print(f"start {starts}: {moment}, newest folder {newest}", file=sys.stderr, flush=True)
    lines = (options.folder / "rank-0.log").read_text().splitlines()
    print(f"kills {kills}, of which {unfinished} left the newest folder unfinished")
    print(next(line for line in reversed(lines) if line.startswith("final weights sha256: ")))


if __name__ == "__main__":
    main()
