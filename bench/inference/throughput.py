"""Requests per second through the pool and through a plain client, with the same engine."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from running import ENGINE, EngineLog, LocalBatch, say, verdict, write_prompts

ASKED = 0.98
SECONDS = 6.0
"""Length of one measurement, as far as the engine's pause decides."""


def through_the_pool(pause_s: float, concurrency: int, count: int) -> float:
    """Requests per second."""
    with tempfile.TemporaryDirectory(prefix="inference-") as name:
        batch = LocalBatch(Path(name), count=count, pause_s=pause_s, concurrency=concurrency)
        with batch.running() as process:
            batch.finish(process)
        assert batch.answers() == count
        return count / batch.log.seconds()


def by_a_plain_client(pause_s: float, concurrency: int, count: int) -> float:
    """Requests per second."""
    with tempfile.TemporaryDirectory(prefix="inference-") as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", count)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = EngineLog(folder / "engine.log")
        with subprocess.Popen([sys.executable, ENGINE, str(port), str(pause_s), str(log.path)]) as engine:
            try:
                answers = asyncio.run(_drive(folder / "prompts.jsonl", f"http://127.0.0.1:{port}", concurrency))
            finally:
                engine.kill()
        assert len(answers) == count
        return count / log.seconds()


async def _drive(prompts: Path, base: str, concurrency: int) -> list[Any]:
    """As many loops as may be in flight, each with one request at a time."""
    answers: list[Any] = []
    requests = iter([json.loads(line) for line in prompts.read_text().splitlines()])

    async def loop(session: aiohttp.ClientSession, requests: Iterator[Any]) -> None:
        for request in requests:
            async with session.post(f"{base}/v1/chat/completions", json={"prompt": request["prompt"]}) as response:
                answers.append(await response.json())

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while True:
            try:
                async with session.get(f"{base}/health") as response:
                    if response.status == 200:
                        break
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
        await asyncio.gather(*(loop(session, requests) for _ in range(concurrency)))
    return answers


def tables(rounds: int) -> list[str]:
    lines = [
        "## Throughput", "",
        f"One replica; requests for {SECONDS:g} s as far as the engine's pause decides. From the first request to the "
        f"last answer in the engine's log. Ratios of one round, ours right after the plain client. Asked: {ASKED:.0%}.",
        "", "| pause | at a time | plain aiohttp client, requests/s | slurmft, requests/s | ratio | |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for pause_s in (0.05, 0.2):
        for concurrency in (16, 32):
            count = round(concurrency * SECONDS / pause_s)
            plain, ours = [], []
            for _ in range(rounds):
                plain.append(by_a_plain_client(pause_s, concurrency, count))
                ours.append(through_the_pool(pause_s, concurrency, count))
                say(f"{pause_s} s, {concurrency} at a time: {plain[-1]:.1f} plain, {ours[-1]:.1f} ours, "
                    f"{ours[-1] / plain[-1]:.3f}")  # fmt: skip
            ratios = [own / other for own, other in zip(ours, plain, strict=True)]
            ratio = statistics.median(ratios)
            lines.append(
                f"| {1000 * pause_s:.0f} ms | {concurrency} | {statistics.median(plain):.1f} | "
                f"{statistics.median(ours):.1f} | {ratio:.1%} ({min(ratios):.1%} - {max(ratios):.1%}) | "
                f"{verdict(ratio >= ASKED)} |"
            )
    return [*lines, ""]
