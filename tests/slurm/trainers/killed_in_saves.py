"""Two ranks of a Trainer, killed again and again in the middle of a save; each start goes on from the last good one.

    python killed_in_saves.py FOLDER --kills 100 --seed 1 --framework huggingface

Ranks are forked from this process, which has imported everything: a start takes a fraction of a second. Prints the
digest of the weights at the end; the same with ``--kills 0`` is that of a training that was left alone.
"""

import argparse
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from slurmft.integrations.folders import MarkedFolders, finished_steps, step_folders
from slurmft.ipc.pages import PAGE_VARIABLE, Page, Slot, State

RANKS, STEPS_PER_KILL = 2, 3


@dataclass(frozen=True)
class Training:
    """The script of a framework, which saves after each step."""

    main: Callable[[], None]
    argv: tuple[str, ...]
    folders: Callable[[], tuple[Collection[int], Collection[int]]]
    """Steps of all saves that are there, and of the finished ones."""

    longest_save_s: float


def huggingface(folder: Path, steps: int) -> Training:
    out = folder / "out"
    argv = (f"--output={out}", "--delay=0", "--samples=40", "--epochs=1000", f"--max_steps={steps}", "--save_steps=1",
            "--eval_strategy=no", "--wide=1")  # fmt: skip
    main = importlib.import_module("hf_trainer").main
    return Training(main, argv, lambda: (step_folders(out), finished_steps(out)), 0.06)


def lightning(folder: Path, steps: int) -> Training:
    """Epochs of ten steps, two batches each: kills fall into saves between epochs, too."""
    root = folder / "lightning" / "fit-1"
    argv = ("--root", str(folder), "--nodes", "1", "--samples", "160", "--accumulate", "2", "--epochs", "1000",
            "--max-steps", str(steps))  # fmt: skip
    settings = {"checkpoint": {"interval": "steps", "interval_steps": 1, "keep_last_n": 2}}
    os.environ |= {"SLURMFT_WORKER": json.dumps(settings), "SLURMFT_CHECKPOINT_DIR": str(folder),
                   "TORCHELASTIC_RUN_ID": "killed"}  # fmt: skip
    main = importlib.import_module("plain_lightning").main

    def folders() -> tuple[Collection[int], Collection[int]]:
        there = {int(path.name[5:20]) for path in root.iterdir()} if root.exists() else set()
        return there, {save.place.step for save in MarkedFolders(root, 2).complete()}

    return Training(main, argv, folders, 0.03)


FRAMEWORKS = {"huggingface": huggingface, "lightning": lightning}


def fork(rank: int, page: Path, port: int, training: Training, log: Path) -> int:
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
        sys.argv = ["train", *training.argv]
        training.main()
        code = 0
    except BaseException:  # noqa: BLE001 - a forked child must not return into the parent's code
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_start(folder: Path, number: int, training: Training, moment: tuple[int, float, str] | None) -> bool:
    """Whether the training ended by itself; with a ``moment``, kill the ranks (or one) in that save, so much later."""
    pages, pids, port = [], [], free_port()
    for rank in range(RANKS):
        path = folder / f"page-{number}-{rank}"
        pages.append(Page.create(path, rank=rank, generation=1))
        pids.append(fork(rank, path, port, training, folder / f"rank-{rank}.log"))
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
    parser.add_argument("--framework", choices=FRAMEWORKS, default="huggingface")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    steps = options.steps or max(6, STEPS_PER_KILL * options.kills)
    training = FRAMEWORKS[options.framework](options.folder, steps)
    chance = random.Random(options.seed)
    kills = starts = unfinished = 0
    is_over = False
    while not is_over:
        moment = None
        if kills < options.kills:
            late_s = chance.uniform(0.0, training.longest_save_s)
            moment = (chance.randint(1, 3), late_s, chance.choice(["both", "first", "second"]))
        is_over = one_start(options.folder, starts, training, moment)
        starts += 1
        kills += not is_over
        folders, finished = training.folders()
        newest = max(folders, default=0)
        unfinished += not is_over and newest not in finished
        print(f"start {starts}: {moment}, newest folder {newest}", file=sys.stderr, flush=True)
    lines = (options.folder / "rank-0.log").read_text().splitlines()
    print(f"kills {kills}, of which {unfinished} left the newest folder unfinished")
    print(next(line for line in reversed(lines) if line.startswith("final weights sha256: ")))


if __name__ == "__main__":
    main()
