"""Every node's agent asks its cloud whether this machine will be taken away, and its GPUs whether they work. Off where
there is no sign of a cloud, and none of GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import http.client
import importlib.util
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from slurmft.config.run import RunConfig
from slurmft.ipc.messages import NoticeReport
from slurmft.policy import site
from slurmft.system.background import end_child

# --- One question to a metadata service: plain HTTP, bounded in time and size, without redirects and proxies ---

TIMEOUT_S = 2.0
MAX_BODY_BYTES = 256 * 1024


class NoAnswer(Exception):
    """The service is not there, too slow, or does not answer in HTTP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """Names in small letters."""

    text: str


async def ask(
    endpoint: str, path: str, *, headers: Mapping[str, str], method: str = "GET", timeout_s: float = TIMEOUT_S
) -> Answer:
    """The answer, with any status; ``timeout_s`` is for all of it.

    Raises:
        NoAnswer: there was none.
    """
    host, port, base = _taken_apart(endpoint)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)

    def work() -> Answer:
        connection.request(method, f"{base}{path}", headers={**headers, "Connection": "close"})
        response = connection.getresponse()
        body = response.read(MAX_BODY_BYTES + 1)
        if len(body) > MAX_BODY_BYTES:
            raise ValueError("the answer is too long")
        found = {name.lower(): value for name, value in response.headers.items()}
        return Answer(status=response.status, headers=found, text=body.decode("utf-8", "replace"))

    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(work)
    except (OSError, ValueError, http.client.HTTPException) as error:  # TimeoutError, a line break in a token as well
        raise NoAnswer(f"{endpoint}: {error!r}") from error
    finally:
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # a thread that still reads ends now
        connection.close()


