"""What is saved: a GPT-like model with Adam in fp32, and a small training beside it whose step has a known cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import xxhash
from torch import nn

BATCH, CONTEXT = 4, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Of a model; with Adam it has 12 bytes of state for each parameter."""

    layers: int
    width: int
    vocabulary: int


SHAPES = {
    "1 GB": Shape(layers=11, width=768, vocabulary=8192),
    "4 GB": Shape(layers=26, width=1024, vocabulary=8192),
    "12 MB": Shape(layers=2, width=192, vocabulary=512),
    "1 MB": Shape(layers=1, width=64, vocabulary=256),
}
TRAINED = Shape(layers=3, width=256, vocabulary=1024)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(CONTEXT, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


class State:
    """What is saved and loaded. A fresh one has no optimizer state yet, as after a restart."""

    def __init__(self, shape: Shape, *, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = Gpt(shape)
        self.forget_optimizer()

    def forget_optimizer(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def step_once(self) -> State:
        """Give the optimizer its state: random moments."""
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{name}.{key}", value

    def bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def change(self) -> None:
        """Every value, at once and in place: what a step would do."""
        for _, tensor in self.tensors():
            tensor.add_(1)

    def digests(self) -> dict[str, str]:
        return {name: xxhash.xxh3_128_hexdigest(tensor.reshape(-1).numpy()) for name, tensor in self.tensors()}


class Training:
    """Forward, backward and Adam of a small model on all threads: a step of some 50 ms that needs the processor."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model = Gpt(TRAINED)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(TRAINED.vocabulary, (BATCH, CONTEXT + 1))

    def step(self) -> tuple[float, float]:
        """When it began and when it ended, on the monotonic clock."""
        began = time.monotonic()
        logits = self.model(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return began, time.monotonic()
