"""The long options of sbatch, so that a misspelt one is refused before submission.

Source: the manual page sbatch(1) of Slurm 22.05 to 26.05; what is not in it is looked for in the site's
``sbatch --help``. Options that print and exit (``--help``, ``--usage``, ``--version``, ``--test-only``) or that make
sbatch itself wait are left out.
"""

from __future__ import annotations

SBATCH_OPTIONS = frozenset(
    """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment consolidate-segments
    constraint container container-id container-type contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu
    cpus-per-task deadline delay-boot dependency distribution error exclude exclusive export export-file extra
    extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres
    gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem
    mem-bind mem-per-cpu mem-per-gpu mem-update mincpus network nice no-requeue nodefile nodelist ntasks-per-core
    ntasks-per-gpu ntasks-per-socket oom-kill-step open-mode output overcommit oversubscribe partition power prefer
    priority profile propagate qos quiet reboot reservation resources resv-ports segment sockets-per-node spread-job
    spread-segments stepmgr switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid
    use-min-nodes verbose wait-all-nodes wckey x11
    """.split()  # noqa: SIM905 - a hundred quoted words would be harder to read
)

OWNED_OPTIONS = {
    "signal": "use preemption.signal and preemption.signal_lead_s",
    "nodes": "use nodes",
    "ntasks": "one agent runs on each node; use nproc_per_node for workers",
    "ntasks-per-node": "one agent runs on each node; use nproc_per_node for workers",
    "open-mode": "logs always append, so that a requeue keeps them",
    "no-requeue": "use slurm.requeue, as in requeue: false",
    "array": "a run is one job; submit each run by itself",
    "wrap": "use command",
    "requeue": "use slurm.requeue",
    "no-kill": "use slurm.no_kill",
}
"""Options that slurmft sets itself, with what to use instead."""

SHORT_OPTIONS = {
    "A": "account", "p": "partition", "q": "qos", "t": "time", "c": "cpus-per-task", "C": "constraint", "x": "exclude",
    "w": "nodelist", "J": "job-name", "G": "gpus", "d": "dependency", "b": "begin", "L": "licenses", "o": "output",
    "e": "error", "H": "hold", "D": "chdir", "N": "nodes", "n": "ntasks", "a": "array",
    "k": "no-kill", "M": "clusters", "F": "nodefile", "s": "oversubscribe", "m": "distribution", "S": "core-spec",
    "B": "extra-node-info", "I": "immediate", "K": "kill-on-bad-exit", "O": "overcommit", "Q": "quiet", "v": "verbose",
}  # fmt: skip
