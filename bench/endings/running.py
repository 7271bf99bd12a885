"""What slurmft costs a run that it watches: CPU time while nothing happens, and steps per second."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from contenders import NODES, RANKS, TRAINERS, empty_queue, new_folder, submit_slurmft
from table import Row, Table

from slurmft.lab.cluster import Lab

SLEEP_PER_STEP_S = 5.0
STEPS = 5500
LOSS_AT_MOST_PERCENT = 1.0


def measure_idle(lab: Lab, seconds: float) -> dict[str, list[float]]:
    """Percent of a core by kind of process, one value per process, while every rank sleeps."""
    folder = new_folder(lab, "idle")
    command = ["python", str(TRAINERS / "with_slurmft.py"), str(folder), str(SLEEP_PER_STEP_S)]
    submit_slurmft(lab, "idle", command)
    _wait_for(folder / "starts")
    time.sleep(SLEEP_PER_STEP_S)
    processes = _processes_of(lab.home / "idle.run")
    before, began = {process: _cpu_s(process) for _, process in processes}, time.monotonic()
    time.sleep(seconds)
    lasted = time.monotonic() - began
    shares: dict[str, list[float]] = {}
    for kind, process in processes:
        shares.setdefault(kind, []).append(100 * (_cpu_s(process) - before[process]) / lasted)
    empty_queue(lab)
    counts = {kind: len(values) for kind, values in shares.items()}
    if counts.get("supervisor") != 1 or counts.get("agent") != NODES:
        raise SystemExit(f"expected one supervisor and {NODES} agents, found {counts}")
    return shares


def _processes_of(run_folder: Path) -> list[tuple[str, psutil.Process]]:
    """Kind and process of all that watches this run; the lab's processes are in namespaces, but we see them all."""
    supervisors, others = [], []
    for process in psutil.process_iter():
        try:
            words, parent = process.cmdline(), process.parent()
            words_of_parent = parent.cmdline() if parent is not None else []
        except psutil.Error:
            continue
        if "slurmft.agent.zygote" in words and _is_of(words_of_parent, run_folder):
            others.append(("zygote", process))
        elif _is_of(words, run_folder) and "agent" in words:
            others.append(("agent", process))
        elif _is_of(words, run_folder) and "run" in words:
            supervisors.append((process, parent))
    guardians = {parent for _, parent in supervisors}
    return [("guardian" if process in guardians else "supervisor", process) for process, _ in supervisors] + others


def _is_of(words: Sequence[str], run_folder: Path) -> bool:
    python = bool(words) and Path(words[0]).name.startswith("python")
    return python and any(word.startswith(f"{run_folder}/") for word in words)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _wait_for(path: Path, within_s: float = 60.0) -> str:
    deadline = time.monotonic() + within_s
    while not path.exists() or not (text := path.read_text()).endswith("\n"):
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} did not appear within {within_s:.0f} s")
        time.sleep(0.1)
    return text


def measure_steps(lab: Lab, rounds: int, say: Callable[[str], None]) -> tuple[list[list[float]], list[list[float]]]:
    """Steps per second, piece by piece of each job, with slurmft and of the same process under plain srun; in turns."""
    folder = new_folder(lab, "steps")
    trainer = ["python", str(TRAINERS / "one_ms_steps.py")]
    ours, plain = [], []
    for number in range(rounds):
        path = folder / f"plain-{number}"
        wrapped = f"srun {' '.join([*trainer, str(path), str(STEPS)])}"
        lab.run(["sbatch", "--output=/dev/null", f"--wrap={wrapped}"], cwd=folder)
        plain.append(json.loads(_wait_for(path)))
        lab.wait_until_idle(60)
        path = folder / f"ours-{number}"
        submit_slurmft(
            lab, f"steps-{number}", [*trainer, str(path), str(STEPS), "session"], nodes=1, nproc_per_node=1,
            checkpoint={"interval_steps": 0},
        )  # fmt: skip
        ours.append(json.loads(_wait_for(path)))
        lab.wait_until_idle(60)
        with_it, without = (statistics.median(rates[-1]) for rates in (ours, plain))
        say(f"steps per second, round {number + 1} of {rounds}: {with_it:.1f} with slurmft, {without:.1f} without")
    return ours, plain


def idle_table(shares: dict[str, list[float]], seconds: float) -> Table:
    labels = {
        "supervisor": "supervisor", "guardian": "its guardian", "agent": "each agent", "zygote": "each agent's zygote",
    }  # fmt: skip
    rows = [Row(what=label, values=shares[kind], digits=3) for kind, label in labels.items() if kind in shares]
    remark = f"{NODES} nodes x {RANKS} ranks whose steps sleep {SLEEP_PER_STEP_S:.0f} s, watched for {seconds:.0f} s."
    return Table("CPU of the control channel while nothing happens", "percent of a core", rows, [remark])


def steps_table(ours: list[list[float]], plain: list[list[float]]) -> Table:
    losses = [100 * (1 - statistics.median(a) / statistics.median(b)) for a, b in zip(ours, plain, strict=True)]
    rows = [
        Row(what="with slurmft", values=[rate for rates in ours for rate in rates], digits=1),
        Row(what="the same process without it", values=[rate for rates in plain for rate in rates], digits=1),
        Row(what="loss between the two jobs of a pair, in percent", values=losses,
            target=f"under {LOSS_AT_MOST_PERCENT:.0f}", hit=statistics.median(losses) < LOSS_AT_MOST_PERCENT),
    ]  # fmt: skip
    remark = (
        "One rank that does nothing but steps of exactly 1 ms, busy; half a second makes one value. In turns, each a "
        "job of its own; with slurmft, agent and supervisor run on the same machine beside it. The spread of the "
        "losses is the noise of the machine."
    )
    return Table("Steps per second, of steps of 1 ms", "steps/s", rows, [remark])
