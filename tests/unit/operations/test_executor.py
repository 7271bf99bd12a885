"""What submitit's parameters become in a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from slurmft.operations.executor import _keys_of


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({}, {}),
        ({"timeout_min": 60, "name": "a"}, {"slurm": {"time": 60, "job_name": "a"}}),
        ({"mem_gb": 1.5}, {"slurm": {"mem": "1536M"}}),
        (
            {"nodes": 2, "tasks_per_node": 4, "cpus_per_task": 3, "gpus_per_node": 4},
            {"nodes": 2, "nproc_per_node": 4, "slurm": {"cpus_per_task": 12, "gpus_per_node": 4}},
        ),
        (
            {"slurm_ntasks_per_node": 4, "slurm_gpus_per_task": 1},
            {"nproc_per_node": 4, "slurm": {"gpus_per_node": 4}},
        ),
        ({"slurm_signal_delay_s": 90}, {"preemption": {"signal_lead_s": 90}}),
        (
            {"slurm_signal_delay_s": 90, "preemption": {"signal": "SIGUSR2"}},
            {"preemption": {"signal_lead_s": 90, "signal": "SIGUSR2"}},
        ),
        (
            {"slurm_additional_parameters": {"mail-type": "END"}, "slurm": {"nice": 5}, "slurm_qos": "low"},
            {"slurm": {"mail_type": "END", "nice": 5, "qos": "low"}},
        ),
        ({"slurm_array_parallelism": 8, "local_anything": 1, "debug_setup": 2, "slurm_max_num_timeout": 3}, {}),
        (
            {"spare_nodes": 1, "checkpoint": {"interval_steps": 5}},
            {"spare_nodes": 1, "checkpoint": {"interval_steps": 5}},
        ),
    ],
)
def test_parameters(given: dict[str, Any], keys: dict[str, Any]) -> None:
    assert _keys_of(given) == keys
