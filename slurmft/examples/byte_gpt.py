"""A small GPT that learns to write, byte by byte: the trainer of ``make quickstart``, and one to copy from.

    python -m slurmft.examples.byte_gpt --steps 200 --data PATH

The parts of a training script that use slurmft are in ``train``: a session around it, a manager for the checkpoints,
and ``session.steps`` instead of ``range``.

Shapes: B samples per batch, T bytes per window, C channels, H heads.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from slurmft.checkpoint import CheckpointManager
from slurmft.worker.data import ByteCorpus, WindowLoader
from slurmft.worker.digests import weights_digest
from slurmft.worker.session import start_session

BYTES = 256


class Block(nn.Module):
    """Attention to what came before, then a small network; both added to their input."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(channels)
        self.query_key_value = nn.Linear(channels, 3 * channels)
        self.project = nn.Linear(channels, channels)
        self.norm_network = nn.LayerNorm(channels)
        self.network = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels), nn.Dropout(dropout)
        )

    def forward(self, x_btc: torch.Tensor) -> torch.Tensor:
        batch, length, channels = x_btc.shape
        qkv = self.query_key_value(self.norm_attention(x_btc))
        q_bhtd, k_bhtd, v_bhtd = qkv.view(batch, length, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4)
        mixed_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, is_causal=True)
        mixed_btc = self.project(mixed_bhtd.transpose(1, 2).reshape(batch, length, channels))
        x_btc = x_btc + F.dropout(mixed_btc, self.dropout, self.training)
        out_btc: torch.Tensor = x_btc + self.network(self.norm_network(x_btc))
        return out_btc


class ByteGPT(nn.Module):
    """Predicts the next byte at every place of a window."""

    def __init__(self, window: int, channels: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, channels)
        self.place = nn.Parameter(torch.randn(window, channels) * 0.02)
        self.blocks = nn.Sequential(*(Block(channels, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, BYTES)

    def logits(self, input_bt: torch.Tensor) -> torch.Tensor:
        """For each place the logits of the byte that follows it; shape (B, T, BYTES)."""
        x_btc = self.embed(input_bt) + self.place[: input_bt.shape[1]]
        logits_btv: torch.Tensor = self.head(self.norm(self.blocks(x_btc)))
        return logits_btv

    def forward(self, input_bt: torch.Tensor, target_bt: torch.Tensor) -> torch.Tensor:
        """The mean loss in nats per byte."""
        return F.cross_entropy(self.logits(input_bt).flatten(0, 1), target_bt.flatten())


def train(args: argparse.Namespace) -> None:
    with start_session(seed=args.seed) as session:
        training, held_out = ByteCorpus.load(args.data, args.limit_bytes).split()
        share = {"rank": session.rank, "world_size": session.world_size, "seed": args.seed}
        loader = WindowLoader(training, args.window, args.batch_size, **share)
        validation = WindowLoader(held_out, args.window, args.batch_size, **share)
        eval_batches = [next(validation) for _ in range(args.eval_batches)]

        torch.manual_seed(args.seed)
        plain = ByteGPT(args.window, args.channels, args.layers, args.heads, args.dropout).to(session.device)
        model = session.distributed(plain, lambda ddp: loss_of(ddp, eval_batches[0], session.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
        torch.manual_seed(args.seed + session.rank)  # every rank drops out other neurons

        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(model, optimizer, scheduler=scheduler, loader=loader)
        metrics = dict(loaded.metrics)

        def save(step: int) -> None:
            checkpoints.save(model, optimizer, step=step, metrics=metrics, scheduler=scheduler, loader=loader)

        log_at = Progress(args, session.is_lead)
        for step in session.steps(start=loaded.step, until=args.steps, save=save):
            if step % args.eval_every == 0:
                model.eval()
                with torch.no_grad():
                    losses = [loss_of(plain, batch, session.device) for batch in session.evaluating(eval_batches)]
                model.train()
                log_at.evaluation(step, float(torch.stack(losses).mean()))

            time.sleep(args.step_delay)
            optimizer.zero_grad(set_to_none=True)
            loss = backward_in_parts(model, next(loader), session.micro_batch(args.batch_size), session.device)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

            metrics["loss"] = loss.item()
            session.report(loss=metrics["loss"])
            log_at.step(step, metrics["loss"], args.batch_size * session.world_size * args.window)

        if session.is_lead:
            print(f"final weights sha256: {weights_digest(plain)}")
            print(f"finished step {max(loaded.step, args.steps)}", flush=True)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> torch.Tensor:
    """The loss of one batch; shape ()."""
    input_bt, target_bt = batch
    loss: torch.Tensor = model(input_bt.to(device), target_bt.to(device))
    return loss


def backward_in_parts(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], micro_batch: int, device: torch.device
) -> torch.Tensor:
    """Add up the gradients of equal parts of ``batch`` (one, unless memory was short before); returns the mean loss."""
    parts = list(zip(*(torch.split(tensor, micro_batch) for tensor in batch), strict=True))
    total = torch.zeros((), device=device)
    for number, part in enumerate(parts, start=1):
        is_last = number == len(parts)
        with contextlib.nullcontext() if is_last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            loss = loss_of(model, part, device) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


class Progress:
    """One line on the lead's standard output every ``--log-every`` steps."""

    def __init__(self, args: argparse.Namespace, is_lead: bool) -> None:
        self.every = args.log_every if is_lead else 0
        self.until = args.steps
        self.tokens = 0
        self.since_s = time.monotonic()

    def step(self, step: int, loss: float, tokens: int) -> None:
        self.tokens += tokens
        if self.every and (step % self.every == 0 or step == self.until - 1):
            now_s = time.monotonic()
            rate = self.tokens / max(now_s - self.since_s, 1e-9)
            print(f"step {step:6d}/{self.until}  loss {loss:.4f}  {rate:9.0f} tokens/s", flush=True)
            self.tokens, self.since_s = 0, now_s

    def evaluation(self, step: int, loss: float) -> None:
        if self.every:
            print(f"step {step:6d}/{self.until}  held-out loss {loss:.4f}", flush=True)


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="byte_gpt", description="Train a byte-level GPT; resumes by itself.")
    parser.add_argument("--data", type=Path, help="text file or folder (default: Python's standard library)")
    parser.add_argument("--limit-bytes", type=positive, default=8 << 20, help="read at most this much of it")
    parser.add_argument("--steps", type=positive, default=200, help="training steps in all, over all attempts")
    parser.add_argument("--batch-size", type=positive, default=8, help="windows per rank and step")
    parser.add_argument("--window", type=positive, default=128, help="bytes per window")
    parser.add_argument("--channels", type=positive, default=128, help="width; a multiple of --heads")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--eval-every", type=positive, default=50, help="steps between evaluations")
    parser.add_argument("--eval-batches", type=positive, default=4, help="batches per evaluation and rank")
    parser.add_argument("--log-every", type=positive, default=10, help="steps between progress lines")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait in a step, for demonstrations")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args(argv)
    if args.channels % args.heads:
        parser.error(f"--channels {args.channels} is not a multiple of --heads {args.heads}")
    return args


if __name__ == "__main__":
    train(parse())
