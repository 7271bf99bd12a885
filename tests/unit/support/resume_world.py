"""Small training runs whose ranks and nodes die on order: each rank a process, each node a folder of its own.

Run as ``python resume_world.py FOLDER``: one story as JSON on each line of standard input, what came of it as JSON on
standard output. Ranks and their writers are forked, since imports would take longer than everything else.

A story has attempts, and each attempt nodes with their ranks, deaths, and what is lost afterwards. Every rank writes
down what it has at each boundary between two steps; a start must find one of these states exactly, or refuse, and
steps that are done again must come out as they did before.
"""

import contextlib
import ctypes
import faulthandler
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from save_points import STAGING_POINTS
from worker_variable import worker_variable

from slurmft.checkpoint import CheckpointManager, writer
from slurmft.checkpoint.catalog import Catalog
from slurmft.checkpoint.image_file import holdings_in
from slurmft.checkpoint.write_requests import ONCE_VARIABLE, VARIABLE, SpawnedWriter
from slurmft.errors import CheckpointError
from slurmft.policy.checkpoints import Tier
from slurmft.storage.checkpoint_names import KEY_FILE, copies_key
from slurmft.trainer import savers
from slurmft.trainer.savers import SAVERS
from slurmft.worker.data import ElasticSampler

SAMPLES, WIDTH = 1000, 4
ATTEMPT_S, GROUP_S = 150.0, 100.0
WRITERS_S, IDLE_S, STOPS_S = 60.0, 0.3, 5.0
REFUSED, KEPT, SILENT = 3, 7, 9
PR_SET_CHILD_SUBREAPER = 36


class Violation(Exception):
    """What must never happen."""


# ---- one rank --------------------------------------------------------------------------------------------------------


class SharedLoader:
    """Micro-batches of an elastic sampler; the position moves with the last one of a step."""

    def __init__(self, story: dict[str, Any], rank: int, world_size: int) -> None:
        self.sampler = ElasticSampler(
            SAMPLES, story["batch"] * world_size + story["uneven"], rank=rank, world_size=world_size, seed=story["seed"]
        )
        self.parts = story["accumulate"]
        self.taken = 0

    def take(self) -> list[int]:
        """Each micro-batch is a global batch of its own, so that the position moves within a step."""
        numbers = next(iter(self.sampler))
        self.sampler.advance()
        return numbers

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # with another number of ranks the global batch is another one here, so that shares stay uneven
        self.sampler.load_state_dict(state)

    def shared_position(self, state: dict[str, Any]) -> Any:
        return self.sampler.shared_position(state)


class OwnLoader:
    """Each rank has data of its own, and as much of it as it likes."""

    def __init__(self, story: dict[str, Any], rank: int, _world_size: int) -> None:
        self.next, self.stride = 1000 * rank, story["batch"] + rank * story["uneven"]

    def take(self) -> list[int]:
        self.next += self.stride
        return list(range(self.next - self.stride, self.next))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


LOADERS = {"shared": SharedLoader, "own": OwnLoader}


class Net(torch.nn.Module):
    def __init__(self, *, has_buffers: bool) -> None:
        super().__init__()
        self.inner, self.drop = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.25)
        if has_buffers:
            self.register_buffer("mean", torch.zeros(WIDTH))
        self.has_buffers = has_buffers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.inner(x))
        if self.has_buffers:
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y


