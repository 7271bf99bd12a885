"""Injected faults of GPUs, each seen and off its node or not, and a million healthy looks, which must drain nothing.

    python bench/gpu_faults --output bench/results/gpu_faults.md     # ten minutes or so; no GPU, no Slurm, a C compiler

The faults go through the real probes, nvidia-ml-py and the stand-in for NVIDIA's library (tests/unit/support); so do
some of the healthy looks, and the others through the judges and the policy alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/unit/support"))

import gpu_faults
import gpu_stand_in
from gpu_faults import FAULTS, Fault, FaultyCluster, NodeUnderTest, outcome_of

import slurmft
from slurmft.config.health import GpuLimits, HealthConfig
from slurmft.health import gpu
from slurmft.health.gpu import Gpu, Xid
from slurmft.policy.node_health import Checkup, Condition, ProbeResult, Sample, Status, assess, growth, with_sample

DAY_S, LOOK_S, WINDOW_S = 86_400.0, 300.0, 86_400.0
GPUS = 8
PROGRAMS_XIDS = (13, 31, 43, 45)


class Injected:
    """What became of the faults of one kind."""

    def __init__(self) -> None:
        self.count = self.right = self.seen_by_hook = 0
        self.slowest_hook_s = 0.0
        self.wrong: list[str] = []

    def add(self, other: Injected) -> None:
        self.count, self.right = self.count + other.count, self.right + other.right
        self.seen_by_hook += other.seen_by_hook
        self.slowest_hook_s = max(self.slowest_hook_s, other.slowest_hook_s)
        self.wrong += other.wrong


def inject(numbers: range, seed: int, folder: Path) -> dict[str, Injected]:
    """One fault after the other, each on a cluster that is well; over all numbers every kind is equally often."""
    cluster, found = FaultyCluster(folder, seed=seed), {fault.name: Injected() for fault in FAULTS}
    for number in numbers:
        fault = FAULTS[number % len(FAULTS)]
        sick = cluster.dice.choice(cluster.nodes)
        index = cluster.dice.randrange(GPUS)
        cluster.begin()
        for node in cluster.nodes:  # the others are not idle either
            node.gpus.set(cluster.dice.randrange(GPUS), temp=cluster.dice.randint(30, 84), reasons="0x4")
        fault.inject(sick, index, cluster.dice)
        _judge(cluster, fault, sick.name, found[fault.name])
    return found


def _judge(cluster: FaultyCluster, fault: Fault, name: str, into: Injected) -> None:
    sick = next(node for node in cluster.nodes if node.name == name)
    began = time.monotonic()
    hook = cluster.look(sick, 1.0, "prolog")
    into.slowest_hook_s = max(into.slowest_hook_s, time.monotonic() - began)
    into.seen_by_hook += outcome_of(hook, fault) is fault.status
    looks = [cluster.look(sick, 300.0 * each, "healthcheck") for each in (1, 2)]
    drained = [verdict.node for verdict in cluster.sweep(601.0).drain]
    into.count += 1
    if {outcome_of(look, fault) for look in looks} == {fault.status} and drained == [name] * fault.takes_out:
        into.right += 1
    else:
        into.wrong.append(f"{name}: {[outcome_of(look, fault).name for look in looks]}, drained {drained}")


class HealthyNode:
    """One node that is well, over weeks: temperatures wander, clocks idle, counters grow slowly, programs crash."""

    def __init__(self, seed: int, *, totals: bool) -> None:
        self.dice, self.totals = random.Random(seed), totals
        self.temperatures = [40.0] * GPUS
        self.uncorrected, self.recoveries = [0] * GPUS, [0] * GPUS
        self.samples: tuple[Sample, ...] = ()
        self.xids: list[Xid] = []
        self.booted = 0.0
        self.limits = GpuLimits(expected=GPUS, pcie_width=16, pcie_generation=5, nvlinks=18)

    def look(self, now: float) -> Checkup:
        dice = self.dice
        if dice.random() < 1 / 6000:  # a boot every three weeks: counters and log begin anew
            self.uncorrected, self.recoveries, self.xids, self.booted = [0] * GPUS, [0] * GPUS, [], now
        gpus = [self._gpu(index) for index in range(GPUS)]
        if dice.random() < 0.01:  # a program crashes, several times
            code, device = dice.choice(PROGRAMS_XIDS), f"0000:{dice.randrange(GPUS):02x}:00"
            self.xids += [Xid(device=device, code=code, at_s=now - self.booted, text="pid=1, name=python")] * 3
        if dice.random() < 0.01:
            late = ProbeResult(name="gpu-count", status=Status.UNKNOWN, detail="no answer within 15.0 s")
            return Checkup(node="n", at=now, results=(late,))
        if self.totals:
            judged = gpus
        else:
            totals = gpu.totals_of(gpus)
            if not self.samples:
                self.samples = ((self.booted, {}),)
            self.samples = with_sample(self.samples, now, totals, WINDOW_S)
            judged = gpu.with_growth(gpus, growth(self.samples, now, WINDOW_S))
        self.xids = [each for each in self.xids if now - self.booted - each.at_s <= DAY_S]
        results = [judge(judged, self.limits) for judge in gpu.JUDGES]
        results.append(gpu.judge_xids(self.xids, now - self.booted, self.limits.xid_hours))
        results.append(gpu.judge_count(gpu.Survey(gpus=tuple(gpus), source="nvml"), self.limits, confined=False))
        return Checkup(node="n", at=now, results=tuple(results))

    def _gpu(self, index: int) -> Gpu:
        dice = self.dice
        busy = dice.random() < 0.7
        goal = 68.0 if busy else 36.0
        heat = self.temperatures[index] = 0.8 * self.temperatures[index] + 0.2 * goal + dice.gauss(0, 2.5)
        if dice.random() < 1 / 8640:  # one contained error a month on each device
            self.uncorrected[index] += 1
        if dice.random() < 1 / 288:
            self.recoveries[index] += 1
        throttle = dice.choice((0x4, 0x0)) if busy else 0x1
        if dice.random() < 0.0005:
            throttle |= 0x20
        return Gpu(index=index, uuid=f"GPU-{index}", uncorrected=self.uncorrected[index], corrected=index,
                   pending=dice.random() < 0.001, remap_failed=False, temperature_c=round(heat), throttle=throttle,
                   width=16, max_width=16, max_generation=5, links=(True,) * 18,
                   link_errors=self.recoveries[index])  # fmt: skip


def healthy(seed: int, looks: int, *, totals: bool = False) -> Counter[str]:
    """The life of one node: how many looks were what, and how many of them would have had it drained."""
    node, rules, counts = HealthyNode(seed, totals=totals), HealthConfig().verdict.rules(), Counter[str]()
    newest: list[Checkup] = []
    for number in range(looks):
        now = LOOK_S * (number + 1)
        newest = [*newest[-11:], node.look(now)]
        counts[newest[-1].status.name] += 1
        verdict = assess({"n": newest}, now, rules).verdicts["n"]
        counts["sick"] += verdict.condition is Condition.SICK
        counts["suspect"] += verdict.condition is Condition.SUSPECT
    return counts


def real_healthy(looks: int, seed: int, folder: Path) -> Counter[str]:
    """The same noise through the library and the probes' processes."""
    cluster, counts = FaultyCluster(folder, seed=seed), Counter[str]()
    cluster.begin()
    noise = HealthyNode(seed, totals=False)
    for number in range(looks):
        node = cluster.nodes[number % len(cluster.nodes)]
        for index in range(GPUS):
            one = noise._gpu(index)
            node.gpus.gpus[index] |= {"temp": one.temperature_c, "reasons": hex(one.throttle or 0),
                                      "uncorrected": one.uncorrected, "linkerrors": one.link_errors}  # fmt: skip
        node.gpus.write()
        if cluster.dice.random() < 0.01:
            node.log(f"NVRM: Xid (PCI:0000:1b:00): {cluster.dice.choice(PROGRAMS_XIDS)}, pid=12, name=python")
        after_s = LOOK_S * (number // len(cluster.nodes) + 1)
        counts[cluster.look(node, after_s, "healthcheck").status.name] += 1
        cluster.looks[node.name] = cluster.looks[node.name][-12:]
        counts["sick"] += len(cluster.sweep(after_s).drain)
    return counts


WATCH = """
import sys
from pathlib import Path
from slurmft.config.health import GpuLimits, HealthConfig
from slurmft.health import gpu_watch
from slurmft.health.node import Scene
limits = GpuLimits(pcie_width=16, pcie_generation=5, nvlinks=18, answer_s=float(sys.argv[2]))
gpu_watch.watch(Scene(node="n1", now=0.0, config=HealthConfig(gpu=limits), context="agent", root=Path(sys.argv[1]),
                      environment={"PATH": "/nowhere"}))
"""
"""The program that an agent starts, on a node of ours."""

WATCHED_S = 40.0
"""A fault that ends no run has been looked at four times in a quarter of it."""


def watched(number: int, folder: Path, library: Path, answer_s: float) -> tuple[Fault, float | None, bool]:
    """A fault beneath a run: the seconds until the agent's watch ended the attempt, if it did; whether it is right."""
    fault, dice = FAULTS[number % len(FAULTS)], random.Random(number)
    node = NodeUnderTest("n1", folder / f"watched-{number}")
    node.gpus.set(0, temp=95)  # told at its first look, which is how we know of that
    argv = [sys.executable, "-P", "-c", WATCH, str(node.root), str(answer_s)]
    environment = {**os.environ, **gpu_stand_in.environment_of(library), "NVML_STAND_IN": str(node.gpus.path)}
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment) as process:
        try:
            if next(_lines(process, 60.0), None) is None:
                return fault, None, False
            began = time.monotonic()
            fault.inject(node, dice.randrange(1, GPUS), dice)
            for line in _lines(process, WATCHED_S if fault.takes_out else WATCHED_S / 4):
                if line["ends"]:
                    return fault, time.monotonic() - began, fault.takes_out
            return fault, None, not fault.takes_out
        finally:
            process.kill()


