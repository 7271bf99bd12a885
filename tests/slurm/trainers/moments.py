"""A small trainer that can be caught at any moment of its life, for the tests of endings.

The moment named with ``--at`` is stretched the first time that ``--rank`` (-1: every rank) comes there: it leaves a
mark in the folder of marks and goes on when somebody leaves ``go`` there. The weights at the end depend on nothing of
this.
"""

import argparse
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, SupportsFloat

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from slurmft import CheckpointManager, start_session
from slurmft.worker.digests import weights_digest
from slurmft.worker.session import Session

WIDTH = 16
BATCH = 4
PATIENCE_S = 40.0


class Moment:
    """The one moment that is stretched."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._name, self._rank, self._step, self._folder = args.at, args.rank, args.step, args.marks
        self._until = 0.0

    def is_everybodys(self) -> bool:
        """Whether every rank has come to it, in this attempt: then all may wait for the stop where they are."""
        return self._rank == -1 and time.monotonic() < self._until

    def __call__(self, name: str, step: int) -> None:
        rank = int(os.environ["RANK"])
        if (name, step) != (self._name, self._step) or self._rank not in (-1, rank) or (self._folder / "go").exists():
            return
        (self._folder / f"reached-{rank}").write_text(f"{os.environ['SLURMD_NODENAME']} {os.getpid()}")
        self._until = time.monotonic() + PATIENCE_S
        while not (self._folder / "go").exists() and time.monotonic() < self._until:
            time.sleep(0.02)


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample n depends on n alone."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._moment("data", index // (BATCH * int(os.environ["WORLD_SIZE"])))
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.randn(1, generator=generator)


class Loader:
    """torch's DataLoader over this rank's samples, from any step on."""

    def __init__(self, args: argparse.Namespace, session: Session, moment: Moment) -> None:
        self._args, self._session, self._moment = args, session, moment
        self._step = 0
        self._batches: Any = None

    def _order(self) -> Iterator[list[int]]:
        for step in range(self._step, self._args.steps):
            first = (step * self._session.world_size + self._session.rank) * BATCH
            yield list(range(first, first + BATCH))

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._batches is None:
            several = self._args.workers != "none" and self._session.rank == self._args.rank
            loader = DataLoader(
                Samples(self._moment),
                batch_sampler=self._order(),
                num_workers=2 if several else 0,
                multiprocessing_context=self._args.workers if several else None,
                generator=torch.Generator(),  # else each start draws a seed from the training's generator
            )
            self._batches = iter(loader)
        batch: tuple[torch.Tensor, torch.Tensor] = next(self._batches)
        self._step += 1
        return batch

    def workers_alive(self) -> list[bool]:
        return [worker.is_alive() for worker in getattr(self._batches, "_workers", [])]

    def state_dict(self) -> dict[str, Any]:
        self._moment("write", self._step)  # the folder of the save exists, and holds no marker
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._step = state_dict["step"]


class Loss:
    """A metric; rank 0 asks for its value when all files are written and the marker is not."""

    def __init__(self, moment: Moment, step: int) -> None:
        self._moment, self._step = moment, step

    def __float__(self) -> float:
        self._moment("commit", self._step)
        return 0.0


def help_along(pipe: Connection) -> None:
    """A helper process, such as one that uploads checkpoints: works until it is told to end, and says that it did."""
    beats = 0
    while not pipe.poll(0.05):
        beats += 1
    pipe.send(beats)


@contextmanager
def helper(method: str) -> Iterator[None]:
    context: Any = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    process = context.Process(target=help_along, args=(theirs,))
    process.start()
    try:
        yield
    finally:
        mine.send("end")
        print(f"helper: {mine.recv() > 0}, alive until told", flush=True)
        process.join()
        print(f"helper: ended with {process.exitcode}", flush=True)


@contextmanager
def programs() -> Iterator[None]:
    """Two programs of the user's: one has a handler of its own, one dies of the signal."""
    script = "import signal, sys; signal.signal(15, lambda *_: None); print('up', flush=True); input()"
    command = [sys.executable, "-S", "-c", script]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sturdy,
        subprocess.Popen(["sleep", "600"]) as frail,
    ):
        assert sturdy.stdin is not None
        assert sturdy.stdout is not None
        sturdy.stdout.readline()
        try:
            yield
        finally:
            sturdy.stdin.write(b"end\n")  # not its end: loader workers by fork hold the pipe open
            sturdy.stdin.flush()
            frail.terminate()
            print(f"programs: ended with {sturdy.wait()} and {frail.wait()}", flush=True)


def install_handler(session: Session) -> None:
    """As a library does it in the middle of a training: call the handler that was there before as well."""
    before = signal.getsignal(signal.SIGTERM)

    def handler(number: int, frame: FrameType | None) -> None:
        os.write(1, f"user's handler: signal {number} at rank {session.rank}\n".encode())
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, handler)


def train(args: argparse.Namespace) -> None:
    moment = Moment(args)
    moment("start-up", 0)
    with ExitStack() as stack:
        session = stack.enter_context(start_session(seed=1))
        if session.rank == args.rank:
            for method in args.helpers:
                stack.enter_context(programs() if method == "programs" else helper(method))
        loader = Loader(args, session, moment)
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, 1))
        model = session.distributed(plain, lambda ddp: ddp(torch.ones(BATCH, WIDTH)).sum())
        if args.compile:
            plain.compile(backend=args.compile)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(1 + session.rank)

        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(model, optimizer, loader=loader)

        def save(step: int) -> None:
            moment("save", step)
            metrics: dict[str, SupportsFloat] = {"loss": Loss(moment, step)}
            checkpoints.save(model, optimizer, step=step, metrics=metrics, loader=loader)
            if alive := loader.workers_alive():
                print(f"saved step {step} with loader workers {alive}", flush=True)

        for step in session.steps(start=loaded.step, until=args.steps, save=save):
            if step == 1 and args.handler:
                install_handler(session)
            if step % 5 == 3:
                evaluate(session, moment, step)
            batch = next(loader)
            moment("forward", step)
            one_step(model, optimizer, batch)
            moment("between", step)
            if session.is_lead:
                print(f"did step {step}", flush=True)
            time.sleep(args.step_delay)

        if session.is_lead:
            print(f"final weights sha256: {weights_digest(plain)}", flush=True)


def evaluate(session: Session, moment: Moment, step: int) -> None:
    def batches() -> Iterator[int]:
        for batch in itertools.count():
            if batch >= 3 + session.rank and not moment.is_everybodys():  # as many as this rank has
                return
            yield batch

    for batch in session.evaluating(batches()):
        if batch == 1:
            moment("evaluation", step)
        torch.rand(1)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs, targets = batch
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--at", default="never", help="the moment to stretch")
    parser.add_argument("--step", type=int, default=6, help="in which step")
    parser.add_argument("--rank", type=int, default=1, help="whose moment, workers and helpers")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--step-delay", type=float, default=0.02)
    parser.add_argument("--workers", default="none", help="how the loader starts its workers")
    parser.add_argument("--helpers", nargs="*", default=[])
    parser.add_argument("--handler", action="store_true")
    parser.add_argument("--compile", help="a backend of torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
