"""A Trainer as people write it, with the two lines for slurmft: a tiny GPT-2 made on the spot, on random tokens."""

import argparse
import hashlib
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from slurmft.integrations.huggingface import SlurmftCallback, last_good_checkpoint

WORDS, LENGTH = 32, 8


class Tokens(torch.utils.data.Dataset):
    def __init__(self, samples: int) -> None:
        self.tokens = torch.randint(WORDS, (samples, LENGTH), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Slowly(TrainerCallback):
    def __init__(self, delay: float, hurry: Path) -> None:
        self.delay, self.hurry = delay, hurry

    def on_substep_end(self, *_: object, **__: object) -> None:
        time.sleep(0 if self.hurry.exists() else self.delay)

    def on_step_begin(self, *_: object, **__: object) -> None:
        time.sleep(0 if self.hurry.exists() else self.delay)


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(name.removeprefix("module.").encode())
        found.update(bytes(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist()))
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--callbacks", type=int, default=1)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--wide", type=int, default=0, help="1: a model whose save takes a while")
    parser.add_argument("--engine")
    options, rest = parser.parse_known_args()
    given = dict(one.removeprefix("--").split("=", 1) for one in rest)
    settings = {name: int(value) if value.isdigit() else value for name, value in given.items()}

    args = TrainingArguments(
        **{
            "output_dir": options.output, "num_train_epochs": options.epochs, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2, "logging_steps": 2, "save_steps": 15, "save_total_limit": 2,
            "eval_strategy": "steps", "eval_steps": 4, "report_to": "none", "disable_tqdm": True, "use_cpu": True,
            "seed": 3, **settings,
        }
    )  # fmt: skip
    torch.manual_seed(3)
    width = 160 if options.wide else 8
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=width, n_layer=1, n_head=2))
    trainer = Trainer(
        model=model, args=args, train_dataset=Tokens(options.samples), eval_dataset=Tokens(8),
        callbacks=[*(SlurmftCallback(options.engine) for _ in range(options.callbacks)),
                   Slowly(options.delay, Path(options.output, "hurry"))],
    )  # fmt: skip
    resumed = last_good_checkpoint(args.output_dir)
    trainer.train(resume_from_checkpoint=resumed)
    weights = digest(trainer.model)  # of shards: by all ranks
    if args.process_index == 0:
        print(f"resumed from {resumed}; ended at step {trainer.state.global_step}")
        print(f"final weights sha256: {weights}", flush=True)


if __name__ == "__main__":
    main()
