"""TRL's SFTTrainer with the two lines for slurmft: a tiny GPT-2 and a tokenizer of words, both made on the spot."""

from __future__ import annotations

import argparse
import time

from datasets import Dataset
from hf_trainer import digest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from slurmft.integrations.huggingface import SlurmftCallback, last_good_checkpoint

WORDS = [f"w{number}" for number in range(30)]


class Slowly(TrainerCallback):
    def __init__(self, delay: float) -> None:
        self.delay = delay

    def on_step_begin(self, *_: object, **__: object) -> None:
        time.sleep(self.delay)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--delay", type=float, default=0.1)
    options = parser.parse_args()
    words = {word: number for number, word in enumerate([*WORDS, "<unk>", "<pad>", "<eos>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(WORDS[(start + 3 * step) % 30] for step in range(8)) for start in range(80)]
    args = SFTConfig(
        output_dir=options.output, max_steps=40, save_steps=15, save_total_limit=2, logging_steps=2, report_to="none",
        per_device_train_batch_size=2, use_cpu=True, bf16=False, disable_tqdm=True, seed=3, max_length=16,
        gradient_checkpointing=False,
    )  # fmt: skip
    set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(words), n_positions=16, n_embd=8, n_layer=1, n_head=2))
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer,
        callbacks=[SlurmftCallback(), Slowly(options.delay)],
    )  # fmt: skip
    resumed = last_good_checkpoint(args.output_dir)
    trainer.train(resume_from_checkpoint=resumed)
    if args.process_index == 0:
        print(f"resumed from {resumed}; ended at step {trainer.state.global_step}")
        print(f"final weights sha256: {digest(trainer.model)}", flush=True)


if __name__ == "__main__":
    main()
