"""The driver of an endpoint's replica: a real engine behind it, its agent and a router played by the test."""

import asyncio
import json
import os
import sys
from pathlib import Path

import yaml

from slurmft.inference.driver import EXIT_SICK, SETTINGS_VARIABLE, ReplicaSettings
from slurmft.inference.endpoint import key_of, prepare
from slurmft.inference.gate import REQUESTS, knock

LINGERS = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.server.is_done = True
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.is_done = False
while not server.is_done:
    server.handle_request()
server.server_close()
time.sleep(300)
"""


async def test_an_engine_that_lives_behind_a_closed_port_is_ended(tmp_path: Path) -> None:
    """As one that waits for processes of its own at its end: it would be ready for ever, and fail what it gets."""
    given = {"engine": {"command": [sys.executable, "-c", LINGERS, "{port}"]}, "serving": {}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"run_folder": str(tmp_path), "inference": given}))
    prepare(tmp_path, None)
    settings = ReplicaSettings(socket=str(tmp_path / "s"), config=str(config), generation=1, node=0, replica=0, life=1,
                               device="")  # fmt: skip
    ports: asyncio.Queue[int] = asyncio.Queue()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            told = json.loads(line)
            if told["kind"] == "ready":
                ports.put_nowait(told["port"])
        writer.close()

    environment = {**os.environ, SETTINGS_VARIABLE: settings.as_text(), "SLURMD_NODENAME": "127.0.0.1"}
    argv = [sys.executable, "-m", "slurmft.inference.gate"]
    async with asyncio.timeout(60), await asyncio.start_unix_server(hear, tmp_path / "s"):
        driver = await asyncio.create_subprocess_exec(*argv, env=environment)
        port = await ports.get()
        while driver.returncode is None:
            try:
                (await knock("127.0.0.1", port, key_of(tmp_path), REQUESTS)).close()
            except OSError:  # it has ended
                break
            await asyncio.sleep(0.05)
        assert await driver.wait() == EXIT_SICK