def _lines(process: subprocess.Popen[bytes], within_s: float) -> Iterator[dict[str, object]]:
    """Those that it prints until then, each as it comes."""
    assert process.stdout is not None
    ends, text = time.monotonic() + within_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := ends - time.monotonic()) > 0:
            if selector.select(left_s):
                more = os.read(process.stdout.fileno(), 65_536)
                *lines, text = (text + more).split(b"\n")
                yield from map(json.loads, lines)
                if not more:
                    return


def watch_part(options: argparse.Namespace, folder: Path, library: Path) -> list[str]:
    """The lines of the report on the watch beside a run."""
    with ThreadPoolExecutor(WATCHES) as pool:
        found = list(pool.map(
            lambda number: watched(number, folder, library, options.answer_s), range(options.watched)
        ))  # fmt: skip
    hangs = [s for fault, s, _ in found if s is not None and "hang" in fault.name]
    times = sorted(s for fault, s, _ in found if s is not None and "hang" not in fault.name)
    right, grave = sum(each[2] for each in found), sum(each[0].takes_out for each in found)
    wrong = sorted({fault.name for fault, _, is_right in found if not is_right})
    return [
        f"Beside a run, told by the watch that its agent starts ({options.watched} faults, {WATCHES} watches at once; "
        f"{grave} of them must end the attempt on that node, the others must not): {right} right"
        f"{''.join(f'; wrong: {name}' for name in wrong)}. From the fault to its line: median "
        f"{statistics.median(times):.1f} s, the slowest {times[-1]:.1f} s; where the driver hangs, with `gpu.answer_s: "
        f"{options.answer_s:g}`, {max(hangs):.1f} s.", "",
    ]  # fmt: skip


