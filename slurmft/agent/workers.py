"""A node's workers: their environment, pages, processes (through the zygote), and ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import convert

from slurmft.agent.zygote import LEFT_S, PACKET_BYTES, ForkRequest
from slurmft.config.run import RunConfig
from slurmft.errors import StorageError
from slurmft.ipc.messages import RehearsalReport, StartWorkers, WorkerFacts
from slurmft.ipc.pages import (
    PAGE_VARIABLE,
    STACKS_SUFFIX,
    STOP_SIGNAL_VARIABLE,
    TIMING_PAGE_VARIABLE,
    DigestRing,
    Page,
    Slot,
    State,
    TimingPage,
)
from slurmft.ipc.zygote_start import Zygote, shared_environment, zygote_arguments
from slurmft.policy import hangs
from slurmft.policy.hangs import STEP
from slurmft.policy.reruns import RerunSettings
from slurmft.policy.sbatch import worker_of_task
from slurmft.policy.stop import Look
from slurmft.policy.verdict import EXIT_TEMPORARY
from slurmft.policy.worker_settings import WORKER_VARIABLE, WorkerSettings
from slurmft.scheduler.parsing import TASKS_VARIABLE
from slurmft.storage.checkpoint_names import GENERATION_VARIABLE, MEMORY_VARIABLE, RUN_FOLDER_VARIABLE
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE, EVIDENCE_VARIABLE, VERDICT_VARIABLE
from slurmft.system import processes
from slurmft.system.background import end_child
from slurmft.system.files import is_left_over, left_to, make_private_folder, read_json, remove_tree

# --- torch's flight recorder: how it is switched on, where it writes, and how it is asked to write now ---
# It remembers the newest collectives of each rank, for NCCL; gloo has none that can be asked. Its dumps go straight
# into the attempt's folder: ``flight-recorder-rank-N``, to be read with torch's own ``torchfrtrace``.

PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""torch makes a pipe of this name, the rank and ``.pipe``; any write to it asks for a dump. It looks there
once a second."""

_PREFIX = "flight-recorder-rank-"
_NEW_NAMES_SINCE = (2, 8)
"""From that torch on the old names do nothing but warn that they are old."""


@functools.cache
def knows_new_names() -> bool:
    """Whether the torch of this interpreter does; False where there is none."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _NEW_NAMES_SINCE


def variables(entries: int, folder: Path, *, same_torch: bool) -> dict[str, str]:
    """Environment that makes it remember so many collectives and dump into ``folder``; 0 switches it off.

    Args:
        same_torch: the workers use this interpreter's torch. Where that is not known both generations of names are set.
    """
    prefix = str(folder / _PREFIX)
    new = {"TORCH_FR_BUFFER_SIZE": str(entries), "TORCH_FR_DUMP_TEMP_FILE": prefix}
    old = {"TORCH_NCCL_TRACE_BUFFER_SIZE": str(entries), "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix}
    names = new if same_torch and knows_new_names() else new | old
    return names | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1" if entries else "0"}


def dump_of(folder: Path, rank: int) -> Path:
    """Where a rank's recorder writes."""
    return folder / f"{_PREFIX}{rank}"


def pipe_prefix(private: Path) -> str:
    """Value of PIPE_VARIABLE for workers whose private folder that is."""
    return str(private / _PREFIX)


def ask(private: Path, rank: int) -> bool:
    """Ask a worker's recorder for a dump; False where no recorder reads its pipe."""
    path = f"{pipe_prefix(private)}{rank}.pipe"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # no such pipe, or no reader
        return False
    try:
        return os.write(descriptor, b"1\n") > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


# --- The GPUs of a node: which of them its workers may use, and whether killed workers have released them ---
# GPUs are identified by UUID: indices prove nothing, as they are renumbered inside a job's cgroup, and may change with
# every allocation.

ASK_S = 20.0
FREE_S = 30.0
"""How long the next workers wait for GPU memory that earlier ones still hold."""

