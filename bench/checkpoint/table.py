"""What was measured as tables in Markdown, and what was asked beside what was found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from beside_loads import COPY as COPIED
from beside_loads import RAW_READ, VERIFIED_COPY
from methods import AS_IT_COMES, RAW, RAW_HASHED, SLURMFT, WAITING
from trials import IN_MEMORY, ON_DISK, Result

COPY = "copy into warm shared memory"
FLAT = 1.25
WRITES = ("write, O_DIRECT", "write, buffered")
BESIDE = {RAW: "raw write, as polite", RAW_HASHED: "raw write and hash, as polite"}
Floors = Mapping[str, Sequence[float]]


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return "-"
    return f"{middle(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def verdict(hit: bool) -> str:
    return "met" if hit else "**missed**"


def later(result: Result, what: str) -> list[float]:
    """Of all saves but the first, which may set things up."""
    return [each[what] for each in result.rounds[1:]]


def slow_down(result: Result) -> float | None:
    """Median step while a save was on its way, over the median of the others; None when none was."""
    within = [seconds for each in result.rounds[1:] for seconds in each["within"]]
    return middle(within) / middle(result.normal) if within else None


def floor_rows(floors: Floors, size_bytes: int) -> list[str]:
    lines = ["| floor | seconds | GB/s |", "|---|---|---|"]
    for name, seconds in floors.items():
        lines.append(f"| {name} | {spread(seconds, 3)} | {size_bytes / 1e9 / middle(seconds):.1f} |")
    return [*lines, ""]


def save_rows(results: Sequence[Result]) -> list[str]:
    lines = [
        "| method | first save stalls | second | later saves stall | durable after | step while it writes, x normal "
        "| training lost per save | memory beside the state, x state | torn values | saves |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        slow = slow_down(each)
        torn = f"**{each.wrong} of {each.compared} tensors**" if each.wrong else "none"
        first, second = (f"{each.rounds[number]['stall']:.2f}" for number in (0, 1))
        lines.append(
            f"| {each.name} | {first} | {second} | {spread(later(each, 'stall'), 3)} "
            f"| {spread(later(each, 'durable'))} | {'-' if slow is None else f'{slow:.2f}'} "
            f"| {spread(each.lost[1:])} | {each.extra_bytes / each.bytes:.2f} | {torn} | {len(each.rounds)} |"
        )
    return [*lines, ""]


def load_rows(results: Sequence[Result]) -> list[str]:
    columns = [*ON_DISK, *IN_MEMORY]
    lines = [f"| load | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for result in results:
        for floor in (RAW_READ, COPIED, VERIFIED_COPY):
            bare = [spread(result.loads.get(f"{floor}: {each}", ()), 3 if each in IN_MEMORY else 2) for each in columns]
            if set(bare) != {"-"}:
                lines.append(f"| floor beside {result.name}: {floor} | {' | '.join(bare)} |")
        if len(result.loads) > 1:
            seconds = [spread(result.loads.get(each, ()), 3 if each in IN_MEMORY else 2) for each in columns]
            lines.append(f"| {result.name} | {' | '.join(seconds)} |")
    return [*lines, ""]


def target_rows(results: Sequence[Result], floors: Floors) -> list[str]:
    """The targets of the asynchronous save."""
    by_name = {each.name: each for each in results}
    ours = by_name.get(SLURMFT)
    if ours is None:
        return []
    copy, write = middle(floors[COPY]), min(middle(floors[each]) for each in WRITES)
    second = ours.rounds[1]["stall"]
    stall, durable = middle(later(ours, "stall")), middle(later(ours, "durable"))
    rows = [
        (f"stall from the second save on, x that of the {what}", "<= 1.3", stall / bare, stall <= 1.3 * bare)
        for name, what in BESIDE.items()
        if name in by_name and (bare := middle(later(by_name[name], "stall")))
    ]
    rows += [
        ("stall from the second save on, x copy floor", "<= 1.3", stall / copy, stall <= 1.3 * copy),
        ("stall of the second save alone, x copy floor", "<= 1.3", second / copy, second <= 1.3 * copy),
        ("durable, x raw write with fsync", "<= 1.25", durable / write, durable <= 1.25 * write),
    ]
    if WAITING in by_name:
        alone = middle(later(by_name[WAITING], "durable")) / write
        rows.append(("durable when the loop waits for it, x raw write with fsync", "<= 1.25", alone, alone <= 1.25))
    for name, what in BESIDE.items():
        if name in by_name:
            beside = durable / middle(later(by_name[name], "durable"))
            rows.append((f"durable, x {what} beside the same training", "<= 1.25", beside, beside <= 1.25))
    if AS_IT_COMES in by_name:
        ratio = middle(later(by_name[AS_IT_COMES], "stall")) / stall
        rows.append(("stall of DCP's async_save as it comes, x ours", ">= 3", ratio, ratio >= 3))
    best = [middle(later(each, "stall")) for name, each in by_name.items() if name.startswith("DCP async_save")]
    if best:
        rows.append(("stall of DCP's best configuration, x ours", "> 1", min(best) / stall, min(best) > stall))
    slow = slow_down(ours)
    if slow is not None:
        rows.append(("training step while it writes, x normal", "<= 1.05", slow, slow <= 1.05))
        for name, what in BESIDE.items():
            if name in by_name and (bare := slow_down(by_name[name])) is not None:
                rows.append((f"the same, x that beside the {what}", "<= 1.05", slow / bare, slow <= 1.05 * bare))
    rows += _load_targets(ours)
    extra = ours.extra_bytes / ours.bytes
    rows.append(("memory beside the state, x state", "<= 2", extra, extra <= 2))
    rows.append(("torn values", "0", ours.wrong, not ours.wrong))
    lines = ["| asked | target | measured | |", "|---|---|---|---|"]
    return [*lines, *(f"| {what} | {asked} | {found:.2f} | {verdict(hit)} |" for what, asked, found, hit in rows), ""]


def _load_targets(ours: Result) -> list[tuple[str, str, float, bool]]:
    """Each beside what the machine can do, measured before each load."""
    rows, loads = [], ours.loads
    for name in ON_DISK:
        if name in loads:
            rate = middle(loads[f"{RAW_READ}: {name}"]) / middle(loads[name])
            rows.append((f"load from disk ({name}), x rate of the raw read", ">= 0.8", rate, rate >= 0.8))
    for name in IN_MEMORY:
        if name in loads:
            times = middle(loads[name]) / middle(loads[f"{COPIED}: {name}"])
            rows.append((f"load from memory ({name.split(', ')[1]}), x copy floor", "<= 1.5", times, times <= 1.5))
    if (floor := f"{VERIFIED_COPY}: {IN_MEMORY[1]}") in loads:
        times = middle(loads[IN_MEMORY[1]]) / middle(loads[floor])
        rows.append(("the same (in place), x map anew, hash, then copy", "<= 1.25", times, times <= 1.25))
    return rows


def many_rows(found: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]) -> list[str]:
    lines = [
        "| earlier checkpoints in the directory | method | the call, ms | durable after, ms |",
        "|---|---|---|---|",
    ]
    for name, by_count in found.items():
        for earlier, seconds in by_count.items():
            stalls, durables = ([1000 * each[which] for each in seconds] for which in (0, 1))
            lines.append(f"| {earlier} | {name} | {spread(stalls, 1)} | {spread(durables, 1)} |")
    for name, by_count in found.items():
        first, last = (middle([each[1] for each in by_count[count]]) for count in (min(by_count), max(by_count)))
        flat = verdict(last <= FLAT * first)
        said = f"{name}: with {max(by_count)} earlier ones x with {min(by_count)}: {last / first:.2f} (<= {FLAT})"
        lines += ["", f"{said}, {flat}."]
    return [*lines, ""]
