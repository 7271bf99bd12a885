"""Names of other packages, over the mechanisms of this one: for scripts and configurations that are brought along.

Loaded on first use; none but those of Megatron's re-run state machine, and what handles failures, needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmft.compat.megatron import RerunStateMachine as RerunStateMachine
    from slurmft.compat.megatron import destroy_rerun_state_machine as destroy_rerun_state_machine
    from slurmft.compat.megatron import get_rerun_state_machine as get_rerun_state_machine
    from slurmft.compat.megatron import initialize_rerun_state_machine as initialize_rerun_state_machine
    from slurmft.compat.neighbours import (
        EXIT_CODE_FAILED_ON_RESULT_VALIDATION as EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    )
    from slurmft.compat.neighbours import EXIT_CODE_RESUME_TO_DISAMBIGUATE as EXIT_CODE_RESUME_TO_DISAMBIGUATE
    from slurmft.compat.neighbours import FaultToleranceConfig as FaultToleranceConfig
    from slurmft.compat.neighbours import FaultTolerancePlugin as FaultTolerancePlugin
    from slurmft.compat.neighbours import NVRxStragglerDetectionConfig as NVRxStragglerDetectionConfig
    from slurmft.compat.neighbours import NVRxStragglerDetectionManager as NVRxStragglerDetectionManager
    from slurmft.compat.neighbours import PreemptionPlugin as PreemptionPlugin
    from slurmft.compat.neighbours import RerunDiagnostic as RerunDiagnostic
    from slurmft.compat.neighbours import RerunErrorInjector as RerunErrorInjector
    from slurmft.compat.neighbours import RerunMode as RerunMode
    from slurmft.compat.neighbours import RerunStateMachineConfig as RerunStateMachineConfig
    from slurmft.compat.neighbours import TrainingConfig as TrainingConfig
    from slurmft.compat.neighbours import configuration as configuration
    from slurmft.compat.serving_names import AutoRestartManager as AutoRestartManager
    from slurmft.compat.serving_names import GracefulDegradation as GracefulDegradation
    from slurmft.compat.serving_names import HealthChecker as HealthChecker
    from slurmft.compat.serving_names import HighAvailabilityCluster as HighAvailabilityCluster
    from slurmft.compat.serving_names import RequestCheckpointer as RequestCheckpointer
    from slurmft.compat.serving_names import RequestRedistributor as RequestRedistributor
    from slurmft.compat.serving_names import RetryManager as RetryManager
    from slurmft.compat.serving_names import WorkerHealthMonitor as WorkerHealthMonitor
    from slurmft.worker.rerun_data import RerunDataIterator as RerunDataIterator

_NAMES = {
    "slurmft.compat.serving_names": "HealthChecker WorkerHealthMonitor AutoRestartManager RequestRedistributor "
    "RequestCheckpointer RetryManager HighAvailabilityCluster GracefulDegradation",
    "slurmft.compat.megatron": "get_rerun_state_machine initialize_rerun_state_machine destroy_rerun_state_machine "
    "RerunStateMachine",
    "slurmft.compat.neighbours": "RerunMode RerunDiagnostic RerunErrorInjector EXIT_CODE_RESUME_TO_DISAMBIGUATE "
    "EXIT_CODE_FAILED_ON_RESULT_VALIDATION RerunStateMachineConfig FaultToleranceConfig NVRxStragglerDetectionConfig "
    "FaultTolerancePlugin PreemptionPlugin TrainingConfig NVRxStragglerDetectionManager configuration",
    "slurmft.worker.rerun_data": "RerunDataIterator",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slurmft.compat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
