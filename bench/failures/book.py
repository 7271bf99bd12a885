"""The page of the book and its figures, from what was seen; nothing is measured here."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import figure
from chapters import CHAPTERS, Chapter
from saves_plan import EVERY, KILL_AT, STATE_MIB, STEP_S, STEPS, STEPS_OF_EPOCH

SEEN = Path(__file__).resolve().parents[1] / "results" / "failures.json"
FIGURES = Path("images") / "failures"
KEPT_LINES = 26
PHASES = ("detection", "evidence", "shutdown", "queue", "launch", "restart", "import", "setup", "load", "redone")


def write(docs: Path) -> None:
    """Write the page and its figures below ``docs``."""
    for path, text in pages().items():
        (docs / path).parent.mkdir(parents=True, exist_ok=True)
        (docs / path).write_text(text, encoding="utf-8")


GPUS = (
    "## GPUs", "",
    "No GPU has failed under slurmft yet. 47 kinds of faults were injected into a stand-in for NVIDIA's library, which "
    "the real probes ask by nvidia-ml-py: devices that are lost, a driver that hangs, counters, links, Xids. Which of "
    "them take a node out, how fast, and what was never run on a device: [GPUs](gpu.md#health).", "",
)  # fmt: skip
"""What is shown elsewhere."""


def pages() -> dict[Path, str]:
    """Each file of the book, by its path below docs/."""
    seen = json.loads(SEEN.read_text(encoding="utf-8"))
    found = {FIGURES / f"{name}.svg": figure.timeline(chapter.title, seen[name])
             for name, chapter in _seen_chapters(seen)}  # fmt: skip
    lines = [*_head(seen), *_chapters(seen), *GPUS]
    if "saves" in seen:
        title = "One run with a kill: where the time went after the first step"
        found[FIGURES / "saves.svg"] = figure.bars(title, _stacks(seen["saves"]), "s")
        lines += _saves(seen["saves"])
    return {**found, Path("failures.md"): "\n".join(_wrapped(lines))}


def _seen_chapters(seen: Mapping[str, Any]) -> list[tuple[str, Chapter]]:
    return [(name, chapter) for name, chapter in CHAPTERS.items() if name in seen]


def _head(seen: Mapping[str, Any]) -> list[str]:
    of = seen["of"]
    lines = [
        "# The book of failures", "",
        "Each failure was injected into a training on a real Slurm cluster of five small nodes on one machine "
        f"(Slurm {of['slurm']}, {of['cores']} cores that all nodes share, slurmft {of['version']}, {of['date']}). All "
        "times come from the journals of the runs, as `slurmft report` reads them; `make failures` measures them again "
        f"and writes this page. All nodes share the machine, whose load reached {of['load']}: starting Python and "
        "importing torch on its cores is most of each recovery through the queue, and much shorter on real nodes. "
        "The limits of Slurm and slurmft that decide how fast a lost node is noticed are the lab's, shorter "
        "than a site would choose.", "",
        "*Noticed*: from the injection to the first event that shows it. *Goes on*: from the injection to the first "
        "step of the next attempt. *Steps lost*: steps that had been done and were done again. "
        "*Cost*: the report's sum of all time that was no new work, until the run was as far as before.", "",
        "| failure | noticed | goes on | steps lost | cost | judged as |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, chapter in _seen_chapters(seen):
        facts = seen[name]
        for number, fault in enumerate(facts["faults"]):
            title = chapter.title if len(facts["faults"]) == 1 else f"{chapter.title.split(':')[0]}: {fault['label']}"
            lines.append(f"| [{title}](#{_anchor(chapter.title)}) | {_seconds(fault['noticed_s'])} | "
                         f"{_seconds(fault['over_s'])} | {fault['lost']} | {_cost(facts, number)} | "
                         f"{fault['cause'] or 'no end of the attempt'} |")  # fmt: skip
    return [*lines, ""]


def _chapters(seen: Mapping[str, Any]) -> list[str]:
    lines = list[str]()
    for name, chapter in _seen_chapters(seen):
        facts = seen[name]
        lines += [f"## {chapter.title}", "", chapter.text, "",
                  f"![Steps over time, and where the time went]({(FIGURES / name).as_posix()}.svg)", ""]  # fmt: skip
        for number, fault in enumerate(facts["faults"]):
            where = _where(facts, number)
            what = "goes on" if fault["over_by"] == "first step" else f"`{fault['over_by']}`"
            lines += [f"- {fault['label']}: noticed after {_seconds(fault['noticed_s'])} (`{fault['noticed_by']}`), "
                      f"{what} after {_seconds(fault['over_s'])}, {_steps(fault['lost'])} lost{where}."]  # fmt: skip
        lines += ["", "What `slurmft status` shows right after the failure was noticed:", "",
                  *_block(facts["seen"]["status at once"].splitlines()), "",
                  "What `slurmft explain` tells of it afterwards:", "",
                  *_block(_from_fault_on(facts["seen"]["explain"], facts["faults"][0]["noticed_by"])), ""]  # fmt: skip
    return lines


def _saves(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "## How often to save", "",
        f"The same training of {STEPS} steps ({STEPS // STEPS_OF_EPOCH} epochs of {STEPS_OF_EPOCH} steps of "
        f"{STEP_S} s, 2 ranks, {STATE_MIB} MiB of state) with a checkpoint every epoch, every 5 and every 10, and with "
        f"`kill -9` of a rank soon after step {KILL_AT}; on one machine without Slurm, once each. `just_in_time` was "
        "off: with it, the ranks that live on keep the newest step, and the interval matters only where a node is "
        "lost.", "",
        "![Where the time went for each interval](images/failures/saves.svg)", "",
        "| a save every | training time | saves | they stop the training for | overhead | steps lost | done again in | "
        "recovery |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        end = _ends(row)[0]
        work = row["training_s"] + row["stalled_s"]
        lines.append(
            f"| {row['every']} epoch{'s' * (row['every'] > 1)} | {work:.1f} s | {row['saves']} | "
            f"{row['stalled_s']:.2f} s | {100 * row['stalled_s'] / work:.1f} % | {row['faults'][0]['lost']} | "
            f"{end['seconds'].get('redone', 0.0):.1f} s | {end['cost_s']:.1f} s |"
        )
    return [
        *lines, "",
        "*Training time* is of the steps and the saves between them, without starts and without what was done again. "
        "*Recovery* is the report's cost of the kill: detection, restart, load, and the steps that are done again. "
        "`slurmft advise` weighs the two against each other with a run's own figures: "
        "[Save and load checkpoints](how-to/checkpoints.md).", "",
    ]  # fmt: skip


def _stacks(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, float]]]]:
    found = []
    for row in rows:
        seconds = _ends(row)[0]["seconds"]
        values = {"training": row["training_s"], "saves": row["stalled_s"]}
        values |= {phase: seconds.get(phase, 0.0) for phase in PHASES}
        label = f"every {row['every']} epochs" if row["every"] > 1 else "every epoch"
        found.append((label, [(name, value) for name, value in values.items() if value > 0.05]))
    assert [row["every"] for row in rows] == list(EVERY)
    return found


def _anchor(title: str) -> str:
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def _ends(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [end for end in facts["ends"] if end["cause"] not in ("first start", "finished")]


def _cost(facts: Mapping[str, Any], number: int) -> str:
    ends = _ends(facts)
    return _seconds(ends[number]["cost_s"]) if number < len(ends) else "-"


def _where(facts: Mapping[str, Any], number: int) -> str:
    ends = _ends(facts)
    if number >= len(ends):
        return ""
    parts = [
        f"{name} {ends[number]['seconds'][name]:.1f}" for name in PHASES if ends[number]["seconds"].get(name, 0) >= 0.1
    ]
    return f"; of the seconds: {', '.join(parts)}" if parts else ""


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _steps(number: int) -> str:
    return "no step" if not number else f"{number} step{'s' * (number > 1)}"


def _from_fault_on(text: str, noticed_by: str) -> list[str]:
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines) if noticed_by in line), 0)
    kept = lines[begin : begin + KEPT_LINES]
    return [*["..."] * (begin > 0), *kept, *["..."] * (begin + len(kept) < len(lines))]


def _wrapped(lines: Sequence[str]) -> Iterator[str]:
    """Prose in lines of the width of the other pages; tables and blocks as they are."""
    is_block = False
    for line in lines:
        is_block ^= line.startswith("```")
        if is_block or line.startswith(("|", "!", "#", "```")):
            yield line
        else:
            indent = "  " * line.startswith("- ")
            yield textwrap.fill(line, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _block(lines: Sequence[str]) -> list[str]:
    return ["```text", *lines, "```"]