def _taken_apart(endpoint: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:
        raise NoAnswer(f"{endpoint!r} is not an address") from error
    if parts.scheme != "http" or not host:
        raise NoAnswer(f"{endpoint!r} does not begin with http://")
    return host, port, parts.path.rstrip("/")


# --- notices ---

FIRMWARE = Path("/sys/class/dmi/id")
_FACTS = ("sys_vendor", "product_name", "bios_version", "chassis_asset_tag")
TOKEN_TTL_S = 21_600
LONGEST_PAUSE_S = 60.0
"""Between two questions to a service that does not answer."""

GPU_WATCH = (sys.executable, "-P", "-m", "slurmft.health.gpu_watch")
"""A program of its own: a driver that hangs must not stop the agent."""

END_S = 2.0
AGAIN_S = 60.0
"""Pause after which the watch of GPUs is started again when something has ended it."""

MAX_LINE_BYTES = 8192
MAX_NOTICES = 100
"""Of one attempt's agent; a source that announces more is not believed, and must not fill the journal."""

log = logging.getLogger(__name__)


def firmware_facts(folder: Path = FIRMWARE) -> dict[str, str]:
    """The firmware's description of this machine; unreadable files are left out."""
    facts = {}
    for name in _FACTS:
        with contextlib.suppress(OSError):
            facts[name] = (folder / name).read_text(encoding="utf-8", errors="replace")[:1000]
    return facts


class Service(Protocol):
    """One cloud's metadata service."""

    async def look(self) -> list[site.Notice]:
        """The notices that are there now.

        Raises:
            NoAnswer: it cannot be asked.
        """


class Aws:
    """IMDSv2: a token first, then the questions."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint, self._token = endpoint, ""

    async def look(self) -> list[site.Notice]:
        """The spot notice and the rebalance recommendation."""
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
            answer = await ask(self._endpoint, "/latest/api/token", method="PUT", headers=headers)
            if answer.status != 200 or not answer.text.strip():
                raise NoAnswer(f"no token: status {answer.status}")
            self._token = answer.text.strip()
        action = await self._get("spot/instance-action")
        rebalance = await self._get("events/recommendations/rebalance")
        return _present(
            site.aws_action(action.text, _now(action)) if action.status == 200 else None,
            site.aws_rebalance(rebalance.text) if rebalance.status == 200 else None,
        )

    async def _get(self, path: str) -> Answer:
        headers = {"X-aws-ec2-metadata-token": self._token}
        answer = await ask(self._endpoint, f"/latest/meta-data/{path}", headers=headers)
        if answer.status == 401:
            self._token = ""  # it has expired
            raise NoAnswer("the token is not taken any more")
        return answer


class Gcp:
    """The metadata server's two values; an answer without Google's own header is ignored."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def look(self) -> list[site.Notice]:
        """Preemption and maintenance."""
        return _present(
            site.gcp_preempted(await self._value("preempted")),
            site.gcp_maintenance(await self._value("maintenance-event")),
        )

    async def _value(self, name: str) -> str:
        path = f"/computeMetadata/v1/instance/{name}"
        answer = await ask(self._endpoint, path, headers={"Metadata-Flavor": "Google"})
        is_googles = answer.headers.get("metadata-flavor", "").lower() == "google"
        return answer.text if answer.status == 200 and is_googles else ""


class Azure:
    """Scheduled events; the document names all machines of the set, so this one's own name is asked for first."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint, self._names, self._incarnation = endpoint, "", -1

    async def look(self) -> list[site.Notice]:
        """The events of this machine; nothing while the document is the same."""
        if not self._names:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._names = (await self._get(path)).text.strip()[:1000]
        answer = await self._get("/metadata/scheduledevents?api-version=2020-07-01")
        incarnation = site.azure_incarnation(answer.text)
        if incarnation is None:
            raise NoAnswer("this is not a document of scheduled events")
        if incarnation == self._incarnation:
            return []
        self._incarnation = incarnation
        return site.azure_events(answer.text, (self._names, socket.gethostname()), _now(answer))

    async def _get(self, path: str) -> Answer:
        answer = await ask(self._endpoint, path, headers={"Metadata": "true"})
        if answer.status != 200:
            raise NoAnswer(f"status {answer.status}")
        return answer


SERVICES: Mapping[site.Cloud, Callable[[str], Service]] = {
    site.Cloud.AWS: Aws,
    site.Cloud.GCP: Gcp,
    site.Cloud.AZURE: Azure,
}


class NoticeWatch:
    """Reports each notice once. No fault of a service or plug-in ends or delays the agent."""

    def __init__(
        self, config: RunConfig, environment: Mapping[str, str], report: Callable[[NoticeReport], None],
        *, firmware: Path = FIRMWARE,
    ) -> None:  # fmt: skip
        self._section, self._environment, self._report = config.notices, environment, report
        self._firmware = firmware
        self._seen: set[str] = set()

    async def run(self) -> None:
        """Watch until cancelled; returns at once where there is nothing to watch."""
        if self._section.enabled == "off":
            return
        places = site.endpoints(firmware_facts(self._firmware), self._environment)
        watches = [self._watch(cloud, SERVICES[cloud](place)) for cloud, place in places.items()]
        if self._section.plugin:
            watches.append(self._watch_plugin())
        if has_gpus():
            watches.append(self._watch_gpus())
        await asyncio.gather(*watches)

    async def _watch(self, cloud: site.Cloud, service: Service) -> None:
        pause_s = self._section.poll_seconds
        while True:
            try:
                for notice in await service.look():
                    self._tell(notice)
                pause_s = self._section.poll_seconds
            except NoAnswer as error:
                log.debug("%s says nothing: %s", cloud, error)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            await asyncio.sleep(pause_s)

    async def _watch_plugin(self) -> None:
        while True:
            try:
                await self._run(self._section.plugin, "plugin")
            except (OSError, ValueError) as error:
                log.warning("notices.plugin cannot be run: %s", error)
            await asyncio.sleep(self._section.poll_seconds)

    async def _watch_gpus(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (code := await self._run(GPU_WATCH, "gpu")) != 0:  # 0: there is nothing to watch
                log.warning("the watch of GPUs ended with code %d", code)
                await asyncio.sleep(AGAIN_S)

    async def _run(self, argv: Sequence[str], source: str) -> int:
        """Report what a program prints; returns its exit code."""
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            env=dict(self._environment), limit=MAX_LINE_BYTES, start_new_session=True,
        )  # fmt: skip
        try:
            while process.stdout is not None and (line := await process.stdout.readline()):
                if (notice := site.from_plugin(line.decode("utf-8", "replace"), source)) is not None:
                    self._tell(notice)
            return await process.wait()
        finally:
            await end_child(process, END_S)

    def _tell(self, notice: site.Notice) -> None:
        if notice.key in self._seen or len(self._seen) >= MAX_NOTICES:
            return
        self._seen.add(notice.key)
        self._report(
            NoticeReport(source=notice.source, what=notice.what, ends=notice.ends, left_s=notice.left_s, at=time.time(),
                         fault=notice.fault)
        )  # fmt: skip


def has_gpus() -> bool:
    """Whether NVIDIA's library and its Python binding are there. The driver is not asked."""
    try:
        return importlib.util.find_spec("pynvml") is not None and bool(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        return False


def _now(answer: Answer) -> float:
    return site.server_time(answer.headers.get("date", ""), time.time())


def _present(*notices: site.Notice | None) -> list[site.Notice]:
    return [notice for notice in notices if notice is not None]
