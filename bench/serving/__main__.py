"""An endpoint: what a router adds to each request, how long a dead replica is felt, and what an idle router costs.

python bench/serving --output bench/results/serving.md     # nothing else should run meanwhile

LiteLLM's proxy is compared where it is installed in an environment of its own, as its dependencies are not ours:
python -m venv build/litellm && build/litellm/bin/pip install 'litellm[proxy]', then --litellm build/litellm/bin/litellm
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import yaml

import slurmft
from slurmft.inference.endpoint import HighAvailabilityCluster, ca_file, token_of

ENGINE = Path(__file__).with_name("engine.py")
SLURMFT = [sys.executable, "-m", "slurmft"]
DIRECT_PORT, NGINX_PORT, LITELLM_PORT = 18_765, 18_766, 18_767
RATE, LOW_RATE, SECONDS = 200, 20, 5.0
"""Requests a second. One process of LiteLLM's proxy does not keep up with the first on two cores."""

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
Ways = dict[str, tuple[str, dict[str, str]]]
"""Name of a proxy: its address, and the headers that it wants."""

PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of one round: to the first byte, and to the last."""

    first: list[float]
    last: list[float]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wait(condition: Callable[[], object], what: str, of: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if any(process.poll() is not None for process in of):
            raise RuntimeError(f"a process that was to be {what} has ended")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {PATIENCE_S:.0f} s")
        time.sleep(0.02)


class Endpoint:
    """On this machine: one node with a router, and two replicas."""

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        self.path = folder / "endpoint"
        config = folder / "serve.yaml"
        engine = {"command": [sys.executable, str(ENGINE), "--socket", "{socket}"]}
        serving = {"routers": 1, "tls_own": tls}
        section = {"engine": engine, "replicas_per_node": 2, "concurrency": 256, "serving": serving}
        config.write_text(yaml.safe_dump({"run_folder": str(self.path), "nodes": 1, "inference": section}))
        subprocess.run([*SLURMFT, "serve", str(config), "--cluster", "local"], check=True, capture_output=True)
        wait(lambda: HighAvailabilityCluster.read(self.path).available, "router")
        self.url = HighAvailabilityCluster.read(self.path).routers[0].urls[0]
        self.headers = {"Authorization": f"Bearer {token_of(self.path)}"}
        self.wait_for_replicas()

    def wait_for_replicas(self) -> None:
        asked = urllib.request.Request(f"{self.url}/status", headers=self.headers)
        trusted = ssl.create_default_context(cafile=ca_file(self.path)) if self.url.startswith("https") else None

        def are_ready() -> bool:
            with urllib.request.urlopen(asked, timeout=10, context=trusted) as answer:
                return bool(json.load(answer)["replicas"]["ready"] == 2)

        wait(are_ready, "replicas")

    @property
    def router(self) -> psutil.Process:
        port = int(self.url.rpartition(":")[2])
        (pid,) = [each.pid for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port
                  and each.status == psutil.CONN_LISTEN]  # fmt: skip
        return psutil.Process(pid)

    def engines(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if str(ENGINE) in (each.info["cmdline"] or [])
                and "--socket" in each.info["cmdline"]]  # fmt: skip

    def stop(self) -> None:
        subprocess.run([*SLURMFT, "stop", str(self.path), "--timeout", "30"], check=True, capture_output=True)


async def one(session: aiohttp.ClientSession, url: str, into: Times) -> None:
    began = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=ASKED) as answer:
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {(await answer.text())[:500]}")
        await answer.content.readany()
        into.first.append((time.perf_counter() - began) * 1e3)
        await answer.content.read()
        into.last.append((time.perf_counter() - began) * 1e3)


async def at_rate(url: str, headers: dict[str, str], rate: int) -> Times:
    """Requests at fixed times, whatever became of the ones before."""
    into, loop = Times([], []), asyncio.get_running_loop()
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session, url, Times([], [])) for _ in range(20)))
        began, tasks = loop.time(), []
        for number in range(int(rate * SECONDS)):
            await asyncio.sleep(began + number / rate - loop.time())
            tasks.append(asyncio.create_task(one(session, url, into)))
        await asyncio.gather(*tasks)
    return into


NGINX = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


def start_nginx(folder: Path) -> dict[str, tuple[subprocess.Popen[bytes], str]]:
    """In front of the engine, where it is installed: its process and address."""
    if (nginx := shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")) is None:
        return {}
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, engine=DIRECT_PORT, port=NGINX_PORT))
    argv = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx.log")]
    return {"nginx": (subprocess.Popen(argv), f"http://127.0.0.1:{NGINX_PORT}")}


def answers(url: str) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=1):
        return True
    return False


LITELLM = """
model_list:
  - model_name: m
    litellm_params: {{model: openai/m, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
"""


def start_litellm(folder: Path, program: Path | None, key: str) -> dict[str, tuple[subprocess.Popen[bytes], str]]:
    """In front of the engine, one process of it, as a router is."""
    if program is None:
        return {}
    (folder / "litellm.yaml").write_text(LITELLM.format(engine=DIRECT_PORT))
    argv = [str(program.absolute()), "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port",
            str(LITELLM_PORT), "--num_workers", "1"]  # fmt: skip
    offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR",
               "LITELLM_MASTER_KEY": key}  # fmt: skip
    with (folder / "litellm.log").open("wb") as log:
        started = subprocess.Popen(argv, env=offline, cwd=folder, stdout=log, stderr=log)
    return {"LiteLLM": (started, f"http://127.0.0.1:{LITELLM_PORT}")}


def latency(endpoint: Endpoint, rounds: int, folder: Path, litellm: Path | None) -> list[str]:
    """Of all that there is at the low rate, of those that keep up with it at the full one."""
    direct = subprocess.Popen([sys.executable, str(ENGINE), "--port", str(DIRECT_PORT)])
    processes, lines, key = [direct], list[str](), f"sk-{secrets.token_hex(32)}"
    try:
        fast, slow = start_nginx(folder), start_litellm(folder, litellm, key)
        processes += [process for process, _ in [*fast.values(), *slow.values()]]
        for url in [f"http://127.0.0.1:{DIRECT_PORT}", *(url for _, url in [*fast.values(), *slow.values()])]:
            wait(lambda url=url: answers(url), url, processes)
        ways = {"slurmft": (endpoint.url, endpoint.headers), **{name: (url, {}) for name, (_, url) in fast.items()}}
        goals = {"first p50": "<= 1", "first p99": "<= 5"}
        lines += added(ways, RATE, rounds, goals)
        if slow:
            known = {name: (url, {"Authorization": f"Bearer {key}"}) for name, (_, url) in slow.items()}
            lines += added({**ways, **known}, LOW_RATE, rounds, {})
        lines += own_time(endpoint)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    return lines


def added(ways: Ways, rate: int, rounds: int, goals: dict[str, str]) -> list[str]:
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        say(f"  {rate} a second: round {number + 1} of {rounds}")
        alone = asyncio.run(at_rate(f"http://127.0.0.1:{DIRECT_PORT}", {}, rate))
        for name, (url, headers) in ways.items():
            routed = asyncio.run(at_rate(url, headers, rate))
            for what in ("first", "last"):
                for share in (50, 99):
                    cut = [statistics.quantiles(getattr(each, what), n=100)[share - 1] for each in (routed, alone)]
                    found.setdefault((f"{what} p{share}", name), []).append(cut[0] - cut[1])
    lines = [f"## Added to a request, at {rate} a second, streams of ten events", "",
             f"Through a proxy less straight from an engine, one after the other in {rounds} rounds, ms: median "
             "(min - max). nginx passes requests on to one engine without a look at them: the floor.", "",
             f"| byte | {' | '.join(ways)} | goal of slurmft |",
             "|---" * (len(ways) + 2) + "|"]  # fmt: skip
    for byte in dict.fromkeys(byte for byte, _ in found):
        values = [found[byte, name] for name in ways]
        shown = [f"{statistics.median(each):.2f} ({min(each):.2f} - {max(each):.2f})" for each in values]
        lines.append(f"| {byte} | {' | '.join(shown)} | {goals.get(byte, '')} |")
    return [*lines, ""]


def own_time(endpoint: Endpoint) -> list[str]:
    """What a request costs, whatever else runs on the machine."""
    groups = {"the router": [endpoint.router], "the gates": [each.parent() for each in endpoint.engines()]}
    found: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(5):
        before = {name: busy_s(each) for name, each in groups.items()}
        asyncio.run(at_rate(endpoint.url, endpoint.headers, RATE))
        for name, each in groups.items():
            found[name].append((busy_s(each) - before[name]) / (RATE * SECONDS) * 1e3)
    told = ", ".join(f"{name} {statistics.median(each):.2f} ({min(each):.2f})" for name, each in found.items())
    told = f"Of a stream of eleven parts, ms, median (least) of five rounds at {RATE} a second: {told}."
    return ["## Processor time of a request", "", told, ""]


def busy_s(processes: Sequence[psutil.Process | None]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes if each is not None)


def failover(endpoint: Endpoint, rounds: int) -> list[str]:
    """The longest of the requests that ran when an engine was killed."""
    longest, failed = [], 0
    for _ in range(rounds):

        async def work() -> tuple[float, int]:
            into, errors = Times([], []), 0
            timeout = aiohttp.ClientTimeout(total=30)
            async with aiohttp.ClientSession(headers=endpoint.headers, timeout=timeout) as session:
                for number in range(100):
                    if number == 20:
                        endpoint.engines()[0].kill()
                    try:
                        await asyncio.gather(*(one(session, endpoint.url, into) for _ in range(4)))
                    except (aiohttp.ClientError, RuntimeError):
                        errors += 1
            return max(into.first), errors

        worst, errors = asyncio.run(work())
        longest.append(worst / 1e3)
        failed += errors
        endpoint.wait_for_replicas()
        if len(longest) == 3:
            break  # a fourth death within the window and the replica stays down
    return ["## A killed replica", "",
            "Longest time to the first byte of 400 requests, 4 at a time, while an engine gets SIGKILL: "
            f"{max(longest):.3f} s, of {len(longest)} kills (goal <= 0.3 s). Requests that failed: {failed}.",
            ""]  # fmt: skip


def idle(endpoint: Endpoint) -> list[str]:
    router = endpoint.router
    before, began = router.cpu_times(), time.monotonic()
    time.sleep(20)
    after = router.cpu_times()
    share = (after.user + after.system - before.user - before.system) / (time.monotonic() - began)
    return ["## An idle router", "", f"{share:.2%} of a core over 20 s (goal <= 1 %).", ""]


def memory(endpoint: Endpoint, requests: int) -> list[str]:
    router, sizes = endpoint.router, []

    async def work() -> None:
        async with aiohttp.ClientSession(headers=endpoint.headers) as session:

            async def many(count: int) -> None:
                for _ in range(count):
                    async with session.get(f"{endpoint.url}/v1/models") as answer:
                        await answer.read()

            for _ in range(10):
                await asyncio.gather(*(many(requests // 10 // 50) for _ in range(50)))
                sizes.append(router.memory_info().rss / 2**20)

    began = time.monotonic()
    asyncio.run(work())
    rate = requests / (time.monotonic() - began)
    told = ", ".join(f"{size:.1f}" for size in sizes)
    return [f"## Memory over {requests} requests", "",
            f"MiB after each tenth: {told} (goal: flat). {rate:.0f} requests a second, 50 at a time.", ""]  # fmt: skip


def strangers(folder: Path, count: int = 10_000, seconds: float = 30.0) -> list[str]:
    """Connections that prove nothing: memory of a router, and its clients meanwhile."""
    lines = [f"## {count} strangers", "",
             "Each says nothing, half a request or half a TLS hello, and comes again as soon as it is cut off, for "
             f"{seconds:.0f} s; ten clients of another address connect anew for each request.", "",
             "| | connections of strangers, at once | memory before, most, MiB | requests of clients, failed "
             "| p50, p99, s |", "|---|---|---|---|---|"]  # fmt: skip
    script = Path(__file__).parents[2] / "tests" / "slurm" / "serving_strangers.py"
    for scheme in ("http", "https"):
        (folder / scheme).mkdir()
        endpoint = Endpoint(folder / scheme, tls=scheme == "https")
        try:
            router, sizes = endpoint.router, list[float]()
            argv = [sys.executable, str(script), str(endpoint.path), str(count), str(seconds)]
            with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as siege:
                assert siege.stdout is not None
                while siege.poll() is None:
                    sizes.append(router.memory_info().rss / 2**20)
                    time.sleep(0.2)
                told = json.loads(siege.stdout.read())
        finally:
            endpoint.stop()
        failed = sum(told["errors"].values())
        lines.append(f"| {scheme} | {told['opened']}, {told['at_once']} | {sizes[0]:.0f}, {max(sizes):.0f} "
                     f"| {told['asked']}, {failed} | {told['p50_s']:.2f}, {told['p99_s']:.2f} |")  # fmt: skip
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/serving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100_000, help="for the memory")
    parser.add_argument("--litellm", type=Path, help="its program, in an environment of its own")
    parser.add_argument("--parts", default="latency,failover,idle,memory,strangers")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    lines = ["# Serving", "",
             f"`python bench/serving` on {os.cpu_count()} cores, {platform.system()}, Python "
             f"{platform.python_version()}, slurmft {slurmft.__version__}; client, router, gates, engines share them. "
             f"Processes that wanted to run when it began (load average): {load:.1f}.", ""]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        endpoint = Endpoint(Path(folder))
        try:
            parts: dict[str, Callable[[], list[str]]] = {
                "latency": lambda: latency(endpoint, args.rounds, Path(folder), args.litellm),
                "failover": lambda: failover(endpoint, args.rounds), "idle": lambda: idle(endpoint),
                "memory": lambda: memory(endpoint, args.requests), "strangers": lambda: strangers(Path(folder)),
            }  # fmt: skip
            for name in args.parts.split(","):
                lines += parts[name]()
        finally:
            endpoint.stop()
    if args.output:
        args.output.write_text("\n".join(lines))
    else:
        print("\n".join(lines))


main()