LOOK_S = 0.2
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"

_DRIVER = Path("/dev/nvidiactl")


def gpu_uuids(environment: Mapping[str, str]) -> list[str]:
    """UUIDs of the GPUs that a worker with this environment would see, in its order; empty where that is unknown."""
    rows = [line.split(",") for line in _ask("--query-gpu=index,uuid", environment, ASK_S) or []]
    by_index = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
    if VISIBLE_VARIABLE not in environment:
        return list(by_index.values())
    words = [word.strip() for word in environment[VISIBLE_VARIABLE].split(",") if word.strip()]
    found = [by_index.get(word, word if word in by_index.values() else "") for word in words]
    return found if all(found) else []


def visible_without(environment: Mapping[str, str], suspects: Collection[str], needed: int) -> str | None:
    """CUDA_VISIBLE_DEVICES that leaves out the suspects; None where fewer than ``needed`` GPUs are proven others."""
    uuids = gpu_uuids(environment)
    others = [uuid for uuid in uuids if uuid not in suspects]
    return ",".join(others) if len(others) >= needed else None


def own_device(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Variables that give a rank an instance of its own where GPUs are split (MIG); none where they are whole.

    CUDA shows a process only the first instance of those it is given, so that all ranks would share one.
    """
    words = [word.strip() for word in environment.get(VISIBLE_VARIABLE, "").split(",") if word.strip()]
    if not words or not all(word.startswith("MIG-") for word in words):
        return {}
    return {VISIBLE_VARIABLE: words[local_rank % len(words)]}


def wait_until_free(
    pids: Collection[int], environment: Mapping[str, str], *, limit_s: float = FREE_S, driver: Path = _DRIVER
) -> set[int]:
    """Return when none of these processes, which have ended, holds memory of a GPU; those that do after ``limit_s``.

    A context may outlive its process for seconds, while a kernel still runs or an error is handled; a worker that is
    started meanwhile finds too little memory. Without a driver, or where it does not answer, there is nothing to wait
    for.
    """
    if not pids or not driver.exists():
        return set()
    deadline = time.monotonic() + limit_s
    while left := pids_on_gpus(environment, max(1.0, deadline - time.monotonic())) & set(pids):
        if time.monotonic() > deadline:
            return left
        time.sleep(LOOK_S)
    return set()


def pids_on_gpus(environment: Mapping[str, str], within_s: float = ASK_S) -> set[int]:
    """Processes that hold memory of a GPU, as far as the driver reports; MIG instances count."""
    lines = _ask("--query-compute-apps=pid", environment, within_s) or []
    return {int(line) for line in map(str.strip, lines) if line.isascii() and line.isdecimal() and len(line) < 10}


def _ask(query: str, environment: Mapping[str, str], within_s: float) -> list[str] | None:
    """The lines of nvidia-smi's answer; None where there is none."""
    argv = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=within_s, check=False,
                              env=dict(environment), stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


# --- A node's workers: their pages, their processes (through the zygote), and their ends ---

END_LOOK_S = 0.005
GONE_S = 2.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Worker:
    """One rank on this node."""

    rank: int
    page: Page
    stacks: Path
    """Where it writes its Python stacks when it is asked for them; no file where it cannot (``ipc.pages``)."""

    timings: TimingPage | None = None
    """Where it leaves how long its work takes; None where timings are off."""

    mark: str = ""
    """In the environment of all that it starts."""

    pid: int = 0
    forked_at: float | None = None
    """When its process was started, by the monotonic clock; None before."""

    exit_code: int | None = None
    """As of subprocess: negative for a signal; None while it lives."""

    killed: bool = False
    """We killed it."""

    starved: bool = False
    """The kernel killed it, and has ended processes for memory since the workers were started."""

    stacks_kept: int = 0
    """Bytes of its stacks that are in the attempt's folder."""

    stopped_since: float | None = None
    """When it was first seen in state STOPPED, by the monotonic clock."""

    digests: DigestRing = field(init=False)
    digests_told: int = 0
    """How many of them were reported."""

    def __post_init__(self) -> None:
        """Those of its page."""
        self.digests = DigestRing(self.page)

    @property
    def alive(self) -> bool:
        """It has not been seen to end."""
        return self.exit_code is None

    @property
    def trainer_pid(self) -> int:
        """The process that trains, where it is known to be another one than was forked: ``launcher: torchrun``.

        The id in a page may be one inside of a container, which is another process out here.
        """
        told = self.page[Slot.PID]
        is_another = told not in (0, self.pid) and processes.was_given(
            told, PAGE_VARIABLE, str(self.stacks.with_suffix(""))
        )
        return told if is_another else self.pid

    def close(self) -> None:
        """Let go of its pages."""
        self.page.close()
        if self.timings is not None:
            self.timings.close()

    def facts(self) -> WorkerFacts:
        """Its page, as the supervisor is told."""
        page = self.page
        return WorkerFacts(
            rank=self.rank,
            state=page[Slot.STATE],
            attached=page[Slot.PID] != 0,
            step=page[Slot.STEP],
            until=page[Slot.UNTIL],
            saved=page[Slot.SAVED],
            durable=page[Slot.DURABLE],
            resumed=page[Slot.RESUMED],
            first_step_at=page[Slot.FIRST_STEP_AT] / 1e9,
            answered=page[Slot.ANSWERED],
            metric=page.metric(),
            first_step_s=page[Slot.FIRST_STEP_NS] / 1e9,
            longest_step_s=page[Slot.LONGEST_STEP_NS] / 1e9,
            saves=page[Slot.SAVES],
            save_failures=page[Slot.SAVE_FAILURES],
            save_errno=page[Slot.SAVE_ERRNO],
            save_s=page[Slot.SAVE_NS] / 1e9,
            save_cost_s=page[Slot.SAVE_COST_NS] / 1e9,
            # a node's processes have one monotonic clock
            saving_s=(time.monotonic_ns() - began_ns) / 1e9 if (began_ns := page[Slot.SAVE_BEGAN_NS]) else 0.0,
            since_saved_s=(time.monotonic_ns() - page[Slot.SAVED_AT_NS]) / 1e9,
            attached_at=page[Slot.ATTACHED_AT] / 1e9 or None,
            loop_at=page[Slot.LOOP_AT] / 1e9 or None,
            step_at=page[Slot.PROGRESS_AT] / 1e9 or None,
            load_s=page[Slot.LOAD_NS] / 1e9 or None,
            stall_s=page[Slot.STALL_NS] / 1e9 or None,
            copied=None if page[Slot.COPIED] < 0 else page[Slot.COPIED],
            copy_interval=page[Slot.COPY_INTERVAL] or None,
            copy_share_ppm=page[Slot.COPY_SHARE_PPM] or None,
        )

    def look(self) -> Look:
        """The worker's state for the stop agreement."""
        return Look(
            attached=self.page[Slot.PID] != 0,
            tick=self.page[Slot.TICK],
            alive=self.alive and self.pid != 0,
            holding=self.page[Slot.HOLDING],
        )


class Workers:
    """Starts, watches and ends the workers of one node.

    Args:
        name: of the node's place in this start of the job: an agent that follows a killed one takes over its memory.
    """

    def __init__(self, on_exit: Callable[[Worker], None], name: str = "") -> None:
        self._on_exit = on_exit
        self.by_rank: dict[int, Worker] = {}
        processes.kill_marked(_is_of_a_dead_agent, LEFT_S)
        left = left_to(name) if name else None
        self.private = make_private_folder(heir=name)
        self.folder = self.private.path
        self.memory = self.folder / "memory"
        """Where workers keep snapshots, from one attempt to the next, and from one agent to the next."""
        if left is not None:
            with contextlib.suppress(OSError):
                (left / self.memory.name).rename(self.memory)
                remove_tree(left, owner=os.geteuid())
        self.memory.mkdir(mode=0o700, exist_ok=True)
        self._zygote: Zygote | None = None
        self._socket: socket.socket | None = None
        self._signal_at_start: int | None = None
        self._memory_kills = self._forks = 0
        self._adopts = False
        self.ready = asyncio.Event()

    def start_zygote(self, environment: Mapping[str, str], preload: Sequence[str], begun: Zygote | None = None) -> None:
        """Begin importing the modules of ``preload``, or go on with what has been ``begun``; returns at once."""
        if begun is not None and not begun.is_as(environment, preload):
            begun.end()
            begun = None
        self._zygote = begun or Zygote(environment, preload)
        self._socket = self._zygote.socket
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def start(
        self, ranks: Sequence[int], environments: Sequence[dict[str, str]], *, command: Sequence[str],
        folder: Path, logs: Path, verdicts: Sequence[Path], generation: int, timed: bool = False,
    ) -> None:  # fmt: skip
        """Fork one worker for each rank; the zygote takes the requests as soon as it is ready."""
        self._forget()
        self._memory_kills = processes.memory_kills()
        for rank, environment, verdict in zip(ranks, environments, verdicts, strict=True):
            self._fork(rank, environment, command=command, folder=folder, logs=logs, verdict=verdict,
                       generation=generation, timed=timed)  # fmt: skip

    def start_one(
        self, rank: int, environment: dict[str, str], *, command: Sequence[str], folder: Path, logs: Path,
        verdict: Path, generation: int,
    ) -> None:  # fmt: skip
        """Fork one worker while others of the node go on; an earlier one of this rank must have ended."""
        if (earlier := self.by_rank.get(rank)) is not None:
            if earlier.alive:
                raise RuntimeError(f"rank {rank} is alive")
            earlier.close()
        self._signal_at_start = None
        if not self._adopts:  # what a zygote leaves that is killed itself
            self._adopts = True
            processes.adopt_orphans()
        self._need_zygote()
        self._fork(rank, environment, command=command, folder=folder, logs=logs, verdict=verdict,
                   generation=generation, timed=False, adopts=True)  # fmt: skip

    def kill_one(self, rank: int) -> None:
        """SIGKILL one worker and all that it started in its own session; nothing where it has ended."""
        worker = self.by_rank.get(rank)
        if worker is not None and worker.alive and worker.pid:
            self._kill(worker)

    def _fork(
        self, rank: int, environment: dict[str, str], *, command: Sequence[str], folder: Path, logs: Path,
        verdict: Path, generation: int, timed: bool, adopts: bool = False,
    ) -> None:  # fmt: skip
        arguments = zygote_arguments(command)
        path = self.folder / f"rank-{rank}"
        page = Page.create(path, rank=rank, generation=generation)
        self._forks += 1
        worker = Worker(rank=rank, page=page, stacks=path.with_suffix(STACKS_SUFFIX), mark=f"{path}.{self._forks}")
        worker.stacks.unlink(missing_ok=True)
        self.by_rank[rank] = worker
        pages = {PAGE_VARIABLE: str(path), MEMORY_VARIABLE: str(self.memory), processes.MARK_VARIABLE: worker.mark}
        pages |= self._timing_page(worker, generation) if timed else {}
        pages[PIPE_VARIABLE] = environment.get(PIPE_VARIABLE) or pipe_prefix(self.folder)
        self._send(
            ForkRequest(
                rank=rank, environment=environment | pages, python=arguments is not None,
                argv=arguments or list(command), folder=str(folder), log=str(logs / f"rank-{rank}.log"),
                verdict=str(verdict), stacks=str(worker.stacks), adopts=adopts,
            )
        )  # fmt: skip

    def _forget(self) -> None:
        """Leave the workers of an earlier attempt behind; their zygote goes on, or a new one begins."""
        if self._living():
            raise RuntimeError("workers of an earlier attempt are alive")
        for worker in self.by_rank.values():
            worker.close()
        self.by_rank, self._signal_at_start = {}, None
        self._need_zygote()

    def _need_zygote(self) -> None:
        if self._zygote is None:
            raise RuntimeError("start_zygote first")
        if self._socket is None or self._zygote.process.poll() is not None:
            self.ready.clear()
            self._leave_zygote()
            self.start_zygote(self._zygote.environment, self._zygote.preload)

    def signal(self, number: int) -> None:
        """Send a signal to every living worker itself, not to its children; to those to come, when they come."""
        self._signal_at_start = number
        for worker in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)

    def kill(self) -> None:
        """SIGKILL every living worker and all that it started in its own session.

        Workers that wait for the zygote's imports never come to life: the zygote goes with them.
        """
        waiting = [worker for worker in self.by_rank.values() if worker.alive and not worker.pid]
        for worker in waiting:
            worker.killed = True
        if waiting and self._zygote is not None:
            self._zygote.process.kill()
        for worker in self._living():
            self._kill(worker)

    async def end_earlier(self) -> None:
        """Return when no worker lives, and none is still to come: a zygote that was killed for it has ended."""
        if any(worker.alive for worker in self.by_rank.values()):
            self.kill()
        while any(worker.alive for worker in self.by_rank.values()):
            await asyncio.sleep(END_LOOK_S)

    def earlier_pids(self) -> set[int]:
        """Process ids of the workers so far, which may have ended; those of trainers under another launcher as well."""
        told = {worker.page[Slot.PID] for worker in self.by_rank.values()}
        return {worker.pid for worker in self.by_rank.values() if worker.pid} | (told - {0})

    def kill_lingering(self, grace_s: float) -> None:
        """Kill workers that have stopped at the agreed step, with everything saved, but do not end."""
        now = time.monotonic()
        for worker in self._living():
            if worker.page[Slot.STATE] == State.STOPPED:
                worker.stopped_since = worker.stopped_since or now
                if now - worker.stopped_since > grace_s:
                    self._kill(worker)

    def close(self, *, leave_memory: bool = False) -> None:
        """End the zygote and all workers with it, and remove the pages, unless an agent is to come for the memory."""
        self.kill()
        self._leave_zygote()
        for worker in self.by_rank.values():
            worker.close()
        self.private.close(leave=leave_memory)

    def _hang_up(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _leave_zygote(self) -> None:
        self._hang_up()
        if self._zygote is not None:
            self._zygote.end(LEFT_S + GONE_S if self.ready.is_set() else 0.0)

    def _timing_page(self, worker: Worker, generation: int) -> dict[str, str]:
        path = self.folder / f"rank-{worker.rank}.timings"
        try:
            worker.timings = TimingPage.create(path, rank=worker.rank, generation=generation)
        except OSError as error:  # training matters more than its timings
            log.warning("no timings of rank %d: %s", worker.rank, error)
            return {}
        return {TIMING_PAGE_VARIABLE: str(path)}

    def _kill(self, worker: Worker) -> None:
        worker.killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(worker.pid, signal.SIGKILL)  # it may not lead its group yet
            os.killpg(worker.pid, signal.SIGKILL)

    def _living(self) -> list[Worker]:
        return [worker for worker in self.by_rank.values() if worker.alive and worker.pid]

    def _send(self, request: ForkRequest) -> None:
        if self._socket is None:
            raise RuntimeError("start_zygote first")
        path = self.folder / f"request-{request.rank}.json"
        request.write(path)
        self._socket.send(json.dumps({"request": str(path)}).encode())

    def _read(self) -> None:
        if self._socket is None:
            return
        try:
            packet = self._socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it was killed before it read a request
            packet = b""
        if not packet:
            self._zygote_is_gone()
            return
        message = json.loads(packet)
        if message["kind"] == "ready":
            self.ready.set()
        elif message["kind"] == "started":
            worker = self.by_rank[message["rank"]]
            worker.pid, worker.forked_at = message["pid"], time.monotonic()
            if self._signal_at_start is not None:
                os.kill(worker.pid, self._signal_at_start)
        else:
            self._ended(message["pid"], message["code"])

    def _ended(self, pid: int, code: int) -> None:
        for worker in self.by_rank.values():
            if worker.pid == pid and worker.alive:
                worker.exit_code = code
                worker.starved = code == -signal.SIGKILL and processes.memory_kills() > self._memory_kills
                if worker.page[Slot.STATE] not in (State.STOPPED, State.FINISHED, State.CLOSED):
                    worker.page[Slot.STATE] = State.FAILED
                self._on_exit(worker)

    def _zygote_is_gone(self) -> None:
        # its children died with it, the kernel sees to that; what these had started did not
        self._hang_up()
        own = processes.own_children() if self._adopts else None
        processes.kill_left({worker.pid: worker.mark for worker in self.by_rank.values() if worker.pid}, GONE_S, own)
        if own is not None:
            processes.reap_adopted(own)
        for worker in self.by_rank.values():
            if worker.alive:
                worker.exit_code = -signal.SIGKILL
                worker.starved = processes.memory_kills() > self._memory_kills
                self._on_exit(worker)


def _is_of_a_dead_agent(pid: int, mark: str) -> bool:
    """Whether a marked process has outlived its agent and zygote. Its own root counts: it may see another /dev/shm."""
    folder = Path(f"/proc/{pid}/root{Path(mark).parent}")
    with contextlib.suppress(OSError):
        return not folder.exists() or is_left_over(folder, owner=os.geteuid())
    return False


def reserve_port() -> tuple[socket.socket, int]:
    """A port for rank 0's store, held by a bound socket that does not listen.

    With SO_REUSEADDR on both, the store can bind it as well while no other process is assigned it.
    """
    holder = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder, int(holder.getsockname()[1])


# --- The environment of zygote and workers: torchrun's variables, and slurmft's own ---

LENDER_VARIABLE = "SLURMFT_LENDER"
"""The job that lends an agent's node; not set for the run's own."""

_OF_TASKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def common_environment(config: RunConfig, base: Mapping[str, str]) -> dict[str, str]:
    """The environment that all workers of the run share; preloaded libraries read parts of it while they load."""
    return shared_environment(base, name=config.name, per_node=config.nproc_per_node, own=config.environment)


def worker_environment(
    config: RunConfig, base: Mapping[str, str], start: StartWorkers, rank: int, attempt: str
) -> dict[str, str]:
    """One rank's environment; ``start`` is the supervisor's call."""
    environment = common_environment(config, base)
    folder = config.run_folder / "attempts" / attempt
    world_size = start.nodes * config.nproc_per_node
    local_rank, node = rank - start.first_rank, start.first_rank // config.nproc_per_node
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(config.nproc_per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(start.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(start.cycle),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": config.name,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        RUN_FOLDER_VARIABLE: str(config.run_folder),
        GENERATION_VARIABLE: str(start.generation),
        "SLURMFT_ATTEMPT": attempt,
        VERDICT_VARIABLE: str(config.run_folder / "verdicts" / f"{attempt}.rank-{rank}.json"),
        EVIDENCE_VARIABLE: str(config.run_folder / "verdicts" / f"{attempt}.rank-{rank}.evidence.jsonl"),
        ERROR_DIR_VARIABLE: str(folder),
        # what torch's own @record writes, for scripts that have it already
        "TORCHELASTIC_ERROR_FILE": str(folder / f"torch-error.rank_{rank}"),
        "SLURMFT_CHECKPOINT_DIR": str(config.checkpoint_dir),
        WORKER_VARIABLE: settings_of(config, start).as_text(),
    }
    if config.preemption.signal != "SIGTERM":
        environment[STOP_SIGNAL_VARIABLE] = config.preemption.signal
    same_torch = zygote_arguments(config.command) is not None
    environment |= slurm_task(environment, start.nodelist)
    entries, timeout_s = config.nccl.flight_recorder_buffer_size, 60 * config.nccl.step_timeout_minutes
    limit_s = config.fault_tolerance.limits().sections.get(STEP, 0.0)
    environment |= own_device(environment, local_rank)
    environment |= hangs.watchdog_variables(environment, timeout_s=timeout_s, limit_s=limit_s)
    return as_task(variables(entries, folder, same_torch=same_torch) | environment, local_rank)


def as_task(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The environment of a worker that stands for a task of a batch script's own srun (``slurmft sbatch``).

    Raises:
        StorageError: the file that the supervisor's launcher has left cannot be read, or has no such task.
    """
    if not (path := environment.get(TASKS_VARIABLE)):
        return dict(environment)
    try:
        tasks = (read_json(Path(path), owners={os.geteuid()}) or {})["hosts"][environment["SLURMD_NODENAME"]]
        changes, gpus = tasks[local_rank]["changes"], int(tasks[local_rank]["gpus"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StorageError(f"{path} has no task {local_rank} of this node: {error!r}") from error
    return worker_of_task(environment, changes, gpus=gpus, local=local_rank)


def slurm_task(environment: Mapping[str, str], nodelist: str | None) -> dict[str, str]:
    """What srun would have told this rank, had it started a task for each; nothing outside of Slurm.

    Srun has started agents, one on a node. The nodes are those of the attempt, rank 0's first: the first of them is
    where scripts look for their master.

    Args:
        environment: the rank's, with torchrun's variables.
        nodelist: of the attempt, in the order of ranks; None where it is not known.
    """
    if "SLURM_JOB_ID" not in environment:
        return {}
    rank, local_rank, tasks, per_node, node, nodes = (environment[name] for name in _OF_TASKS)
    first = int(rank) - int(local_rank)
    told = {
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), tasks),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), nodes),
        **dict.fromkeys(
            ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node + (f"(x{nodes})" if nodes != "1" else "")
        ),
        "SLURM_NTASKS_PER_NODE": per_node, "SLURM_PROCID": rank, "SLURM_LOCALID": local_rank, "SLURM_NODEID": node,
        "SLURM_GTIDS": ",".join(map(str, range(first, first + int(per_node)))),
    }  # fmt: skip
    lists = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
    return told | (dict.fromkeys(lists, nodelist) if nodelist else {})


def settings_of(config: RunConfig, start: StartWorkers) -> WorkerSettings:
    """The settings of every worker of this start."""
    return WorkerSettings(
        backend=config.nccl.backend,
        init_timeout_minutes=config.nccl.init_timeout_minutes,
        step_timeout_minutes=config.nccl.step_timeout_minutes,
        batch_divisor=start.batch_divisor,
        base_world_size=config.world_size if config.elastic.batch == "keep_micro_batch" else 0,
        straggler_detection=config.straggler_detection.enabled,
        straggler_profiling_interval=config.straggler_detection.profiling_interval,
        digest_interval_steps=config.digests.interval_steps,
        checkpoint=config.checkpoint.settings(start.mtbf_s),
        rerun=convert(config.rerun.model_dump(mode="json"), RerunSettings),
    )


# --- A spare's rehearsal (``spares: rehearse``): its node runs the trainer for two steps, in a world of its own ---
# Nothing of it is kept: no agent's page, an empty checkpoint folder of its own, and the session ends the trainer before
# it would save. The node's caches (compiled kernels, files of modules and data) stay warm: a takeover costs no compile.

LIMIT_S = 1800.0
"""A rehearsal that takes longer is ended: compiling takes minutes."""

_LAST_BYTES = 4096

_BECOME = """\
import os, sys
from slurmft.system.processes import die_with_parent
die_with_parent()
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""One rank of it, which dies with the agent."""

_OF_THE_RUN = (
    RUN_FOLDER_VARIABLE, GENERATION_VARIABLE, VERDICT_VARIABLE, EVIDENCE_VARIABLE, ERROR_DIR_VARIABLE,
    "SLURMFT_ATTEMPT", "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip


class SpareRehearsal:
    """The rehearsal of this node; at most one, and once it went well no other."""

    def __init__(
        self, config: RunConfig, environment: Mapping[str, str], folder: Path, report: Callable[[RehearsalReport], None]
    ) -> None:
        self._config, self._environment, self._report = config, environment, report
        self._folder = folder / "rehearsal"
        self._processes: list[asyncio.subprocess.Process] = []
        self._task: asyncio.Task[None] | None = None
        self._is_done = False

    def begin(self) -> None:
        """Rehearse, unless that is done or under way; returns at once."""
        if not self._is_done and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._rehearse())

    async def stop(self) -> None:
        """End it: the node is needed. Returns when none of its processes is left."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _rehearse(self) -> None:
        began_s = time.monotonic()
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.mkdir(mode=0o700)
            holder, port = reserve_port()
            with holder:
                codes, words = await asyncio.wait_for(self._run(port), LIMIT_S)
        except TimeoutError:
            codes, words = [], f"not done in {LIMIT_S:.0f} s"
        except OSError as error:
            codes, words = [], f"it could not be started: {error}"
        finally:
            await self._end_all()
            shutil.rmtree(self._folder, ignore_errors=True)
        is_well = bool(codes) and set(codes) <= {0, EXIT_TEMPORARY}
        self._is_done = True  # what failed once fails again, and would only keep the node busy
        self._report(RehearsalReport(took_s=time.monotonic() - began_s, problem="" if is_well else words[:255]))

    async def _run(self, port: int) -> tuple[list[int], str]:
        """The exit codes of all ranks, and the last line of the first one that failed."""
        config = self._config
        arguments = zygote_arguments(config.command)  # by this interpreter, where a worker would be
        command = config.command if arguments is None else [sys.executable, *arguments]
        for rank in range(config.nproc_per_node):
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-c", _BECOME, *command,
                    env=self._environment_of(rank, port), cwd=config.trainer_directory, start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT, limit=_LAST_BYTES,
                )
            )  # fmt: skip
        ends = await asyncio.gather(*map(_end_of, self._processes))
        failed = [(code, words) for code, words in ends if code not in (0, EXIT_TEMPORARY)]
        return [code for code, _ in ends], f"exit code {failed[0][0]}: {failed[0][1]}" if failed else ""

    def _environment_of(self, rank: int, port: int) -> dict[str, str]:
        start = StartWorkers(
            attempt="rehearsal",
            cycle=0,
            first_rank=0,
            nodes=1,
            generation=0,
            nodelist=self._environment.get("SLURMD_NODENAME"),
            master_addr="127.0.0.1",
            master_port=port,
        )
        environment = worker_environment(self._config, self._environment, start, rank, "rehearsal")
        for name in _OF_THE_RUN:
            environment.pop(name, None)
        settings = json.loads(environment[WORKER_VARIABLE])
        return environment | {
            WORKER_VARIABLE: json.dumps({**settings, "rehearsal": True}),
            "SLURMFT_CHECKPOINT_DIR": str(self._folder / "checkpoints"),
            "WANDB_MODE": "disabled",
        }

    async def _end_all(self) -> None:
        await asyncio.gather(*map(end_child, self._processes), return_exceptions=True)
        self._processes = []


async def _end_of(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Its exit code, and the last line that it wrote."""
    last = b""
    assert process.stdout is not None
    while part := await process.stdout.read(_LAST_BYTES):
        last = (last + part)[-_LAST_BYTES:]
    lines = last.decode("utf-8", "replace").split("\n")
    return await process.wait(), next((line.strip() for line in reversed(lines) if line.strip()), "")
