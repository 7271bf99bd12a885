"""Small files of state that no verb needs on its way, and all readers of such files in one call."""

import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from fuzz_mutations import mutate_state
from fuzz_world import LOST, World
from reported_evidence import read_evidence

from slurmft.cli.status import Watcher, heat, slowest
from slurmft.errors import SlurmftError
from slurmft.inference.endpoint import HighAvailabilityCluster, read_handover, read_update
from slurmft.operations import control
from slurmft.operations.rescue import is_unfinished, rescues_without_progress
from slurmft.policy.suspicion import Rules, standing
from slurmft.policy.verdict import Evidence, Kind, Suspect
from slurmft.reporting.metrics import families, looks_at
from slurmft.reporting.report import Fleet, page_of, report_of
from slurmft.storage import checkpoint_names, history, run_folder, verdicts
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.storage.verdicts import WorkerVerdict, add_evidence, read_verdict, write_verdict
from slurmft.system.exposition import text

WORKLOAD = "w"
LIMIT_S = 20
"""Readers that take longer hang: SIGALRM ends the process."""


def leave_state(folder: Path) -> None:
    """One of each kind, with values."""
    run_folder.write(folder, run_folder.LiveView(at=1.7e9, attempt="7.0.0", steps=(4, 4), step_s=(0.1, None),
                    nodes=("n1", "n2"), sections=("step", ""), section_s=(0.1, 0.2), heartbeat_s=1.0, hang_used=0.5,
                    restarts_left=3, save_interval_steps=2, tiers={"disk": "step 4"}))  # fmt: skip
    best = history.Best(role="r", seconds=(0.1, 0.2, 0.3))
    node = history.NodeHistory(best={0: best}, outcomes=[(1.7e9, True)])
    conviction = history.Conviction(nodes=("n1",), ranks=(0,), at=1.7e9)
    history.write_stragglers(folder, WORKLOAD, history.History(nodes={"n1": node}, convictions=[conviction]))
    history.write(folder, WORKLOAD, "7.0.0", history.Timings(longest_step_s=1.0, saves_s=(1.0, 2.0), costs_s=(0.1,)))
    history.write_ft_state(folder, WORKLOAD, {"step": [0.1, 0.2]})
    checkpoint_names.note_verified(folder / "checkpoints", 4, 1)
    checkpoint_names.note_doubt(
        folder / "checkpoints", checkpoint_names.Doubt(generation=1, after_step=9, reason="differs")
    )
    attempt = next(path for path in sorted((folder / "attempts").iterdir()) if path.is_dir())
    verdicts.note_batches(attempt, [8], 2)
    verdicts.note_resuming(attempt, "step-00000004.g0.c2", source="disk")
    suspect = Suspect(node="n1", gpu="GPU-1", rank=0)
    write_verdict(folder / "verdicts" / "7.0.0.rank-0.json", WorkerVerdict(cause="unknown", suspects=(suspect,)))
    evidence = Evidence(kind=Kind.STRAGGLER, suspect=suspect, message="slow", at=1.7e9, step=4)
    add_evidence(folder / "verdicts" / "7.0.0.rank-0.jsonl", evidence)


def odd_state(seed: int, world: World) -> list[str]:
    """One input: other values in files of state, all of which are read, and then are as before; what is wrong."""
    chance, run = random.Random(seed), world.runs / LOST
    paths = [path for path in sorted(run.rglob("*.json*")) if path.parent.parent.name != "checkpoints"]
    chosen = [
        *chance.choices(paths, k=chance.choice([1, 1, 2, 4])),
        *[world.folder / "excluded.json"] * (seed % 8 == 0),
    ]
    before = {path: path.read_bytes() for path in chosen}
    done = [mutate_state(path, chance) for path in chosen]
    sys.set_int_max_str_digits(4300)  # as every reader has it
    signal.alarm(LIMIT_S)
    try:
        problems = list(read_state(run, world.folder / "excluded.json"))
    finally:
        signal.alarm(0)
        sys.set_int_max_str_digits(0)
        for path, content in before.items():
            path.write_bytes(content)
    return [f"seed {seed}: {problem}\n{done}" for problem in problems]


def read_state(folder: Path, exclusion_list: Path) -> Iterator[str]:
    """Call every reader; errors of ours, and of files, are answers. Gives what else was raised."""
    run, now_s = RunFolder(folder), time.time()
    readers: list[Callable[[], object]] = [
        lambda: [entry.as_json() for entry in control.overviews([run])], lambda: Watcher([run], run).look(),
        lambda: text(families(looks_at([run])[0])), lambda: control.account_of(control.story(run).events),
        lambda: Fleet(reports=[report_of(run, now_s=now_s)]).as_json(),
        lambda: page_of([report_of(run, now_s=now_s)], [], now_s=now_s, is_fleet=False),
        run.owner, run.done, run.jobs, run.own_jobs, run.copied_from, run.journal().read_past,
        run.ending(Attempt(job="7", restart=0)).outcome, lambda: is_unfinished(run.journal().read(), "7"),
        lambda: rescues_without_progress(run.journal().read()),
        lambda: heat(run_folder.read(folder)), lambda: slowest(run_folder.read(folder), 3),
        lambda: history.read_stragglers(folder, WORKLOAD), lambda: history.read_ft_state(folder, WORKLOAD),
        lambda: history.earlier(folder, WORKLOAD), lambda: checkpoint_names.read_digests(folder / "checkpoints"),
        lambda: read_handover(folder), lambda: read_update(run), lambda: HighAvailabilityCluster.read(folder),
        lambda: (owner := run.owner()) and run_folder.is_fresh(run, owner),
        lambda: standing(ExclusionList(exclusion_list).read().observations, (), now_s, Rules()),
        *(lambda path=path: read_verdict(path) for path in sorted((folder / "verdicts").glob("*.json"))),
        *(lambda path=path: read_evidence(path) for path in sorted((folder / "verdicts").glob("*.jsonl"))),
        *(lambda path=path, read=read: read(path) for path in sorted((folder / "attempts").iterdir())
          for read in (verdicts.noted_batches, verdicts.noted_resuming, verdicts.noted_source)),
    ]  # fmt: skip
    for number, read in enumerate(readers):
        try:
            read()
        except (SlurmftError, OSError):
            continue
        except Exception:  # noqa: BLE001 - that is what is looked for
            yield f"reader {number}: {traceback.format_exc(limit=-4)}"
