"""As much of vLLM's server as ``trainers/trl_grpo.py`` asks for, with any model of Hugging Face on a CPU.

python trl_engine.py --socket PATH MODEL

``/v1/completions`` continues a prompt of token ids, by chance as its ``seed`` says; ``/collective_rpc`` loads weights.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

_, _, socket, folder = sys.argv
models: dict[str, Any] = {"newest": AutoModelForCausalLM.from_pretrained(folder)}


@torch.no_grad()
def continued(model: Any, prompt: list[int], most: int, seed: int) -> tuple[list[int], list[float]]:
    tokens, logprobs, chance = list(prompt), [], torch.Generator().manual_seed(seed)
    while len(logprobs) < most and model.config.eos_token_id not in tokens[len(prompt) :]:
        found = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(torch.multinomial(found.exp(), 1, generator=chance)))
        logprobs.append(float(found[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


async def complete(request: web.Request) -> web.Response:
    asked = await request.json()
    assert asked["return_token_ids"] and asked["temperature"] == 1
    ids, logprobs = continued(models["newest"], asked["prompt"], asked["max_tokens"], asked["seed"])
    choice = {"index": 0, "text": "", "finish_reason": "length" if len(ids) == asked["max_tokens"] else "stop",
              "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}  # fmt: skip
    return web.json_response({"id": "c", "object": "text_completion", "created": int(time.time()), "model": folder,
                              "choices": [choice]})  # fmt: skip


async def load(request: web.Request) -> web.Response:
    asked = await request.json()
    assert asked["method"] == "reload_weights"
    models["newest"] = AutoModelForCausalLM.from_pretrained(asked["kwargs"]["weights_path"])
    return web.json_response({"results": [None]})


async def healthy(_request: web.Request) -> web.Response:
    return web.Response()


app = web.Application()
app.add_routes([
    web.post("/v1/completions", complete), web.post("/collective_rpc", load), web.get("/health", healthy)
])  # fmt: skip
web.run_app(app, path=socket, print=None, access_log=None)
