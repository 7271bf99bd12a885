"""Who computes here: the node, and the GPU by its UUID."""

from __future__ import annotations

import os
import socket

import torch

from slurmft.policy.nodes.evidence import Suspect


def own_hardware(device: torch.device | None = None) -> Suspect:
    """This rank's node and, where ``device`` is a GPU, that GPU's UUID in the form of nvidia-smi."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    gpu = ""
    if device is not None and device.type == "cuda":
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        gpu = uuid if uuid.startswith("GPU-") or not uuid else f"GPU-{uuid}"
    return Suspect(node=node, gpu=gpu, rank=int(os.environ.get("RANK", "0")))
