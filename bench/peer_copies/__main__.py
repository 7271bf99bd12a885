"""How fast one shard is copied to another node's memory, over loopback, by the real sender and the real keeper.

    python bench/peer_copies --output bench/results/peer_copies.md     # six minutes, and 6 GB in /dev/shm

Sender and keeper are two processes, as on a cluster; neither imports torch. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import steps
import xxhash

import slurmft
from slurmft.checkpoint.image_file import Item, ShardIndex, write_index
from slurmft.checkpoint.replicas import Peer, send_copy
from slurmft.storage.checkpoint_names import KEY_FILE, PEERS, Identity, announcement
from slurmft.system.files import write_json

PIECE = 1 << 20


def staged(folder: Path, size: int) -> Callable[[int], tuple[Path, Path]]:
    """An image, and a function that makes it another step's."""
    image, items = folder / "shard-0.a.image", []
    with image.open("wb") as stream:
        for start in range(0, size, 64 * PIECE):
            piece = os.urandom(min(64 * PIECE, size - start))
            stream.write(piece)
            items.append(Item(key=f"part{start}", kind="object", offset=start, length=len(piece), data_offset=start,
                              data_length=len(piece), digest=xxhash.xxh3_128_hexdigest(piece)))  # fmt: skip

    def of_step(step: int) -> tuple[Path, Path]:
        index = ShardIndex(identity=Identity(step, 1, step), shard=0, shards=1, size_bytes=size, items=tuple(items))
        write_index(image.with_suffix(".json"), index, durable=False)
        return image.with_suffix(".json"), image

    return of_step


def copies(size: int, number: int) -> list[tuple[float, float, float]]:
    """Of each copy: seconds, processor seconds of the sender, of the keeper. The first two meet new memory."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="slurmft-bench-"))
    try:
        memory, mine = root / "memory", root / "mine"
        (memory / PEERS).mkdir(parents=True)
        mine.mkdir()
        key = memory / KEY_FILE
        key.write_bytes(os.urandom(32).hex().encode())
        of_step, found = staged(mine, size), []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            keeper = [sys.executable, "-P", "-m", "slurmft.checkpoint.replicas"]
            argv = [*keeper, str(memory), str(listener.fileno())]
            peer = Peer(place=0, announcement=announcement(root, 0))
            write_json(peer.announcement, {"hosts": ["127.0.0.1"], "port": listener.getsockname()[1]}, durable=False)
            with subprocess.Popen(argv, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL) as keeper:
                for step in range(1, number + 3):
                    paths = of_step(step)
                    before, sender = sum(psutil.Process(keeper.pid).cpu_times()[:2]), time.process_time()
                    began = time.monotonic()
                    problem = send_copy(*paths, peer, key)
                    took = time.monotonic() - began
                    assert not problem, problem
                    found.append((took, time.process_time() - sender,
                                  sum(psutil.Process(keeper.pid).cpu_times()[:2]) - before))  # fmt: skip
                keeper.kill()
        return found
    finally:
        shutil.rmtree(root, ignore_errors=True)


def hashes() -> list[tuple[str, float]]:
    """What keyed hashes of Python's standard library cost here, in GB/s, over pieces as they are sent."""
    piece, key = memoryview(bytearray(os.urandom(PIECE))), os.urandom(32)
    ways = {
        "HMAC-SHA256": lambda: hmac.digest(key, piece, "sha256"),
        "HMAC-SHA512": lambda: hmac.digest(key, piece, "sha512"),
        "BLAKE2b, keyed": lambda: hashlib.blake2b(piece, key=key, digest_size=32).digest(),
        "BLAKE2s, keyed": lambda: hashlib.blake2s(piece, key=key).digest(),
        "xxh3_128, no key": lambda: xxhash.xxh3_128_digest(piece),
    }
    rows = []
    for name, way in ways.items():
        best = min(_seconds(way) for _ in range(5))
        rows.append((name, PIECE / best / 1e9))
    return rows


def _seconds(way: Callable[[], bytes]) -> float:
    began = time.perf_counter()
    for _ in range(64):
        way()
    return (time.perf_counter() - began) / 64


def of_version(folder: Path, size: int, number: int) -> list[tuple[float, float, float]]:
    """The same, measured by this script with the slurmft in a folder."""
    argv = [sys.executable, __file__, "--size", str(size), "--number", str(number), "--raw"]
    environment = {**os.environ, "PYTHONPATH": str(folder.absolute())}
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, check=True)
    return [tuple(each) for each in json.loads(done.stdout)]


def row(name: str, size: int, found: list[tuple[float, float, float]]) -> str:
    rates = [size / took / 1e9 for took, _, _ in found]
    cells = [f"{statistics.median(rates):.2f} ({min(rates):.2f} - {max(rates):.2f}) GB/s"]
    for place in (1, 2):
        values = [each[place] for each in found]
        cells.append(f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f}) s")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1_000_000_000, help="Bytes of one copy.")
    parser.add_argument("--number", type=int, default=5, help="Copies in each round.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="A checkout of another version, measured in turns with this one.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--raw", action="store_true", help="One round of this version alone, as JSON.")
    args = parser.parse_args()
    if args.raw:
        print(json.dumps(copies(args.size, args.number)[2:]))
        return
    versions = {"this version": Path(slurmft.__file__).parents[1]}
    if args.against:
        versions = {"the version before": args.against, **versions}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in versions}
    for _ in range(args.rounds):
        for name, folder in versions.items():
            found[name] += of_version(folder, args.size, args.number)
    against = " --against CHECKOUT" if args.against else ""
    lines = [
        "# Copies in the memory of other nodes", "",
        f"`python bench/peer_copies{against} --output {args.output or 'FILE'}`, slurmft {slurmft.__version__}", "",
        f"One machine with {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; loopback, "
        f"copies of {args.size / 1e9:g} GB into memory that was used before. Medians (min - max) of "
        f"{args.rounds * args.number}; load when it ended: {os.getloadavg()[0]:.1f}.", "",
        "| | throughput | processor time of the sender | processor time of the keeper |", "|---|---|---|---|",
        *(row(name, args.size, each) for name, each in found.items()), "",
        "Keyed hashes of the standard library on this machine, one core, pieces of 1 MiB:", "", "| hash | GB/s |",
        "|---|---|", *(f"| {name} | {rate:.2f} |" for name, rate in hashes()),
    ]  # fmt: skip
    lines += steps.table()
    lines += ["", f"Load when that ended: {os.getloadavg()[0]:.1f}."]
    if os.getloadavg()[0] > (os.cpu_count() or 1) + 2:
        lines += [
            "",
            "Other work ran on the machine meanwhile: an idle one is faster; what compares is processor time.",
        ]
    text = "\n".join(lines) + "\n"
    if args.output is not None:
        args.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
