"""The environment of zygote and workers: torchrun's variables, and slurmft's own."""

from __future__ import annotations

from collections.abc import Mapping

from slurmft.agent import workers
from slurmft.agent.workers import own_device, zygote_arguments
from slurmft.config.run import RunConfig
from slurmft.ipc.messages import StartWorkers
from slurmft.ipc.stacks import STOP_SIGNAL_VARIABLE
from slurmft.ipc.zygote_start import shared_environment
from slurmft.policy import site
from slurmft.policy.hangs import STEP
from slurmft.policy.reruns import RerunSettings
from slurmft.policy.worker_settings import WORKER_VARIABLE, WorkerSettings
from slurmft.storage.fence import GENERATION_VARIABLE, RUN_FOLDER_VARIABLE
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE, EVIDENCE_VARIABLE, VERDICT_VARIABLE

LENDER_VARIABLE = "SLURMFT_LENDER"
"""The job that lends an agent's node; not set for the run's own."""

_OF_TASKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def common_environment(config: RunConfig, base: Mapping[str, str]) -> dict[str, str]:
    """The environment that all workers of the run share; preloaded libraries read parts of it while they load."""
    return shared_environment(base, name=config.name, per_node=config.nproc_per_node, own=config.environment)


def worker_environment(
    config: RunConfig, base: Mapping[str, str], start: StartWorkers, rank: int, attempt: str
) -> dict[str, str]:
    """One rank's environment; ``start`` is the supervisor's call."""
    environment = common_environment(config, base)
    folder = config.run_folder / "attempts" / attempt
    world_size = start.nodes * config.nproc_per_node
    local_rank, node = rank - start.first_rank, start.first_rank // config.nproc_per_node
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(config.nproc_per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(start.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(start.cycle),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": config.name,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        RUN_FOLDER_VARIABLE: str(config.run_folder),
        GENERATION_VARIABLE: str(start.generation),
        "SLURMFT_ATTEMPT": attempt,
        VERDICT_VARIABLE: str(config.run_folder / "verdicts" / f"{attempt}.rank-{rank}.json"),
        EVIDENCE_VARIABLE: str(config.run_folder / "verdicts" / f"{attempt}.rank-{rank}.evidence.jsonl"),
        ERROR_DIR_VARIABLE: str(folder),
        # what torch's own @record writes, for scripts that have it already
        "TORCHELASTIC_ERROR_FILE": str(folder / f"torch-error.rank_{rank}"),
        "SLURMFT_CHECKPOINT_DIR": str(config.checkpoint_dir),
        WORKER_VARIABLE: settings_of(config, start).as_text(),
    }
    if config.preemption.signal != "SIGTERM":
        environment[STOP_SIGNAL_VARIABLE] = config.preemption.signal
    same_torch = zygote_arguments(config.command) is not None
    environment |= slurm_task(environment, start.nodelist)
    entries, timeout_s = config.nccl.flight_recorder_buffer_size, 60 * config.nccl.step_timeout_minutes
    limit_s = config.fault_tolerance.limits().sections.get(STEP, 0.0)
    environment |= own_device(environment, local_rank)
    environment |= site.variables(environment, timeout_s=timeout_s, limit_s=limit_s)
    return workers.variables(entries, folder, same_torch=same_torch) | environment


def slurm_task(environment: Mapping[str, str], nodelist: str | None) -> dict[str, str]:
    """What srun would have told this rank, had it started a task for each; nothing outside of Slurm.

    Srun has started agents, one on a node. The nodes are those of the attempt, rank 0's first: the first of them is
    where scripts look for their master.

    Args:
        environment: the rank's, with torchrun's variables.
        nodelist: of the attempt, in the order of ranks; None where it is not known.
    """
    if "SLURM_JOB_ID" not in environment:
        return {}
    rank, local_rank, tasks, per_node, node, nodes = (environment[name] for name in _OF_TASKS)
    first = int(rank) - int(local_rank)
    told = {
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), tasks),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), nodes),
        **dict.fromkeys(
            ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node + (f"(x{nodes})" if nodes != "1" else "")
        ),
        "SLURM_NTASKS_PER_NODE": per_node, "SLURM_PROCID": rank, "SLURM_LOCALID": local_rank, "SLURM_NODEID": node,
        "SLURM_GTIDS": ",".join(map(str, range(first, first + int(per_node)))),
    }  # fmt: skip
    lists = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
    return told | (dict.fromkeys(lists, nodelist) if nodelist else {})


def settings_of(config: RunConfig, start: StartWorkers) -> WorkerSettings:
    """The settings of every worker of this start."""
    return WorkerSettings(
        backend=config.nccl.backend,
        init_timeout_minutes=config.nccl.init_timeout_minutes,
        step_timeout_minutes=config.nccl.step_timeout_minutes,
        batch_divisor=start.batch_divisor,
        base_world_size=config.world_size if config.elastic.batch == "keep_micro_batch" else 0,
        straggler_detection=config.straggler_detection.enabled,
        straggler_profiling_interval=config.straggler_detection.profiling_interval,
        digest_interval_steps=config.digests.interval_steps,
        checkpoint=config.checkpoint.settings(start.mtbf_s),
        rerun=RerunSettings.from_json(config.rerun.model_dump(mode="json")),
    )