PROCESSES = 4
"""Drivers that hang are waited for."""

WATCHES = 8


def _life(task: tuple[int, int, bool]) -> Counter[str]:
    return healthy(task[0], task[1], totals=task[2])


def _shard(task: tuple[range, int, Path]) -> dict[str, Injected]:
    return inject(*task)


def report(options: argparse.Namespace) -> str:
    os.environ["NVML_STAND_IN"] = ""
    lives, began = options.looks // options.life, time.monotonic()
    found, real = {fault.name: Injected() for fault in FAULTS}, Counter[str]()
    with tempfile.TemporaryDirectory() as folder, Pool(os.cpu_count()) as pool:
        simulating = pool.map_async(_life, [(seed, options.life, False) for seed in range(lives)], chunksize=1)
        by_totals = pool.map_async(_life, [(seed, options.life, True) for seed in range(lives // 10)], chunksize=1)
        library = gpu_faults.stand_in(Path(folder, "nvml"))
        shards = [
            (range(first, options.faults, PROCESSES), 1000 * options.seed + first, Path(folder, f"faults-{first}"))
            for first in range(PROCESSES)
        ]
        with Pool(PROCESSES + 1) as beside:
            healthy_looks = beside.apply_async(
                real_healthy, (options.real_looks, options.seed, Path(folder, "healthy"))
            )
            for shard in beside.imap_unordered(_shard, shards):
                for name, each in shard.items():
                    found[name].add(each)
            real += healthy_looks.get()
        simulated, totals = sum(simulating.get(), Counter[str]()), sum(by_totals.get(), Counter[str]())
        beside_runs = watch_part(options, Path(folder), library)
    took_s = time.monotonic() - began
    count, right = sum(each.count for each in found.values()), sum(each.right for each in found.values())
    slowest = max(each.slowest_hook_s for each in found.values())
    wrong = [f"- {name}: {words}" for name, each in found.items() for words in each.wrong]
    rows = [
        f"| {fault.name} | {fault.check} | {fault.status.name} | {each.count} | {each.right} | {each.seen_by_hook} "
        f"| {each.slowest_hook_s:.1f} s |"
        for fault in FAULTS
        for each in (found[fault.name],)
    ]
    return "\n".join([
        "# Faults of GPUs", "",
        f"`python bench/gpu_faults --faults {options.faults} --looks {options.looks} --real-looks {options.real_looks} "
        f"--watched {options.watched} --seed {options.seed}`, "
        f"slurmft {slurmft.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores. No GPU: the real "
        "probes and nvidia-ml-py on a stand-in for NVIDIA's library, five nodes with eight devices each.", "",
        "| | measured | asked | |", "|---|---|---|---|",
        f"| faults that led to what they must | {right} of {count} | all | {_hit(right == count)} |",
        f"| slowest look of a prolog at a fault | {slowest:.1f} s | 10 s | {_hit(slowest < 10)} |",
        f"| healthy looks that would drain a node, by judges and policy | {simulated['sick']} of "
        f"{lives * options.life:,} | 0 | {_hit(not simulated['sick'])} |",
        f"| the same through library and probes | {real['sick']} of {options.real_looks:,} | 0 "
        f"| {_hit(not real['sick'])} |", "",
        f"All of it took {took_s:.0f} s. Each simulated life is of "
        f"{options.life:,} looks, five minutes apart, with 8 devices: one uncorrected error a month and one NVLink "
        "recovery a day on each, boots, crashes of programs, wandering temperatures, late answers. Of the looks "
        f"{simulated['OK']:,} were OK, {simulated['WARNING']:,} warnings, {simulated['CRITICAL']:,} critical, "
        f"{simulated['UNKNOWN']:,} unknown. Judged by totals instead of growth, {totals['sick']:,} of "
        f"{lives // 10 * options.life:,} would drain: what the windows are for is shown by the tests of health. The "
        "noise is an assumption: software throttling is seen in 0.05 % of the looks at a device; with a quarter of the "
        "busy ones, 16,299 of 20,000 looks were warnings, and none drained.", "",
        *(["What went wrong:", "", *wrong, ""] if wrong else []),
        "A fault is right where two looks of HealthCheckProgram see it as they must and the sweep that follows drains "
        "its node, or none. Of a driver that hangs a prolog knows nothing here: it waits only where "
        "`hooks.prolog_answer_s` says so.", "", *beside_runs,
        "| kind | check | must be | injected | right | seen by one prolog | its slowest look |",
        "|---|---|---|---|---|---|---|", *rows, "",
    ])  # fmt: skip


def _hit(is_hit: bool) -> str:
    return "hit" if is_hit else "missed"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--looks", type=int, default=1_000_000, help="simulated")
    parser.add_argument("--life", type=int, default=10_000, help="looks of one node")
    parser.add_argument("--real-looks", type=int, default=500)
    parser.add_argument("--watched", type=int, default=470, help="faults beside a run, for an agent's watch")
    parser.add_argument("--answer-s", type=float, default=6.0, help="gpu.answer_s of those (the default is 30)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = report(options)
    if options.output:
        options.output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
