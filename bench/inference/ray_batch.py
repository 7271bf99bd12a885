"""The same batch with Ray Data: ``ray_batch.py FOLDER PAUSE_S CONCURRENCY REPLICAS ROWS_PER_BLOCK``; needs ray[data].

Each actor starts an engine and asks it a batch at a time. An actor whose engine is dead ends itself, for that is what
Ray restarts and tries again; an exception in a batch would end the whole run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp
import ray

FOLDER = Path(sys.argv[1])
PAUSE_S, CONCURRENCY, REPLICAS, ROWS = float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])


class EngineActor:
    """One replica."""

    def __init__(self, engine: str, pause_s: float, log: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        self._engine = subprocess.Popen([sys.executable, engine, str(port), str(pause_s), log])
        while True:
            try:
                with urlopen(f"{self._base}/health", timeout=5):
                    return
            except URLError:
                time.sleep(0.05)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        try:
            batch["text"] = asyncio.run(self._answer(list(batch["prompt"])))
        except aiohttp.ClientError:
            os._exit(1)
        return batch

    async def _answer(self, prompts: list[str]) -> list[str]:
        async with aiohttp.ClientSession() as session:

            async def one(prompt: str) -> str:
                address = f"{self._base}/v1/chat/completions"
                async with session.post(address, json={"prompt": str(prompt)}) as response:
                    return (await response.json())["text"]

            return list(await asyncio.gather(*map(one, prompts)))


def main() -> None:
    # ray starts processes by the number of CPUs, and an actor of its own takes one
    ray.init(num_cpus=REPLICAS + 2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    engine = str(Path(__file__).with_name("engine.py"))
    prompts = [line.split('"')[-2] for line in (FOLDER / "prompts.jsonl").read_text().splitlines()]
    dataset = ray.data.from_items([{"prompt": each} for each in prompts], override_num_blocks=len(prompts) // ROWS)
    answered = dataset.map_batches(
        EngineActor, fn_constructor_args=(engine, PAUSE_S, str(FOLDER / "engine.log")), batch_size=CONCURRENCY,
        compute=ray.data.ActorPoolStrategy(size=REPLICAS), num_cpus=1, max_restarts=-1, max_task_retries=-1,
    )  # fmt: skip
    shutil.rmtree(FOLDER / "answers", ignore_errors=True)
    answered.write_json(str(FOLDER / "answers"))
    print("written", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
