"""The page of one kind of storm: its totals, its faults by kind, its waits, its runs. Lines in, Markdown out."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

WHAT = {
    "training": "Each run trains on 2 nodes x 2 ranks, its folder on a disk that can be filled; its seed draws spares, "
    "rehearsal, launcher, kind of interval, asynchronous saves, just in time, peer copies and their interval, digests, "
    "preload and learned limits; faults come at random moments, also while it recovers from the one before.",
    "inference": "Each run answers 3,000 requests on 3 nodes x 2 replicas, its folder on a disk that can be filled; "
    "faults come at random moments, also while it recovers from the one before.",
    "behaviours": "Each run is an endpoint on 3 nodes x 2 replicas with 2 routers and a hang_timeout_s of 6 s, under "
    "the load of 110 clients: 75 try again, 25 ask once, 10 give up after 3 s and ask again. Engines are killed, "
    "stopped, fail every request, hang behind a healthy page, or grow until they are killed; requests take longer than "
    "a hang, or hold up their engine for 15 s; clients leave in the midst, or are gone without a packet; processes, "
    "nodes and their speed are lost as in the other storms. A death of a replica is one without cause where no fault "
    "in the minute before explains it: each of an engine explains one, on its node.",
    "serving": "Each run is an endpoint on 3 nodes x 2 replicas with 2 routers, under the load of 100 clients, 35 of "
    "which ask for streams; its engine is deterministic, and every answer is compared. 75 try "
    "again, with another router; 25 are plain and ask once. Faults come at random moments, also while it recovers from "
    "the one before.",
}

TITLES = {
    "training": "Random faults on the lab, with settings drawn by each seed",
    "inference": "Random faults on a batch of requests",
    "behaviours": "Random behaviours of engines and clients on an endpoint",
    "serving": "Random faults on an endpoint under constant load",
}

ROUTINE = frozenset({
    "attempt started", "agents ready", "workers started", "first step", "requests opened", "node answers",
    "replica ready", "decision", "evidence", "last look", "killing workers", "submitting", "submitted",
})  # fmt: skip

MERGES = (
    "257eabd, 06851c1, 578b072, b44f0c0 and 05a101b are merges for the soak alone: of the commits of the storm (to "
    "f8cb093, 8fb398e, 22df86b, 201b5ba, cb7b8ae) and of inference (to 2ee4be3). "
    "Where one came in the middle of a run, the later one is named."
)
FOUND: dict[str, list[str]] = {
    "behaviours": [
        "Deaths without cause, all in seeds 6000, 6005 and 6007: by their times, each fell while requests that "
        "stall were under way. The count takes six deaths in a minute for two such requests, and these cost more. "
        "In 6005, with six replicas, two that came together were refused (422) after 48 s and about nine deaths. "
        "In 6000 one node was left, and its two replicas died again and again until the deadline of two such "
        "requests, 100 s. By reading: a suspect is found by the engines that it was on and others were not, and "
        "two of them, on an engine each, cannot be told apart. `inference.max_retries`, 20 in this storm, "
        "ends it earlier.",
        "Mended since then: suspects are tried alone, one after the other, and two ends alone are proof. A short run, "
        "seed 7001 with 8 faults of four kinds (five times two requests that stall within 13 s, a killed and a hung "
        "engine, four long requests; 7 to 18 processes for two cores), is not counted above. At 0a4179ff: 57 deaths, "
        "25 without cause; 29 ordinary and two of four long requests were taken for poison, 1,484 of 1,892 ordinary "
        "ones were right. At c0e59ceb and 18fbcdba: 14 and 17 deaths, one and two without cause (requests that stall, "
        "alone, more than a minute after they came), none taken for poison but what stalls, 2,925 of 3,009 and 3,153 "
        "of 3,242 right. What is left: the ten that stall had no proof within their own 100 s, and ended with 504 in "
        "place of 422, as about a hundred suspects waited for their turn; the longest wait of an ordinary one that "
        "tries again was 164 and 188 s, 119 s before.",
        "Mended again: the likeliest quarter of what was on an engine waits to be tried alone, and what stalls engines "
        "has half of the time of that line. Seeds 9000 to 9006, f9159e51 and before it, with 4 to 13 processes for two "
        "cores (`bench/random_faults --storms behaviours --faults 320 --seeds 9000-9007`, ended after 280): all 26,467 "
        "requests that try again right, the longest 96 s; no ordinary one taken for poison, 27 before; two deaths "
        "without cause, 29 before, and three requests that stall had no word in their 110 s. All five are traced by "
        "the access logs, and were ours in the counting: the deaths of seed 9003 are one stalling request, tried alone "
        "64 and 73 s after it came, refused (422) then; a stalling request explained deaths for 60 s, and has 100 s. "
        "The requests of 9002 were with a router whose node lost its power 8 s later; faults were looked for in the "
        "last 35 s alone. Counted so now, 9002 to 9004 again (120 faults, 4 to 20 "
        "processes for two cores): 0 deaths without cause, 10,888 of 10,889 requests that try again right, the longest "
        "66 s; one ordinary one was refused as poison.",
        "Ten requests that stall at once, 40 clients with 15 s each, two routers, real drivers and engines that hang "
        "3 s until they are killed, at 13 processes for two cores: with three replicas 71 of 1,653 ordinary requests "
        "ended with 504 before, 37 of 1,754 now; with two 96 of 368 and 64 of 326. Most were there when the ten came. "
        "While one replica is left, suspects have it alone, and the others wait.",
        "A 422 for an ordinary request: it was on one engine after the other that the storm took or that stalled, "
        "and was the only one of those left. An engine dies every nine seconds in these runs.",
        "No word in time: of plain clients within 30 s, of long and stalling requests within 110 s, where no router, "
        "agent, node or supervisor was lost or stopped from 35 s before it began to 5 s after.",
        "Not counted: seeds 6000 to 6003 of the storm's first version (160 faults, 89 deaths, none without cause), "
        "in which plain clients went on with the token of a job that had started again, and a 422 counted as "
        "neither answered nor refused.",
    ],
    "training": [
        "Seed 1015: the writer of a rank was killed in the save after the last step; all ranks ended with an error, "
        "and the run needed a restart to finish. Mended in 201b5ba: the next writer goes on with the save.",
        "Seed 1017: nothing had struck; the first start took 63 s, at 16 processes for two cores. The limit of 50 s "
        "for a start was replaced by 25 s, in proportion more where more than two processes for each core want to run.",
        "Not counted: runs that were interrupted to change the storm, and two of seed 1000 that its first, fixed limit "
        "had failed for starts of 40 and 47 s. Earlier code met 319 faults of 14 kinds in 17 runs: weights always the "
        "same.",
        MERGES,
    ],
    "inference": [
        "Seed 1004: 14 requests were given up, because their engine had just been killed, or ended by Slurm, and "
        "took no connection in any of their tries. Mended in 2ee4be3: they wait for its end, and go elsewhere.",
        "Not counted: runs that were interrupted to change the storm.",
        MERGES,
    ],
    "serving": [
        "Seed 3000: three streams of our client ended with an error of the second router, behind the loss of the "
        "first. A rest that itself loses its replica was not continued by a router, and the client took that error for "
        "the end. Mended in a1a22f4: the client goes on where its router gives up.",
        "Seed 3003: four waits of the whole run, 47 to 122 s with the job running, behind the loss of a supervisor, an "
        "agent or srun. About 20 processes for each core wanted to run, which the limit of that wait does not count; "
        "it was not repeated on a calm machine. All requests of our client were answered.",
        "Seeds 3006 to 3008: eight waits of the whole run, 49 to 108 s with the job running, behind the loss of a "
        "supervisor, of srun or of the batch host, with 13 to 20 processes for each core that wanted to run: the "
        "journals of two show starts of agents that take 10 to 20 s each, and in 3006 Slurm created no step for 85 s "
        "(\"step creation temporarily disabled, Requested nodes are busy\") after a node had lost its power. "
        "Not repeated on a calm machine. All requests of our client were answered, and right.",
        "What was ours in these waits, found by reading: the supervisor took agents in one after the other, each "
        "within as much as 40 s, and sent no signs of life meanwhile, so that the others lost their leases. Mended "
        "after these runs, and not yet followed by as many. Besides, an endpoint whose replicas load counted as "
        "running and not as starting, without the allowance for load. Not mended: Slurm creates no step for all "
        "nodes of a job while one of them is dead and not yet DOWN; the step is waited for, as far as "
        "`launch_timeout_s`, instead of steps of one node each on those that live.",
        "Seed 3003 once more with that mended, cut to its first 12 faults (the supervisor, srun, two nodes, an "
        "agent among them), on a busy machine: no failure, no wait that nothing explains, all 1,021 requests of our "
        "client right, the longest 65 s. It is not in the tables. It showed agents that counted as lost every 3 s "
        "once a driver had been killed: the task that sends their signs of life had ended with an error. Mended, "
        "with a test; that fault came after the runs of the tables.",
        "Not counted: two seeds of the storm's first versions. Before streams were continued, one of them had 80 error "
        "events and 232 broken streams of our client. Seed 3004 struck nothing: its endpoint was not ready in time, at "
        "40 processes that wanted to run.",
    ],
}  # fmt: skip
"""What failed, and since when it does not."""


def page(name: str, lines: Sequence[dict[str, Any]]) -> str:
    """The whole page."""
    commits = Counter(line["commit"] for line in lines)
    slurm = ", ".join(sorted({line["slurm"] for line in lines}))
    title = TITLES[name]
    options = f" FAULTS_OPTIONS='--storms {name}'" if name == "behaviours" else ""
    return "\n".join([
        f"# {title}", "",
        f"`make soak-faults{options}`, {slurm}, {os.cpu_count()} cores that other work used as well. {WHAT[name]} "
        f"Commits (runs): {', '.join(f'{commit} ({count})' for commit, count in commits.items())}.", "",
        *totals(name, lines), "", *(clients(lines) if name in ("serving", "behaviours") else ()),
        "## What it found, and what is not counted", "", *(f"- {text}" for text in FOUND[name]), "",
        *kinds(lines), "", *waits(lines), "", *runs(lines), "",
    ])  # fmt: skip


def totals(name: str, lines: Sequence[dict[str, Any]]) -> list[str]:
    """What must hold, counted."""
    failures = [failure for line in lines for failure in line["failures"]]

    def count(text: str) -> int:
        return sum(failure.startswith(text) for failure in failures)

    rows = [("faults", sum(line["faults"] for line in lines)), ("runs", len(lines))]
    if name == "training":
        rows += [
            ("runs whose final weights are those of an undisturbed run", sum(line["same_weights"] for line in lines)),
            ("committed checkpoints lost", count("a committed checkpoint")),
            ("files found damaged, and not used", sum(line["damaged"] for line in lines)),
        ]
    elif name in ("serving", "behaviours"):
        if name == "behaviours":
            rows += [
                ("replicas that were killed without cause", count("a replica was killed without cause")),
                ("runs with a request that had no word in time", count("no word in time")),
                ("ordinary requests that were taken for poison (422)", sum(line["poison"] for line in lines)),
            ]
        rows += [
            ("replicas that died, routers that ended, nodes that were lost",
             ", ".join(str(sum(line[key] for line in lines)) for key in ("deaths", "routers", "nodes_lost"))),
            ("runs with a request that was neither answered nor refused", count("neither answered")),
            ("runs with an error of a client that tries again",
             count("an error of a patient client") + count("an error of our client")),
        ]  # fmt: skip
    else:
        rows += [
            ("requests", sum(line["requests"] for line in lines)),
            ("runs with a request missing, twice or with another answer", count("not exactly once")),
            ("answers computed more than once", sum(line["repeated"] for line in lines)),
        ]
    rows += [("errors of our own in a log", count("an error of ours")),
             ("waits that nothing explains", count("nothing explains")),
             ("runs that failed, for whatever reason", sum(bool(line["failures"]) for line in lines))]  # fmt: skip
    return ["| | |", "|---|---|", *(f"| {what} | {number} |" for what, number in rows)]


def clients(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What became of the requests, by kind of client."""
    table = [
        "Requests, as their clients saw them. Properly refused: a status with a reason, an error event in a stream, or "
        "a connection that was refused or broke. Plain clients ask a router that is named, once, also while there is "
        "none.",
        "",
        "| client | requests | right | properly refused | neither | longest, s |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kind in dict.fromkeys(kind for line in lines for kind in line["clients"]):
        all_ = [line["clients"][kind] for line in lines if kind in line["clients"]]
        refused, wrong = (sum(sum(each[what].values()) for each in all_) for what in ("refused", "wrong"))
        asked, right = (sum(each[what] for each in all_) for what in ("asked", "right"))
        longest = max((each["longest_s"] for each in all_), default=0.0)
        table.append(f"| {kind} | {asked} | {right} | {refused} | {wrong} | {longest:.1f} |")
    return [*table, ""]


def kinds(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Each kind of fault: how often, how long until the next new step, and what the journal said."""
    struck = [one for line in lines for one in line["struck"]]
    table = ["## By kind", "",
             "Seconds from the fault to the next new step (answer), with what other faults cost meanwhile; what "
             "the journal said in more than half of the cases, less what every restart says.", "",
             "| fault | times | seconds: median | 90 % | longest | journal |", "|---|---|---|---|---|---|"]  # fmt: skip
    for kind, number in Counter(one["kind"] for one in struck).most_common():
        ones = [one for one in struck if one["kind"] == kind]
        seconds = sorted(one["seconds"] for one in ones if one["seconds"] is not None)
        events = Counter(event for one in ones for event in one["journal"])
        usual = [event for event, times in events.items() if times * 2 > number and event not in ROUTINE]
        three = [statistics.median(seconds), seconds[math.ceil(0.9 * len(seconds)) - 1], seconds[-1]] if seconds else []
        shown = " | ".join(f"{value:.1f}" for value in three) or "| |"
        table.append(f"| {kind} | {number} | {shown} | {', '.join(usual) or '-'} |")
    return table


def waits(lines: Iterable[dict[str, Any]]) -> list[str]:
    """What runs waited for, where no step came for more than three seconds."""
    seconds: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for gap in (gap for line in lines for gap in line["gaps"]):
        for label, amount in gap["waits"].items():
            seconds[label] += amount
            times[label] += 1
    table = ["## Waits of more than three seconds", "", "What the job was seen to wait for, asked once a second.", "",
             "| state of the job, or fault in force | seconds | times |", "|---|---|---|"]  # fmt: skip
    return [*table, *(f"| {label} | {amount:.0f} | {times[label]} |" for label, amount in seconds.most_common())]


def runs(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Each run."""
    table = [
        "## Runs",
        "",
        "| seed | commit | faults | seconds | failed | ends of attempts |",
        "|---|---|---|---|---|---|",
    ]
    for line in sorted(lines, key=lambda line: line["seed"]):
        failed = "; ".join(failure.splitlines()[0][:120] for failure in line["failures"]) or "no"
        causes = ", ".join(f"{count} {cause}" for cause, count in line["causes"].items())
        table.append(
            f"| {line['seed']} | {line['commit']} | {line['faults']} | {line['seconds']} | {failed} | {causes} |"
        )
    return table
