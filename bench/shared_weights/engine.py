"""A decoder of about 2 GB as a callable of ``slurmft infer``: one token for each request, and a diary of them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import slurmft

WIDTH, TOKENS = 2048, 256
LAYERS = int(os.environ.get("BENCH_LAYERS", "10"))
"""Each has 50 million parameters, 0.2 GB."""


class Decoder(torch.nn.Module):
    """Layers as those of a GPT, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(TOKENS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        hidden_btw = self.layers(self.embedding(tokens_bt))
        return torch.nn.functional.linear(hidden_btw[:, -1], self.embedding.weight)


def empty() -> Decoder:
    with torch.device("meta"):
        return Decoder().eval()


empty()  # what torch imports for the device meta takes a second: the zygote does it, once (fault_tolerance.preload)


class Ordinary:
    """Reads its file at each start."""

    def __init__(self, device: str) -> None:
        self.began = psutil.Process().create_time()
        self.model = empty()
        self.model.load_state_dict(self.weights(Path(os.environ["BENCH_MODEL"])), assign=True)
        self.diary = Path(os.environ["BENCH_DIARY"])

    def weights(self, path: Path) -> Mapping[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return found

    @torch.inference_mode()
    def __call__(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
        tokens = [int(self.model(torch.tensor([list(body["prompt"].encode())])).argmax()) for body in bodies]
        with self.diary.open("a") as stream:
            stream.write(f"{os.getpid()} {self.began:.3f} {time.time():.3f} {time.process_time():.3f}\n")
        return [{"token": token} for token in tokens]


class Shared(Ordinary):
    """What it has read stays in the node's memory."""

    def weights(self, path: Path) -> Mapping[str, torch.Tensor]:
        return slurmft.shared_weights(path, lambda: super(Shared, self).weights(path))


class Staged(Ordinary):
    """The file is copied into the node's memory, and mapped there."""

    def weights(self, path: Path) -> Mapping[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(slurmft.stage_in_memory(path), weights_only=True, mmap=True)
        return found
