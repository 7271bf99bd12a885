"""Titles and texts of the chapters: what was injected, and what the run does about it."""

from __future__ import annotations

from typing import NamedTuple


class Chapter(NamedTuple):
    """One chapter of the book."""

    title: str
    text: str


CHAPTERS = {
    "worker": Chapter(
        "A worker is killed",
        "`kill -9` of one of four ranks in the middle of a step. Its agent sees the end of the process at once; all "
        "ranks are looked at and ended, and start again inside the same job.",
    ),
    "node": Chapter(
        "A node fails",
        "The power of one of two nodes goes off, with everything on it. The silence of its agent shows it; the run "
        "goes through the queue and starts on other nodes.",
    ),
    "partition": Chapter(
        "The network is partitioned",
        "One of two nodes is cut off the network for as long as the recovery takes. Its processes live on, and must "
        "not write into the run any more: they end themselves when their lease has run out.",
    ),
    "oom": Chapter(
        "Out of memory",
        "From step 60 on, more than four samples at once do not fit: ranks that compute eight raise `MemoryError`. "
        "With `oom: {action: reduce_batch}` the same global batch is computed in smaller pieces from then on.",
    ),
    "hang": Chapter(
        "A worker hangs",
        "SIGSTOP of one rank: it stands still, and the others wait for it in a collective. The limit of the section "
        "`step` was 5 seconds; without a limit in the configuration it is learned from the run's own steps.",
    ),
    "disk": Chapter(
        "The disk is full",
        "The disk of the checkpoints takes nothing until two saves have failed. The training goes on meanwhile, the "
        "newest checkpoint stays, and the next save after that succeeds.",
    ),
    "controller": Chapter(
        "slurmctld is away",
        "The controller is killed and comes back after 20 seconds; meanwhile a rank dies in a run that may not "
        "restart inside its job: it has to be requeued, and Slurm does not answer.",
    ),
    "preemption": Chapter(
        "The run is preempted",
        "A job of a higher partition takes the nodes. The run saves within Slurm's grace, leaves, waits in the queue "
        "and goes on.",
    ),
    "elastic": Chapter(
        "Elastic: 4, then 3, then 5 nodes",
        "One node of four dies, and the run goes on with three inside its job. Then two nodes are lent to it with "
        "`slurmft join`, and it goes on with five.",
    ),
}
