"""The process of one router, which its agent starts and starts again.

    python -m slurmft.inference.serving.entry      (forked by the agent's zygote)

Over a Unix socket in the agent's private folder it hears which replicas there are, one JSON object a line, and says
where it listens, then every second that it lives. When the agent is gone, so is the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
from pathlib import Path
from typing import Any

from slurmft.config.config import load
from slurmft.inference.serving.batches import Batches
from slurmft.inference.serving.certificates import context_for
from slurmft.inference.serving.endpoint import folder_of, is_local, key_of, token_of
from slurmft.inference.serving.listener import RouterServer
from slurmft.inference.serving.router import Router
from slurmft.inference.serving.router_settings import SETTINGS_VARIABLE, RouterSettings
from slurmft.system.agents_child import run_below_agent
from slurmft.system.token_file import token_in

ALIVE_S = 1.0
MAX_LINE_BYTES = 16 << 20


async def serve(settings: RouterSettings) -> int:
    """Route until the agent is gone; returns the exit code.

    Raises:
        SlurmftError: it cannot begin.
    """
    config = load(Path(settings.config))
    section = config.inference
    assert section is not None and section.serving is not None
    engine_token = token_in(section.engine.token_file) if section.engine.token_file is not None else ""
    router = Router(section, node=settings.node, token=token_of(config.run_folder), engine_token=engine_token,
                    key=key_of(config.run_folder))  # fmt: skip
    access = folder_of(config.run_folder) / f"access-{settings.node}.log" if section.serving.access_log else None
    server = RouterServer(router, section, access)
    reader, writer = await asyncio.open_unix_connection(settings.socket, limit=MAX_LINE_BYTES)

    def say(**message: Any) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    async def say_alive() -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            say(kind="alive", answered=router.answered, load=router.load)

    host, context = "127.0.0.1" if is_local(os.environ) else None, None
    if section.serving.tls_own:
        context = await asyncio.to_thread(context_for, config.run_folder, settings.hosts)
    port = await server.listen(host, settings.port, context)
    router.batches = Batches(
        folder_of(config.run_folder) / "batches", router, open_paths=section.engine.open_paths,
        slots=section.concurrency, tries=section.max_retries + 1, token=token_of(config.run_folder),
    )  # fmt: skip
    router.batches.begin(f"{'https' if section.serving.is_https else 'http'}://127.0.0.1:{port}")
    gc.collect()
    gc.freeze()  # what is there now stays: a full collection would hold requests up
    say(kind="ready", port=port)
    living = asyncio.create_task(say_alive())

    async def obey() -> None:
        leaving: asyncio.Task[None] | None = None
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                told = json.loads(line)
                router.replicas.take(told)
                if told.get("leave") and leaving is None:
                    leaving = asyncio.create_task(server.leave())
                    leaving.add_done_callback(lambda _task: obeying.cancel())

    obeying = asyncio.create_task(obey())
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await obeying
    finally:
        living.cancel()
        await server.close()
        await router.close()
        writer.close()
    return 0


def main() -> int:
    """Run the router that the environment describes."""
    return run_below_agent(lambda: serve(RouterSettings.from_text(os.environ.pop(SETTINGS_VARIABLE))))


if __name__ == "__main__":
    os._exit(main())
