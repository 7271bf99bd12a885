"""Which nodes a placement avoids: by the exclusion list, Slurm's node states, and what the request can spare."""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmft.config.run import RunConfig, components_of, partitions_of
from slurmft.errors import SlurmError, StorageError
from slurmft.policy.suspicion import (
    Candidate,
    Dropped,
    PartitionNodes,
    Rules,
    State,
    Strength,
    choose_exclusions,
    standing,
)
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing import asked_for
from slurmft.scheduler.slurm import NodeRecord
from slurmft.storage.exclusions import ExclusionList, Exclusions
from slurmft.storage.patience import FolderThread
from slurmft.storage.run_folder import state_folder

CLUSTER_VARIABLE = "SLURM_CLUSTER_NAME"
OFF_SLURM = "local"
"""Name of the cluster where there is none."""

_TOO_MANY = "node configuration is not available"
"""Messages of sbatch when excluded nodes may be the reason for a refusal."""

LIST_S = 5.0
"""How long the list's filesystem may delay a submission."""

_TOLD = 100
"""Nodes whose reasons are in the journal."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Avoidance:
    """Nodes that are avoided, nodes that should be but are not, and why."""

    nodes: tuple[str, ...] = ()
    """Sorted. Slurm knows every one of them."""

    dropped: tuple[Dropped, ...] = ()
    """Strongest first."""

    unknown: tuple[str, ...] = ()
    """Names that Slurm does not know, never to be passed on: one of them makes it refuse the whole request."""

    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why each of ``nodes`` is avoided."""

    weakest_first: tuple[str, ...] = ()
    """``nodes`` in the order in which they would be given up."""

    problem: str = ""
    """Why the list, or Slurm, could not be read; then only the readable part of a damaged list is avoided."""

    @property
    def is_silent(self) -> bool:
        """Nothing to report: no node is avoided, and none should be."""
        return not (self.nodes or self.dropped or self.unknown or self.problem)

    def as_event(self) -> dict[str, Any]:
        """The details of the journal's event ``avoiding``."""
        return {
            "nodes": slurm.compress(self.nodes),
            "reasons": [f"{node}: {why}" for node, why in self.reasons.items()][:_TOLD],
            "dropped": [f"{each.node}: {each.reason}" for each in self.dropped][:_TOLD],
            "unknown": list(self.unknown),
            "problem": self.problem,
        }

    def lines(self) -> list[str]:
        """The findings, one line each; none when no node is avoided and none was dropped."""
        said = []
        if self.problem:
            what = "not every node that should be is avoided" if self.nodes else "no node is avoided"
            said.append(f"warning: {what}: {self.problem}")
        if self.nodes:
            few = "; ".join(f"{node}: {self.reasons.get(node, '')}" for node in self.nodes[:5])
            more = f"; and {len(self.nodes) - 5} more" if len(self.nodes) > 5 else ""
            said.append(f"avoiding {slurm.compress(self.nodes)} ({few}{more})")
        by_reason: dict[str, list[str]] = {}
        for each in self.dropped:
            by_reason.setdefault(each.reason, []).append(each.node)
        said += [f"warning: not avoiding {slurm.compress(names)}: {reason}" for reason, names in by_reason.items()]
        if self.unknown:
            said.append(f"warning: Slurm does not know {slurm.compress(self.unknown)}, which the exclusion list "
                        "names; slurmft exclude remove forgets a node that is gone")  # fmt: skip
        return said


