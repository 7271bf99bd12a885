"""A real Prometheus and a real Alertmanager on this machine's loopback, with the shipped rules at a test's pace."""

import http.server
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "configs"
NEEDED = ("prometheus", "prometheus-alertmanager", "promtool")
PACE = {"> 1800": "> 4", "> 120": "> 5", "> 21600": "> 3", "ratio) > 0.8": "ratio) > 0.2"}
"""The limits of the shipped rules, and those of the tests; every "for" is none."""


def unavailable() -> str:
    """Why these tests cannot run; empty when they can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"without {', '.join(missing)}: apt-get install prometheus prometheus-alertmanager" if missing else ""


def quick_rules() -> str:
    text = (CONFIGS / "prometheus" / "slurmft.rules.yml").read_text()
    for shipped, quick in PACE.items():
        assert shipped in text, shipped
        text = text.replace(shipped, quick)
    return re.sub(r"for: \w+", "for: 0s", text)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Monitoring:
    """Scrapes ``sources`` (path -> text, as node_exporter would serve files), and keeps the alerts that were sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: dict[str, Callable[[], str]] = {}
        self.alerts: dict[tuple[str, str], dict[str, Any]] = {}
        """By the alert's name and its run (or node), as they came to the receiver."""
        self.port, self._manager_port = free_port(), free_port()
        self._server = self._serve()
        self._processes: list[subprocess.Popen[bytes]] = []

    def _serve(self) -> http.server.ThreadingHTTPServer:
        world = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                source = world.sources.get(self.path)
                try:
                    body = source().encode() if source is not None else b""
                except FileNotFoundError:
                    body = b""
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in told["alerts"]:
                    labels = alert["labels"]
                    where = labels.get("run") or labels.get("node") or ""
                    world.alerts.setdefault((labels["alertname"], where), alert)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def start(self, paths: list[str]) -> None:
        own = f"127.0.0.1:{self._server.server_address[1]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "slurmft.rules.yml").write_text(quick_rules())
        scraped = [{"job_name": path.strip("/"), "metrics_path": path, "static_configs": [{"targets": [own]}]}
                   for path in paths]  # fmt: skip
        settings = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["slurmft.rules.yml"],
            "scrape_configs": scraped,
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{self._manager_port}"]}]}]},
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        receiver = {"name": "test", "webhook_configs": [{"url": f"http://{own}/alerts"}]}
        route = {"receiver": "test", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
        (self.folder / "alertmanager.yml").write_text(yaml.safe_dump({"route": route, "receivers": [receiver]}))
        self._start("prometheus-alertmanager", f"--config.file={self.folder}/alertmanager.yml",
                    f"--storage.path={self.folder}/manager", "--cluster.listen-address=",
                    f"--web.listen-address=127.0.0.1:{self._manager_port}")  # fmt: skip
        self._start("prometheus", f"--config.file={self.folder}/prometheus.yml",
                    f"--storage.tsdb.path={self.folder}/data",
                    f"--web.listen-address=127.0.0.1:{self.port}")  # fmt: skip
        self._wait(lambda: self._is_ready(self.port) and self._is_ready(self._manager_port), 60, "they are ready")

    def _start(self, *words: str) -> None:
        log = (self.folder / f"{words[0]}.log").open("wb")
        self._processes.append(subprocess.Popen(words, stdout=log, stderr=log, cwd=self.folder))
        log.close()

    @staticmethod
    def _is_ready(port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2):
                return True
        except OSError:
            return False

    def shown(self, expression: str, since: float) -> list[Any]:
        """What a panel shows of the time since then; fails where the query cannot be parsed."""
        words = urllib.parse.urlencode({"query": expression, "start": since, "end": time.time(), "step": "1"})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/query_range?{words}", timeout=60) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success", found
        return list(found["data"]["result"])

    def wait_for(self, alert: str, where: str, within_s: float = 120) -> dict[str, Any]:
        """Until Alertmanager has sent it."""
        what = f"{alert} of {where}, beside {sorted(self.alerts)}"
        self._wait(lambda: (alert, where) in self.alerts, within_s, what)
        return self.alerts[alert, where]

    @staticmethod
    def _wait(condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {within_s:.0f} s: {what}", pytrace=True)
            time.sleep(0.2)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def monitoring(folder: Path, sources: dict[str, Callable[[], str]]) -> Iterator[Monitoring]:
    """One that scrapes these."""
    world = Monitoring(folder)
    world.sources.update(sources)
    try:
        world.start(list(sources))
        yield world
    finally:
        world.stop()


def expressions(dashboard: str) -> list[tuple[str, str]]:
    """Title and query of each target of a dashboard, variables as they stand."""
    panels = json.loads((CONFIGS / "grafana" / f"{dashboard}.json").read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
