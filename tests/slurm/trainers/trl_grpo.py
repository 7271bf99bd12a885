"""TRL's GRPOTrainer on answers of the role ``rollout``, whose engines have vLLM's interface.

python trl_grpo.py MODEL OUTPUT STEPS

Each row that is learned from is a line of ``rows.jsonl`` in OUTPUT.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import torch
from datasets import Dataset
from hf_trainer import digest
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from slurmft import publish_weights
from slurmft.integrations.huggingface import SlurmftCallback, last_good_checkpoint

folder, output, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
published: list[int] = []


def client() -> openai.OpenAI:
    routers = json.loads(Path(os.environ["SLURMFT_ENDPOINT_ROLLOUT_FILE"]).read_text())["routers"]
    trusted = ssl.create_default_context(cafile=os.environ["SLURMFT_ENDPOINT_ROLLOUT_CA"])
    token = Path(os.environ["SLURMFT_ENDPOINT_ROLLOUT_HEADERS"]).read_text().split()[-1]
    return openai.OpenAI(base_url=routers[0]["urls"][0] + "/v1", api_key=token, max_retries=0,
                         http_client=openai.DefaultHttpxClient(verify=trusted))  # fmt: skip


def asked(prompt: list[int], step: int, seed: int) -> Any:
    """An answer of the weights of ``step``; one of older weights is asked for again."""
    while True:
        try:
            answer = client().completions.with_raw_response.create(
                model=folder, prompt=prompt, max_tokens=8, temperature=1, seed=seed, logprobs=0,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
        except (openai.APIConnectionError, openai.InternalServerError) as error:
            print(f"asks again: {error}", flush=True)
            time.sleep(0.2)
            continue
        if answer.headers.get("X-Slurmft-Weights") == str(step):  # a router looks for new weights 4 times a second
            return answer.parse().choices[0]


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    step = int(trainer.state.global_step)
    if trainer.is_world_process_zero() and step not in published:
        path = tempfile.mkdtemp(prefix=f"{step}-", dir=weights)
        trainer.model.save_pretrained(path)
        publish_weights(path, version=step, to="rollout")
        published.append(step)
    ids = trainer.processing_class(prompts)["input_ids"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        first = 1000 * step + len(prompts) * args.process_index  # a seed of its own for each row
        found = list(pool.map(lambda at: asked(ids[at], step, first + at), range(len(prompts))))
    return {
        "prompt_ids": ids,
        "completion_ids": [each.token_ids for each in found],
        "logprobs": [each.logprobs.token_logprobs for each in found],
        "differs": [differs(trainer.model, prompt, each) for prompt, each in zip(ids, found, strict=True)],
    }


@torch.no_grad()
def differs(model: Any, prompt: list[int], answer: Any) -> float:
    """By how much the log-probabilities of an answer are others than those of the trainer's own weights, at most."""
    tokens, told = torch.tensor([prompt + answer.token_ids]), torch.tensor(answer.logprobs.token_logprobs)
    found = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float((found.gather(1, tokens[0, len(prompt) :, None])[:, 0] - told).abs().max())


def reward(
    prompts: list[str], completion_ids: list[list[int]], differs: list[float], trainer_state: Any, **_: Any
) -> list[float]:
    rewards = [sum(each < 100 for each in ids) / len(ids) for ids in completion_ids]
    with (output / "rows.jsonl").open("a") as rows:
        for number, row in enumerate(zip(differs, prompts, completion_ids, rewards, strict=True)):
            rows.write(json.dumps([trainer_state.global_step, args.process_index, number, *row]) + "\n")
    return rewards


weights = output / "weights"
weights.mkdir(parents=True, exist_ok=True)
args = GRPOConfig(
    output_dir=str(output), max_steps=steps, save_steps=4, save_total_limit=2, per_device_train_batch_size=2,
    num_generations=4, max_completion_length=8, learning_rate=1e-2, logging_steps=1, report_to="none", use_cpu=True,
    bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=3,
)  # fmt: skip
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(folder), processing_class=AutoTokenizer.from_pretrained(folder),
    args=args, train_dataset=Dataset.from_dict({"prompt": [f"{number} is" for number in range(6)]}),
    reward_funcs=reward, rollout_func=rollout, callbacks=[SlurmftCallback()],
)  # fmt: skip
resumed = last_good_checkpoint(output)
print(f"resumed from {resumed}", flush=True)
trainer.train(resume_from_checkpoint=resumed)
if args.process_index == 0:
    print(f"final weights sha256: {digest(trainer.model)}", flush=True)