def to_avoid(
    exclusions: Exclusions,
    *,
    partition: str | None,
    nodes_needed: int,
    suspects: Sequence[str] = (),
    max_excluded_fraction: float,
    rules: Rules | None = None,
    excluded_anyway: Collection[str] = (),
    asked_for: Collection[str] = (),
    known: Sequence[NodeRecord] | None = None,
) -> Avoidance:
    """The nodes that a job of ``nodes_needed`` nodes in ``partition`` should avoid, as far as it can spare them.

    Asks Slurm once. ``suspects`` of an undecided rerun are avoided in this placement only: they are dropped last, and
    do not count for ``max_excluded_fraction``. ``partition`` may name several, or be None for the default one;
    ``excluded_anyway`` is what the request excludes by itself, ``asked_for`` what it names in its nodelist; ``known``
    spares the question to Slurm.

    Raises:
        SlurmUnavailable: Slurm did not answer. Which nodes are free or known is unknown then, so pass on no name of the
            list. Nodes of the job's own allocation, such as its suspects, are known without asking.
        SlurmError: Slurm refused.
    """
    candidates = _candidates(exclusions, suspects, rules or Rules(), time.time())
    if not candidates:
        return Avoidance()
    records = slurm.nodes() if known is None else known
    choice = choose_exclusions(
        candidates,
        _places(records, partition, frozenset(excluded_anyway)),
        known={record.node for record in records},
        nodes_needed=nodes_needed,
        max_excluded_fraction=max_excluded_fraction,
        asked_for=asked_for,
    )
    reasons = {candidate.node: candidate.reason for candidate in reversed(candidates)}
    return Avoidance(
        nodes=tuple(sorted(choice.nodes)),
        dropped=choice.dropped,
        unknown=choice.unknown,
        reasons={node: reasons[node] for node in sorted(choice.nodes)},
        weakest_first=choice.nodes[::-1],
    )


def _candidates(exclusions: Exclusions, suspects: Sequence[str], rules: Rules, now: float) -> list[Candidate]:
    standings = standing(exclusions.observations, exclusions.manual, now, rules)
    found = []
    for node in dict.fromkeys(suspects):
        score = standings[node].score if node in standings else 0.0
        found.append(Candidate(node=node, score=score, strength=Strength.SUSPECT, reason="suspect of this run"))
    for node, each in standings.items():
        if each.state is State.EXCLUDED:
            strength = Strength.BY_HAND if each.by_hand else Strength.SCORE
            found.append(Candidate(node=node, score=each.score, strength=strength, reason=", ".join(each.reasons)))
    return found


def _places(
    records: Sequence[NodeRecord], partition: str | None, excluded_anyway: frozenset[str]
) -> list[PartitionNodes]:
    wanted = set((partition or "").split(","))
    nodes: dict[str, set[str]] = {}
    usable: dict[str, set[str]] = {}
    for record in records:
        if record.partition in wanted or (record.is_default and "" in wanted):
            nodes.setdefault(record.partition, set()).add(record.node)
            if record.usable and record.node not in excluded_anyway:
                usable.setdefault(record.partition, set()).add(record.node)
    return [PartitionNodes(name=name, nodes=frozenset(names), usable=frozenset(usable.get(name, ())))
            for name, names in nodes.items()]  # fmt: skip


def excluded_by_user(config: RunConfig, options: Mapping[str, Any]) -> frozenset[str]:
    """Nodes that the user excludes from a new job; options behind ``--`` replace those of the configuration."""
    return expanded(options.get("exclude", config.slurm.exclude))


def for_submission(
    config: RunConfig, options: Mapping[str, Any], environment: Mapping[str, str], suspects: Collection[str] = ()
) -> Avoidance:
    """Nodes that a new job avoids; ``options`` are sbatch's from behind ``--``, ``suspects`` the run's own.

    Never blocks a submission: a list that cannot be read, or a Slurm that does not answer, is only reported.
    """
    given = {**(config.slurm.model_extra or {}), **{key.replace("-", "_"): value for key, value in options.items()}}
    if "clusters" in given:
        return Avoidance(problem="the job goes to another cluster than the list is of")
    try:
        exclusions = FolderThread().call(lambda: _read_and_tidy(config, environment), timeout_s=LIST_S)
        found = to_avoid(
            exclusions,
            partition=partitions_of(config, asked_for(config.slurm, options, environment).partition) or None,
            nodes_needed=max(each.nodes for each in components_of(config)),
            suspects=sorted(suspects),
            max_excluded_fraction=config.exclusions.max_excluded_fraction,
            rules=config.exclusions.rules(),
            excluded_anyway=excluded_by_user(config, options) | expanded(environment.get("SBATCH_EXCLUDE")),
            asked_for=expanded(given.get("nodelist")) | expanded(environment.get("SBATCH_NODELIST")),
        )
        return replace(found, problem=exclusions.damage)
    except (SlurmError, StorageError) as error:
        return Avoidance(problem=f"{error.what}{f' ({error.hint})' if error.hint else ''}")


