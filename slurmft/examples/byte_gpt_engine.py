"""The byte GPT as an engine of batch inference: the class of ``slurmft quickstart --infer``, and one to copy from.

A configuration names it (``engine: {callable: "slurmft.examples.byte_gpt_engine:Generator"}``); each replica builds it
once and calls it with lists of request bodies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slurmft.checkpoint import CheckpointManager
from slurmft.errors import UsageError
from slurmft.examples.byte_gpt import ByteGPT, parse

CHECKPOINTS_VARIABLE = "BYTE_GPT_CHECKPOINTS"
"""The folder of the checkpoints; set it under ``environment`` in the configuration."""

MAX_TOKENS = 12


class Generator:
    """Continues prompts, byte by byte, with the most likely one each time.

    A body has ``prompt`` and perhaps ``max_tokens``; an answer has ``text``. Computed in double precision, so that
    an answer does not depend on the requests beside it: in single precision the order of sums changes with the batch.

    Args:
        device: such as ``cpu``.

    Raises:
        UsageError: there is no checkpoint.
    """

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)  # a replica for each core
        args = parse([])
        model = ByteGPT(args.window, args.channels, args.layers, args.heads, args.dropout)
        folder = Path(os.environ.get(CHECKPOINTS_VARIABLE, "checkpoints"))
        loaded = CheckpointManager(folder).load_latest(model, torch.optim.AdamW(model.parameters()))
        if not loaded.found:
            raise UsageError(f"there is no checkpoint in {folder}", hint=f"set {CHECKPOINTS_VARIABLE}")
        self._model, self._window, self._device = model.double().to(device).eval(), args.window, device

    def __call__(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """One answer for each body, in the same order."""
        counts = [int(body.get("max_tokens", MAX_TOKENS)) for body in bodies]
        texts = [list(str(body["prompt"]).encode()) or [ord("\n")] for body in bodies]
        starts = [len(text) for text in texts]
        for _ in range(max(counts)):
            for text, byte in zip(texts, self._next_bytes(texts), strict=True):
                text.append(byte)
        return [
            {"text": bytes(text[start : start + count]).decode(errors="replace")}
            for text, start, count in zip(texts, starts, counts, strict=True)
        ]

    @torch.no_grad()
    def _next_bytes(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Texts are padded at their ends, which no earlier place sees."""
        recent = [text[-self._window :] for text in texts]
        longest = max(map(len, recent))
        input_bt = torch.tensor([[*text, *[0] * (longest - len(text))] for text in recent], device=self._device)
        last_b = torch.tensor([len(text) - 1 for text in recent], device=self._device)
        logits_bv = self._model.logits(input_bt)[torch.arange(len(recent)), last_b]
        found: list[int] = logits_bv.argmax(dim=-1).tolist()
        return found
