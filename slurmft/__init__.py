"""slurmft keeps PyTorch training and batch inference going on a Slurm cluster and proves that nothing was lost.

The names below are the public ones. They are loaded on first use, so that ``import slurmft`` stays cheap and never
imports torch: login nodes may not have it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from slurmft.checkpoint import CheckpointManager as CheckpointManager
    from slurmft.checkpoint import DistributedCheckpointManager as DistributedCheckpointManager
    from slurmft.compat.megatron import get_rerun_state_machine as get_rerun_state_machine
    from slurmft.compat.neighbours import RerunDiagnostic as RerunDiagnostic
    from slurmft.compat.neighbours import RerunErrorInjector as RerunErrorInjector
    from slurmft.compat.neighbours import RerunMode as RerunMode
    from slurmft.compat.neighbours import RerunStateMachineConfig as RerunStateMachineConfig
    from slurmft.compat.serving_names import AutoRestartManager as AutoRestartManager
    from slurmft.compat.serving_names import GracefulDegradation as GracefulDegradation
    from slurmft.compat.serving_names import HighAvailabilityCluster as HighAvailabilityCluster
    from slurmft.compat.serving_names import RequestCheckpointer as RequestCheckpointer
    from slurmft.compat.serving_names import RequestRedistributor as RequestRedistributor
    from slurmft.compat.serving_names import RetryManager as RetryManager
    from slurmft.compat.serving_names import WorkerHealthMonitor as WorkerHealthMonitor
    from slurmft.errors import CheckpointError as CheckpointError
    from slurmft.errors import ConfigError as ConfigError
    from slurmft.errors import DataError as DataError
    from slurmft.errors import DirectoryInUse as DirectoryInUse
    from slurmft.errors import Fenced as Fenced
    from slurmft.errors import LabError as LabError
    from slurmft.errors import LabUnavailable as LabUnavailable
    from slurmft.errors import LaunchError as LaunchError
    from slurmft.errors import NewerFormat as NewerFormat
    from slurmft.errors import RunBusy as RunBusy
    from slurmft.errors import RunFailed as RunFailed
    from slurmft.errors import SlurmError as SlurmError
    from slurmft.errors import SlurmftError as SlurmftError
    from slurmft.errors import SlurmUnavailable as SlurmUnavailable
    from slurmft.errors import StorageError as StorageError
    from slurmft.errors import StorageUnavailable as StorageUnavailable
    from slurmft.errors import UsageError as UsageError
    from slurmft.inference.endpoint import publish_weights as publish_weights
    from slurmft.operations.executor import Executor as Executor
    from slurmft.operations.executor import RunHandle as RunHandle
    from slurmft.operations.executor import submit as submit
    from slurmft.storage.queue import Queue as Queue
    from slurmft.storage.shared_weights import stage_in_memory as stage_in_memory
    from slurmft.worker.data import ElasticLoader as ElasticLoader
    from slurmft.worker.data import ElasticSampler as ElasticSampler
    from slurmft.worker.failures import WatchdogTimer as WatchdogTimer
    from slurmft.worker.failures import categorize_failure as categorize_failure
    from slurmft.worker.failures import record as record
    from slurmft.worker.session import PlannedStop as PlannedStop
    from slurmft.worker.session import Session as Session
    from slurmft.worker.session import start_session as start_session
    from slurmft.worker.shared_weights import shared_weights as shared_weights
    from slurmft.worker.signals import ignore_strangers_term as ignore_strangers_term
    from slurmft.worker.standalone import DistributedSignalHandler as DistributedSignalHandler
    from slurmft.worker.standalone import HealthMonitor as HealthMonitor
    from slurmft.worker.standalone import detect_gpu_failure as detect_gpu_failure
    from slurmft.worker.standalone import detect_network_failure as detect_network_failure
    from slurmft.worker.standalone import handle_gpu_oom as handle_gpu_oom
    from slurmft.worker.standalone import handle_nccl_timeout as handle_nccl_timeout

__version__ = "0.1.0"

_NAMES = (
    ("slurmft.operations.executor", "submit RunHandle"),
    ("slurmft.operations.executor", "Executor"),
    ("slurmft.worker.session", "start_session Session PlannedStop"),
    ("slurmft.worker.signals", "ignore_strangers_term"),
    ("slurmft.worker.failures", "record"),
    ("slurmft.checkpoint", "CheckpointManager DistributedCheckpointManager"),
    ("slurmft.worker.data", "ElasticSampler ElasticLoader"),
    ("slurmft.worker.standalone", "HealthMonitor"),
    ("slurmft.worker.failures", "WatchdogTimer"),
    ("slurmft.worker.standalone", "DistributedSignalHandler"),
    ("slurmft.worker.failures", "categorize_failure"),
    ("slurmft.worker.standalone", "detect_gpu_failure detect_network_failure handle_nccl_timeout handle_gpu_oom"),
    ("slurmft.storage.queue", "Queue"),
    ("slurmft.inference.endpoint", "publish_weights"),
    ("slurmft.storage.shared_weights", "stage_in_memory"),
    ("slurmft.worker.shared_weights", "shared_weights"),
    ("slurmft.compat.megatron", "get_rerun_state_machine"),
    ("slurmft.compat.neighbours", "RerunStateMachineConfig"),
    ("slurmft.compat.neighbours", "RerunMode RerunDiagnostic RerunErrorInjector"),
    (
        "slurmft.compat.serving_names",
        "WorkerHealthMonitor AutoRestartManager RequestRedistributor RequestCheckpointer RetryManager "
        "HighAvailabilityCluster GracefulDegradation",
    ),
    (
        "slurmft.errors",
        "SlurmftError UsageError ConfigError DataError RunBusy RunFailed DirectoryInUse LabError LabUnavailable "
        "SlurmError SlurmUnavailable StorageError StorageUnavailable NewerFormat Fenced CheckpointError "
        "LaunchError",
    ),
)
_HOMES = {name: home for home, names in _NAMES for name in names.split()}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    if name == "compat":  # a package of further names, loaded on first use as well
        return importlib.import_module("slurmft.compat")
    if name not in _HOMES:
        raise AttributeError(f"module 'slurmft' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