def _read_and_tidy(config: RunConfig, environment: Mapping[str, str]) -> Exclusions:
    shared = exclusion_list(config, environment)
    found = shared.read()
    shared.tidy(found, time.time(), config.exclusions.rules())
    return found


def expanded(hostlist: object) -> frozenset[str]:
    """The nodes in a hostlist from outside, or of a user; none where it is not one, for Slurm either."""
    try:
        return frozenset(slurm.expand(str(hostlist))) if hostlist else frozenset()
    except ValueError:
        return frozenset()


def submitted(avoidance: Avoidance, submit: Callable[[frozenset[str]], str]) -> tuple[str, Avoidance]:
    """The result of ``submit``, and the nodes that the job avoids in the end.

    Slurm may know more about the request, such as features of nodes, and refuse because of the excluded ones:
    then the weaker half of them is dropped, and again.

    Raises:
        SlurmError: the error of ``submit`` with nothing left to drop, or for another reason.
    """
    while True:
        try:
            return submit(frozenset(avoidance.nodes)), avoidance
        except SlurmError as error:
            if not avoidance.nodes or _TOO_MANY not in error.what:
                raise
            avoidance = _halved(avoidance)
            log.warning("refused, perhaps for the excluded nodes (%s); trying again without the weaker half, "
                        "%d nodes left", error.what, len(avoidance.nodes))  # fmt: skip


def _halved(avoidance: Avoidance) -> Avoidance:
    count = (len(avoidance.weakest_first) + 1) // 2
    gone, kept = avoidance.weakest_first[:count], avoidance.weakest_first[count:]
    reason = "Slurm refuses the request without it"
    return replace(
        avoidance,
        nodes=tuple(sorted(kept)),
        weakest_first=kept,
        reasons={node: why for node, why in avoidance.reasons.items() if node in set(kept)},
        dropped=(*avoidance.dropped, *(Dropped(node=node, reason=reason, score=0.0) for node in reversed(gone))),
    )


def exclusion_list(config: RunConfig, environment: Mapping[str, str]) -> ExclusionList:
    """The exclusion list of this configuration, for the current cluster.

    Raises:
        SlurmUnavailable: the cluster's name is not known, and is needed.
    """
    return ExclusionList(list_path(config.exclusions.path, environment), config.exclusions.mode_bits())


def list_path(path: Path | None, environment: Mapping[str, str]) -> Path:
    """Where the list is: ``path`` with ``{cluster}`` filled in, else one in the user's state folder.

    Raises:
        SlurmUnavailable: the cluster's name is not known, and is needed.
        StorageError: so is the user's home folder.
    """
    if path is not None and "{cluster}" not in str(path):
        return path
    cluster = cluster_name(environment)
    if path is not None:
        return Path(str(path).replace("{cluster}", cluster))
    if (root := state_folder(environment)) is None:
        raise StorageError("your home folder cannot be determined", hint="set exclusions.path, or HOME")
    return root / "slurmft" / f"exclusions-{cluster}.json"


def cluster_name(environment: Mapping[str, str]) -> str:
    """The name of the cluster around us: a job's variable, the configuration file, or Slurm itself says; ``local``
    where there is no Slurm.

    Raises:
        SlurmUnavailable: there is Slurm, and it did not answer.
    """
    if name := environment.get(CLUSTER_VARIABLE) or slurm.configured_cluster(environment):
        return _as_file_name(name)
    return _as_file_name(_asked_cluster()) if slurm.available() else OFF_SLURM


@functools.cache
def _asked_cluster() -> str:
    return slurm.site().cluster or OFF_SLURM


def _as_file_name(cluster: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", cluster).lstrip(".") or OFF_SLURM
