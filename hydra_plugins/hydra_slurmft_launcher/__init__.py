"""``hydra/launcher=slurmft``: the jobs of a multirun are trials of one sweep, which lives in Slurm.

Every Hydra app of this environment runs this module at its start, before it is in sys.modules: what runs the sweep is
imported by its first use, and annotations are no texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, List, Optional  # noqa: UP035 - OmegaConf's older versions know no others

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class SlurmftLauncherConf:
    """The keys of ``hydra.launcher``; those of hydra-submitit-launcher have its names. What is None is not asked."""

    _target_: str = "hydra_plugins.hydra_slurmft_launcher.SlurmftLauncher"

    run_folder: str = "${hydra.sweep.dir}/sweep-${hydra.job.name}"
    """Of the sweep, on a filesystem that all nodes share."""

    cluster: str = "auto"
    """``slurm``, ``local``, or ``auto``: Slurm where its commands are, else this machine."""

    name: str = "${hydra.job.name}"
    """Of the Slurm job."""

    timeout_min: int = 60
    """Minutes of each Slurm job, not of the sweep: it goes on in the next one."""

    max_jobs: Optional[int] = None  # noqa: UP045 - as above
    """Most Slurm jobs at a time, one node each. None: as many as ``array_parallelism`` needs, else one."""

    per_node: int = 1
    """Hydra jobs at a time on each node."""

    array_parallelism: Optional[int] = None  # noqa: UP045
    """Most Hydra jobs at a time, in place of ``max_jobs``."""

    retries: int = 0
    """Further tries of a job that fails by itself. What a lost node or a preemption cuts off is no try."""

    retry_failed: bool = False
    """Run again, once for this start of the app and as it is now, all jobs of the sweep that have failed."""

    linger_s: int = 60
    """Seconds for which the sweep waits for the next jobs of an app that was killed, or is searching."""

    cpus_per_task: Optional[int] = None  # noqa: UP045
    """For each Hydra job."""

    gpus_per_task: Optional[int] = None  # noqa: UP045
    """For each Hydra job, in place of ``gpus_per_node``."""

    gpus_per_node: Optional[int] = None  # noqa: UP045
    """Shared out to the Hydra jobs of a node; with fewer than jobs, each of them sees all."""

    mem_gb: Optional[float] = None  # noqa: UP045
    """GiB of each node."""

    partition: Optional[str] = None  # noqa: UP045
    qos: Optional[str] = None  # noqa: UP045
    account: Optional[str] = None  # noqa: UP045
    constraint: Optional[str] = None  # noqa: UP045
    exclude: Optional[str] = None  # noqa: UP045
    gres: Optional[str] = None  # noqa: UP045
    comment: Optional[str] = None  # noqa: UP045

    signal_delay_s: Optional[int] = None  # noqa: UP045
    """Seconds before the time limit at which jobs are told to save."""

    setup: Optional[List[str]] = None  # noqa: UP006, UP045
    """Refused: load modules before the app, the environment comes along."""

    additional_parameters: Any = None
    """A mapping of further options of sbatch, without their dashes."""

    config: Any = None
    """Any other key of a slurmft configuration, such as ``{fault_tolerance: {agent_timeout_s: 10}}``."""


ConfigStore.instance().store(group="hydra/launcher", name="slurmft", node=SlurmftLauncherConf, provider="slurmft")


class SlurmftLauncher(Launcher):
    """Runs the jobs of a multirun as trials of one sweep; its batches are added to it."""

    def __init__(self, **parameters: Any) -> None:
        self._parameters = parameters
        self._sweep: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what the jobs are made of."""
        self._given = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Have each job run once, and wait for all of them; one that failed raises where its return value is read.

        Raises:
            CompactHydraException: the sweep cannot be submitted, or has stopped; says what to do.
        """
        from hydra_plugins.hydra_slurmft_launcher import _sweep

        if self._sweep is None:
            self._sweep = _sweep.Sweep(self._parameters, *self._given)
        return _sweep.launched(self._sweep, job_overrides, initial_job_idx)
