"""One line that two runs can compare: do they hold the same weights, bit for bit?"""

from __future__ import annotations

import ctypes
import hashlib

import torch

from slurmft.trainer.streams import settle


def weights_digest(model: torch.nn.Module) -> str:
    """sha256 in hex over the state dict's tensors in name order: name, dtype, shape, bytes.

    Equal exactly when every weight and buffer is equal bit for bit. A wrapper that renames weights (DDP's ``module.``)
    changes it: pass the model itself.
    """
    settle(model.parameters())  # an optimizer may have its own stream, which the copies below would not wait for
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))  # torch offers no buffer without numpy
    return digest.hexdigest()
