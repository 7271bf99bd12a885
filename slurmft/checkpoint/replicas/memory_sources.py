"""Snapshots in the memory of a restart's nodes: offered, decided on by all ranks alike, sent where they are needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

from slurmft.checkpoint.format.reading import Source
from slurmft.checkpoint.replicas.local_tier import local_folder
from slurmft.checkpoint.replicas.offers import (
    ROW_LENGTH,
    Holding,
    Staging,
    from_rows,
    inherit_tries,
    note_try,
    scan,
    to_row,
    tries_of,
)
from slurmft.checkpoint.replicas.supply import fetched, remove_fetched, supply
from slurmft.checkpoint.team import Team
from slurmft.errors import StorageError
from slurmft.policy.checkpoints.supply import without
from slurmft.policy.checkpoints.tiers import DISK, Committed, Decision, Name, Tier, choose
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.checkpoint_names import STAGING, Identity
from slurmft.storage.digest_record import Doubt
from slurmft.storage.memory_folder import memory_folder_of, own_memory_folder

log = logging.getLogger(__name__)


def same_state(directory: Path, old: str, new: str) -> None:
    """A state that lay in memory only is saved again, under another name: its tries are kept."""
    memory, staging = own_memory_folder(), directory / STAGING
    if memory is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        inherit_tries(memory, old, new)
    if staging.is_dir() and os.environ.get("RANK", "0") == "0":
        inherit_tries(staging, old, new)


class MemorySources:
    """The memory tiers of one load. Every method is a collective, but ``sources`` and ``close``.

    Args:
        committed: the newest checkpoint on disk; None where there is none.
        directory: of the checkpoints.
        generation: of this attempt.
        quarantined: checkpoints that runs died from; their copies in memory are no better.
        doubts: states that replicas differed in, or may have.
    """

    def __init__(
        self, team: Team, committed: Committed | None, *, directory: Path, generation: int,
        quarantined: Collection[Name] = (), doubts: Collection[Doubt] = (),
    ) -> None:  # fmt: skip
        self._team, self._committed, self._generation = team, committed, generation
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._node_lead = team.rank - local_rank if team.world_size > 1 else team.rank
        self._memory = memory_folder_of(directory)
        disk = WorkerSettings.from_environment(os.environ).checkpoint.local_directory
        self._local = _local_folder(Path(disk), directory) if disk else None
        self._offers_for_node = team.rank == self._node_lead
        self._staging = directory / STAGING if (directory / STAGING).is_dir() else None
        ranks = range(self._node_lead, self._node_lead + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        staging = Staging(folder=self._staging, ranks=ranks) if self._staging is not None else None
        self._held: list[Holding] = scan(self._memory, self._local, staging) if self._memory or disk or staging else []
        tries = [tries_of(self._memory), tries_of(self._staging)]
        row = [0] * ROW_LENGTH
        if self._offers_for_node:
            row = to_row(self._held, lambda name: max(count(name) for count in tries))
        self._offers = from_rows(team.exchange(row))
        self._refused: dict[Name, str] = {}
        doubted = {each.name for each in self._offers if any(one.covers(*each.name[:2]) for one in doubts)}
        self._quarantined = frozenset(quarantined) | doubted
        self.reason = ""
        """Why nothing was read from memory where something newer lay there; empty where nothing did."""

    def decide(self) -> Decision | None:
        """The snapshot to read, at least in part from memory; None where everything comes from disk."""
        decision = choose(
            self._offers, self._committed, generation=self._generation, quarantined=self._quarantined,
            refused=self._refused,
        )  # fmt: skip
        self.reason = decision.reason if decision.skipped else ""
        if decision.name is None or all(supplier is DISK for supplier in decision.suppliers):
            return None
        return decision

    def bring(self, decision: Decision, wanted: Collection[int]) -> bool:
        """Have every node fetch what it lacks; False where something did not arrive, and all must decide anew.

        Args:
            wanted: the shards that this rank needs whole; of others it gets what is not spread over ranks.
        """
        identity = Identity(*(decision.name or (0, 0, 0)))
        if not decision.is_committed:
            for folder in (
                self._memory if self._offers_for_node else None,
                self._staging if self._team.is_lead else None,
            ):
                if folder is not None:
                    note_try(folder, decision.name or (0, 0, 0), generation=self._generation)
        mine = {one.index.shard: one for one in self._held if one.index.identity == identity}
        lacking = supply(
            self._team, decision, self._offers, mine, wanted=wanted, memory=self._memory, node_lead=self._node_lead
        )
        for one in lacking:
            self._offers = without(self._offers, one.rank, decision.name or (0, 0, 0), [one.shard])
        return not lacking

    def sources(self, identity: Identity) -> dict[int, Source]:
        """The shards that lie on this node now."""
        name = (identity.step, identity.generation, identity.commit)
        mine = {one.index.shard: one for one in self._held if one.index.identity == identity and one.index.is_hashed}
        return {
            shard: Source(
                image=one.image, index=one.index, own_place=one.index_path if one.tier is Tier.MEMORY else None
            )
            for shard, one in (fetched(self._memory, name) | mine).items()
        }

    def refuse(self, decision: Decision, reason: str) -> None:
        """Some rank found this one damaged: never again."""
        if decision.name is not None:
            self._refused[decision.name] = reason

    def close(self) -> None:
        """Give back what was fetched; every rank has read by now, as all have agreed on how it went."""
        if self._offers_for_node:
            remove_fetched(self._memory)


def _local_folder(local_directory: Path, directory: Path) -> Path | None:
    try:
        return local_folder(local_directory, directory)
    except (OSError, StorageError) as error:
        log.warning("nothing is read from %s: %s", local_directory, error)
        return None