class Wrapped(torch.optim.Optimizer):
    """As accelerate's: calls another one, and was never initialised as an optimizer itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Listener:
    def __getattr__(self, name: str) -> Any:
        return lambda *_values, **_more: None


class Rank:
    """One rank of one attempt."""

    def __init__(self, story: dict[str, Any], attempt: dict[str, Any], rank: int, root: Path) -> None:
        self.story, self.attempt, self.rank, self.root = story, attempt, rank, root
        self.world_size = sum(count for _, count in attempt["nodes"])
        self.deaths = {(one["step"], one["point"]) for one in attempt["deaths"] if one["rank"] == rank}
        torch.manual_seed(story["seed"])
        self.model = Net(has_buffers=story["buffers"])
        inner: torch.optim.Optimizer = {
            "sgd": lambda: torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(self.model.parameters(), lr=0.05),
        }[story["optimizer"].removeprefix("wrapped ")]()
        self.optimizer = Wrapped(inner) if story["optimizer"].startswith("wrapped") else inner
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
        self.loader = LOADERS[story["loader"]](story, rank, self.world_size)
        torch.manual_seed(100 * story["seed"] + rank)
        random.seed(100 * story["seed"] + rank)
        numpy.random.seed(100 * story["seed"] + rank)
        self.checkpoints = CheckpointManager(root / "checkpoints", keep_last_n=2, async_save=True)
        self.log = os.open(root / f"log-{attempt['number']}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, **line: Any) -> None:
        os.write(self.log, json.dumps(line).encode() + b"\n")

    def state(self) -> dict[str, str]:
        place = self.loader.state_dict()
        return {
            "weights": digest(
                dict(self.model.named_parameters()), self.optimizer.state_dict(), self.scheduler.state_dict()
            ),
            "buffers": digest(dict(self.model.named_buffers())),
            "random": digest(savers.capture()),
            "place": digest(place),
        }

    def die(self, step: int, point: str) -> None:
        if (step, point) in self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def parts(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "loader": self.loader}

    def run(self) -> int:
        try:
            loaded = self.checkpoints.load_latest(self.model, self.optimizer, **self.parts())
        except CheckpointError as error:
            self.say(refused=str(error))
            return REFUSED
        self.say(loaded=loaded.step, found=loaded.found, source=loaded.source, state=self.state())
        try:
            self.train(loaded.step)
        except (RuntimeError, CheckpointError) as error:  # a peer is gone
            self.say(failed=f"{type(error).__name__}: {error}"[:300])
            if self.rank in self.attempt["silent"]:
                return SILENT
            if self.rank in self.attempt["dies_keeping"]:
                self.fault("half staged")
            SAVERS.rescue()
            return KEPT
        self.say(done=True)
        return 0

    def boundary(self, step: int) -> None:
        self.say(step=step, state=self.state())
        SAVERS.at_boundary(step)

    def train(self, start: int) -> None:
        until = self.attempt["until"]
        self.boundary(start)
        for step in range(start, until):
            if step and step % self.story["save_every"] == 0:
                self.save(step)
            if self.attempt["reader"] == step and self.rank == 0:
                self.ask_for_reader()
            self.one_step(step)
            self.boundary(step + 1)
        SAVERS.save_begins(urgent=True)
        self.save(until)
        self.checkpoints.wait()

    def save(self, step: int) -> None:
        if self.rank == 0:
            (self.root / "wrote").touch()
        for point in STAGING_POINTS:
            if (step, f"save {point}") in self.deaths:
                self.fault(point)
        self.checkpoints.save(self.model, self.optimizer, step=step, metrics={"loss": 1.0}, **self.parts())

    @staticmethod
    def fault(point: str) -> None:
        os.environ[VARIABLE] = f"{point}=kill"
        os.environ.pop(ONCE_VARIABLE, None)

    def one_step(self, step: int) -> None:
        self.die(step, "begin")
        if self.story["buffers"]:
            dist.broadcast(self.model.mean, src=0)
        self.optimizer.zero_grad()
        for number in range(self.story["accumulate"]):
            numbers = self.loader.take()
            self.die(step, f"data {number}")
            x = torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, WIDTH) / SAMPLES + random.random()
            if len(numbers):
                self.model(x).pow(2).mean().backward()
            self.die(step, f"forward {number}")
            self.reduce()
            self.die(step, f"reduced {number}")
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if (step, "updating") in self.deaths:
            inner.register_step_pre_hook(lambda *_: self.die(step, "updating"))
        self.optimizer.step()
        self.die(step, "updated")
        self.scheduler.step()
        if self.draws_at_the_end(step):
            random.random()
            torch.rand(())
        self.die(step, "end")

    def draws_at_the_end(self, step: int) -> bool:
        """In rare steps only, and perhaps on one rank only."""
        every, ranks = self.story["tail_every"], self.story["tail_ranks"]
        return bool(every) and step % every == every - 1 and (ranks == "all" or self.rank == 0)

    def reduce(self) -> None:
        gradients = [one.grad if one.grad is not None else torch.zeros_like(one) for one in self.model.parameters()]
        whole = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(whole)
        start = 0
        for weight, gradient in zip(self.model.parameters(), gradients, strict=True):
            weight.grad = whole[start : start + gradient.numel()].view_as(gradient) / self.world_size
            start += gradient.numel()

    def ask_for_reader(self) -> None:
        (self.root / "reader-wanted").touch()
        deadline = time.monotonic() + ATTEMPT_S
        while (self.root / "reader-wanted").exists() and time.monotonic() < deadline:
            time.sleep(0.005)


def digest(*values: Any) -> str:
    hashed = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            hashed.update(
                f"{value.dtype} {tuple(value.shape)}".encode() + value.detach().contiguous().numpy().tobytes()
            )
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                hashed.update(str(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                feed(one)
        else:
            hashed.update(repr(value).encode())

    for value in values:
        feed(value)
    return hashed.hexdigest()[:16]


# ---- the run ---------------------------------------------------------------------------------------------------------


class World:
    """One story: its nodes, attempts, and the line of states that it must stay on."""

    def __init__(self, story: dict[str, Any], root: Path) -> None:
        self.story, self.root = story, root
        self.line: dict[int, dict[int, dict[str, str]]] = {}
        """By step and rank: what an undisturbed run would have."""

        self.ranks_at: dict[int, int] = {}
        self.committed: list[int] = []
        self.facts: list[dict[str, Any]] = []
        (root / "checkpoints").mkdir(parents=True)

    def tell(self) -> list[dict[str, Any]]:
        for number, planned in enumerate(self.story["attempts"], start=1):
            attempt = {**planned, "number": number}
            (self.root / "owner.json").write_text(json.dumps({"format": 1, "generation": number}))
            codes = self.live(attempt)
            if not self.judge(attempt, codes):
                break
            self.lose(attempt)
        return self.facts

    def memory(self, node: int) -> Path:
        folder = self.root / f"memory-{node}"
        if not folder.exists():
            folder.mkdir()
            (folder / KEY_FILE).write_bytes(copies_key(b"of this run"))
        return folder

    def live(self, attempt: dict[str, Any]) -> list[int]:
        rank, children = 0, {}
        world_size = sum(count for _, count in attempt["nodes"])
        for place, (node, count) in enumerate(attempt["nodes"]):
            for local in range(count):
                environment = {
                    "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": str(place),
                    "GROUP_WORLD_SIZE": str(len(attempt["nodes"])), "SLURMFT_MEMORY_DIR": str(self.memory(node)),
                    "SLURMFT_GENERATION": str(attempt["number"]), "SLURMFT_RUN_FOLDER": str(self.root),
                    "SLURMFT_CHECKPOINT_DIR": str(self.root / "checkpoints"),
                    **worker_variable(checkpoint=self.story["checkpoint"]),
                }  # fmt: skip
                once = str(self.root / f"once-{attempt['number']}-{rank}")
                if attempt["reader"] is not None and rank == 0:  # its first save stays under way until then
                    environment |= {VARIABLE: "image begun=stop", ONCE_VARIABLE: once}
                elif rank in attempt["writer_dies"]:
                    environment |= {VARIABLE: f"{attempt['writer_point']}=kill", ONCE_VARIABLE: once}
                children[self.fork(environment, lambda rank=rank: self.be_rank(attempt, rank))] = rank
                rank += 1
        codes = self.wait(children, attempt)
        self.end_writers(attempt)
        return codes

    def be_rank(self, attempt: dict[str, Any], rank: int) -> int:
        world_size = sum(count for _, count in attempt["nodes"])
        meet = self.root / f"meet-{attempt['number']}"
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size,
                                timeout=timedelta(seconds=GROUP_S))  # fmt: skip
        SAVERS.listener = Listener()
        return Rank(self.story, attempt, rank, self.root).run()

    def fork(self, environment: dict[str, str], work: Any) -> int:
        if pid := os.fork():
            return pid
        code = 1
        try:
            os.environ.update(environment)
            log = os.open(
                self.root / f"errors-{environment.get('RANK', 'reader')}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
            )
            os.dup2(log, 2)
            os.dup2(2, 1)
            faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
            code = work()
        except BaseException:  # noqa: BLE001 - the child ends here
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def wait(self, children: dict[int, int], attempt: dict[str, Any]) -> list[int]:
        codes = [0] * len(children)
        left, deadline, has_read = dict(children), time.monotonic() + ATTEMPT_S, False
        while left:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
            if (self.root / "reader-wanted").exists():
                self.read_beside(attempt, children)
                (self.root / "reader-wanted").unlink()
                has_read = True
            if has_read:
                go_on(children)
            if time.monotonic() > deadline:
                for number in (signal.SIGUSR1, signal.SIGKILL):
                    for pid in left:
                        os.kill(pid, number)
                    time.sleep(1.0)  # for the stacks
                raise Violation(f"ranks {sorted(left.values())} hang: {self.root}/errors-*")
            time.sleep(0.002)
        return codes

    def read_beside(self, attempt: dict[str, Any], ranks: Iterable[int]) -> None:
        """An evaluation loads the newest checkpoint while the run goes on, if possible while a save is under way."""
        deadline = time.monotonic() + STOPS_S
        while (self.root / "wrote").exists() and not stopped_writers(ranks) and time.monotonic() < deadline:
            time.sleep(0.005)

        def work() -> int:
            model = Net(has_buffers=self.story["buffers"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            if self.story["optimizer"].endswith("adamw"):
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            checkpoints = CheckpointManager(self.root / "checkpoints")
            loaded = checkpoints.load_best(model, optimizer)
            return 0 if loaded.found or not Catalog(self.root / "checkpoints").committed() else 2

        before = set((self.root / "checkpoints").iterdir())
        generation = str(attempt["number"])
        pid = self.fork({"SLURMFT_GENERATION": generation, "SLURMFT_RUN_FOLDER": str(self.root)}, work)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, 1):
            raise Violation(f"a reader ended with {code}")
        gone = [path.name for path in before - set((self.root / "checkpoints").iterdir())]
        committed = max((entry.commit for entry in Catalog(self.root / "checkpoints").committed()), default=0)
        if in_flight := [name for name in gone if int(name.rpartition("c")[2]) > committed]:
            raise Violation(f"{in_flight} went while a reader loaded")

    def end_writers(self, attempt: dict[str, Any]) -> None:
        """Those of workers that have ended are this process's children now; some wait for shards that never come."""
        deadline = time.monotonic() + (WRITERS_S if attempt["writers"] == "finish" else 0)
        seen, since = {}, time.monotonic()
        while (pids := children()) and time.monotonic() < deadline:
            reap()
            if (now := {pid: work_of(pid) for pid in pids}) != seen or any(
                "R" in each or "D" in each for each in now.values()
            ):
                seen, since = now, time.monotonic()
            if time.monotonic() - since > IDLE_S:
                break
            time.sleep(0.005)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while children():
            reap()
            time.sleep(0.002)

    def judge(self, attempt: dict[str, Any], codes: list[int]) -> bool:
        """Whether the run goes on.

        Raises:
            Violation: it resumed with something else than it should have.
        """
        logs = [self.lines(attempt, rank) for rank in range(len(codes))]
        starts = [next((line for line in log if "loaded" in line or "refused" in line), None) for log in logs]
        known = [one for one in starts if one is not None]
        fact: dict[str, Any] = {"codes": codes}
        self.facts.append(fact)
        if refused := [one["refused"] for one in known if "refused" in one]:
            fact["refused"] = refused[0]
            if len(refused) != len(known):
                raise Violation(f"some ranks refused to load, and others did not: {known}")
            if self.story["loader"] != "own" or "position of its own" not in refused[0]:
                raise Violation(f"nothing was loaded: {refused[0]}")
            return False
        if known:
            fact |= self.follow(attempt, logs, starts)
        if not attempt["deaths"] and not attempt["writer_dies"] and codes != [0] * len(codes):
            raise Violation(f"no rank died, and ranks ended with {codes}: {[log[-1] for log in logs if log]}")
        self.committed = [entry.step for entry in Catalog(self.root / "checkpoints").committed()]
        return True

    def follow(self, attempt: dict[str, Any], logs: list[Any], starts: list[Any]) -> dict[str, Any]:
        """Compare where an attempt began, and go on with the line of states from there."""
        known = [one for one in starts if one is not None]
        if len({one["loaded"] for one in known}) > 1:
            raise Violation(f"ranks begin at different steps: {[one['loaded'] for one in known]}")
        step = known[0]["loaded"]
        fact = {"step": step, "source": known[0]["source"], "lost": max(self.line, default=0) - step}
        if self.committed and not known[0]["found"]:
            raise Violation(f"the run begins anew although {self.committed} are committed")
        if self.line:
            self.compare(step, [None if one is None else one["state"] for one in starts])
        if self.committed and step < max(self.committed):
            raise Violation(f"step {step} is loaded although {self.committed} are committed")
        if self.line:
            self.compare_again(step, logs)
        self.line = {at: states for at, states in self.line.items() if at <= step}
        before = {rank: state for rank, state in self.line.get(step, {}).items() if rank < len(logs)}
        self.line[step] = before | {rank: one["state"] for rank, one in enumerate(starts) if one is not None}
        for rank, log in enumerate(logs):
            for line in log:
                if "step" in line:
                    self.line.setdefault(line["step"], {})[rank] = line["state"]
                    self.ranks_at[line["step"]] = len(logs)
        return fact

    def compare(self, step: int, states: list[dict[str, str] | None]) -> None:
        if step not in self.line:
            raise Violation(f"resumed at step {step}, which no rank had been at: {sorted(self.line)}")
        there = self.line[step]
        some = next(iter(there.values()))
        for rank, state in enumerate(states):
            if state is None:
                continue
            if state["weights"] != some["weights"]:
                raise Violation(f"rank {rank} has other weights at step {step}")
            if rank == 0 and 0 in there and state["buffers"] != there[0]["buffers"]:  # those that all get
                raise Violation(f"rank {rank} has other buffers at step {step}")
            if self.story["loader"] == "shared" and state["place"] != some["place"]:
                raise Violation(f"rank {rank} is at another place in the data at step {step}")
            if rank not in there and rank < self.ranks_at.get(step, 0):
                raise Violation(f"rank {rank} never was at step {step}, and resumes there")
            for what in ("random", "place") if rank in there else ():
                if state[what] != there[rank][what]:
                    raise Violation(f"rank {rank} has another {what} at step {step}")

    def compare_again(self, start: int, logs: list[Any]) -> None:
        """As many ranks as before that do the same steps again come to the same states."""
        for rank, log in enumerate(logs):
            for line in log:
                step = line.get("step", start)
                if any(self.ranks_at.get(at) != len(logs) for at in range(start, step + 1)):
                    break
                before = self.line.get(step, {}).get(rank, {})
                for what in ("weights", "random", "place") if before else ():
                    if line.get("state", before)[what] != before[what]:
                        raise Violation(f"rank {rank} begins at step {start} and has another {what} at step {step}")

    def lines(self, attempt: dict[str, Any], rank: int) -> list[dict[str, Any]]:
        path = self.root / f"log-{attempt['number']}-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def lose(self, attempt: dict[str, Any]) -> None:
        """Peers have copies, and nodes go."""
        nodes = [node for node, _ in attempt["nodes"]]
        if attempt["peers"] and len(nodes) > 1:
            for place, node in enumerate(nodes):
                peers = self.memory(nodes[(place + 1) % len(nodes)]) / "peers"
                peers.mkdir(exist_ok=True)
                for one in holdings_in(self.memory(node), Tier.MEMORY):
                    if one.index.is_hashed and one.index.shards > 1:
                        target = peers / f"shard-{one.index.shard}.{'ab'[one.name[2] % 2]}.json"
                        target.unlink(missing_ok=True)
                        shutil.copy(one.image, target.with_suffix(".image"))
                        shutil.copy(one.index_path, target)
        for node in attempt["lost"]:
            shutil.rmtree(self.memory(node), ignore_errors=True)


