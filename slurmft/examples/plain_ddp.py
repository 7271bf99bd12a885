"""A torchrun script as people write them: it imports nothing of slurmft, and slurmft runs it unchanged.

    torchrun --nproc-per-node 2 plain_ddp.py --steps 200 --checkpoint /shared/plain.pt

It learns a fixed random function, saves every few steps, and resumes from what it saved. Killed between two saves, it
repeats the steps since the last one. On one or two ranks its weights then end bit for bit the same; on more, DDP sums
gradients in another order in the first step of a process, and only their last bits differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    temporary.replace(path)


def batch(step: int, rank: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    x = torch.randn(size, 32, generator=generator).to(device)
    return x, torch.sin(x.cumsum(dim=1))


def weights_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes(tensor.cpu().contiguous().view(torch.uint8).flatten().tolist()))
    return digest.hexdigest()


def train(args: argparse.Namespace) -> None:
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo", init_method="env://")
    rank = dist.get_rank()

    torch.manual_seed(args.seed)
    plain = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)).to(device)
    model = DistributedDataParallel(plain, device_ids=[device] if use_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    first = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        if rank == 0:
            print(f"resuming at step {first}", flush=True)

    for step in range(first, args.steps):
        x, y = batch(step, rank, args.batch_size, device)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0 and step % args.log_every == 0:
            print(f"step {step}/{args.steps} loss {loss.item():.4f}", flush=True)
        if rank == 0 and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            save(args.checkpoint, step + 1, plain, optimizer)
        time.sleep(args.step_delay)

    dist.barrier()
    if rank == 0:
        print(f"final weights sha256: {weights_sha256(plain)}")
        print(f"finished step {args.steps}", flush=True)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("plain.pt"))
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-delay", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
