"""Names of other packages, over the mechanisms of this one: for scripts and configurations that are brought along.

Loaded on first use; none but those of Megatron's re-run state machine, and what handles failures, needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmft.compat.health_checker import HealthChecker as HealthChecker
    from slurmft.compat.megatron import RerunStateMachine as RerunStateMachine
    from slurmft.compat.megatron import destroy_rerun_state_machine as destroy_rerun_state_machine
    from slurmft.compat.megatron import get_rerun_state_machine as get_rerun_state_machine
    from slurmft.compat.megatron import initialize_rerun_state_machine as initialize_rerun_state_machine
    from slurmft.compat.neighbours import FaultToleranceConfig as FaultToleranceConfig
    from slurmft.compat.neighbours import FaultTolerancePlugin as FaultTolerancePlugin
    from slurmft.compat.neighbours import NVRxStragglerDetectionConfig as NVRxStragglerDetectionConfig
    from slurmft.compat.neighbours import PreemptionPlugin as PreemptionPlugin
    from slurmft.compat.options import configuration as configuration
    from slurmft.compat.rerun_names import RerunDiagnostic as RerunDiagnostic
    from slurmft.compat.rerun_names import RerunErrorInjector as RerunErrorInjector
    from slurmft.compat.rerun_names import RerunMode as RerunMode
    from slurmft.compat.rerun_names import RerunStateMachineConfig as RerunStateMachineConfig
    from slurmft.worker.rerun.data import RerunDataIterator as RerunDataIterator

_HOMES = {
    "HealthChecker": "slurmft.compat.health_checker",
    "get_rerun_state_machine": "slurmft.compat.megatron",
    "initialize_rerun_state_machine": "slurmft.compat.megatron",
    "destroy_rerun_state_machine": "slurmft.compat.megatron",
    "RerunStateMachine": "slurmft.compat.megatron",
    "RerunStateMachineConfig": "slurmft.compat.rerun_names",
    "RerunMode": "slurmft.compat.rerun_names",
    "RerunDiagnostic": "slurmft.compat.rerun_names",
    "RerunErrorInjector": "slurmft.compat.rerun_names",
    "RerunDataIterator": "slurmft.worker.rerun.data",
    "FaultToleranceConfig": "slurmft.compat.neighbours",
    "NVRxStragglerDetectionConfig": "slurmft.compat.neighbours",
    "FaultTolerancePlugin": "slurmft.compat.neighbours",
    "PreemptionPlugin": "slurmft.compat.neighbours",
    "configuration": "slurmft.compat.options",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slurmft.compat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