def children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def stopped_writers(ranks: Iterable[int]) -> list[int]:
    """Children of these processes that have stopped by themselves."""
    found = []
    for rank in ranks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids = [
                pid for task in Path(f"/proc/{rank}/task").iterdir() for pid in (task / "children").read_text().split()
            ]
            found += [int(pid) for pid in pids if any(state == "T" for state in work_of(int(pid)))]
    return found


def go_on(ranks: Iterable[int]) -> None:
    for pid in stopped_writers(ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def work_of(pid: int) -> tuple[str, ...]:
    """The states of its threads, and the processor time that it has used."""
    try:
        rows = [path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return (*(row[0] for row in rows), *(f"{row[11]} {row[12]}" for row in rows))


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def stories() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def start_forked(one: SpawnedWriter, theirs: socket.socket, lifetime_s: float, _log: Path | None) -> int:
    """As ``SpawnedWriter._start``, without a quarter of a second for imports."""
    numbers = [theirs.fileno(), one.page.descriptor]
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        first = 0
        for kept in (2, *sorted(numbers)):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, 4096)
        writer.main([*map(str, numbers), str(lifetime_s)])
    finally:
        os._exit(1)


def main() -> None:
    SpawnedWriter._start = start_forked  # type: ignore[method-assign]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    torch.set_num_threads(1)
    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters()).step()  # imports for a second, which the forks would do each
    base = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    for number, story in enumerate(stories()):
        root = base / f"story-{number}"
        world = World(story, root)
        answer: dict[str, Any] = {"violation": ""}
        try:
            world.tell()
        except Violation as violation:
            answer["violation"] = str(violation)
        answer["facts"] = world.facts
        if not answer["violation"]:
            shutil.rmtree(root, ignore_errors=True)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
