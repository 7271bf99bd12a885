"""Clients of an endpoint that count what becomes of their requests.

python serving_load.py RUN_FOLDER CLIENTS SECONDS patient|plain|rereading|forwarded|openai    prints one line of JSON

It ends earlier when there is a file ``enough`` beside the run folder.

patient: it asks another router, and again, until its deadline. plain: aiohttp, which keeps to the router that it has
found in the beginning and asks once. rereading: the same, but it reads endpoints.json again after an error of its
connection. forwarded: as plain, at the address that is in the file ``forward`` beside the run folder. openai: the
client of OpenAI as it comes, there.
"""

import asyncio
import hashlib
import json
import ssl
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from patient_client import NoAnswer, PatientClient

from slurmft.inference.endpoint import HighAvailabilityCluster, ca_file, token_of


@dataclass
class Count:
    """What became of the requests of all clients."""

    asked: int = 0
    right: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    def add(self, body: dict[str, Any], prompt: str, began_s: float) -> None:
        text = body["choices"][0]["message"]["content"]
        is_right = text == hashlib.sha256(prompt.encode()).hexdigest()
        self.right += is_right
        self.errors["another request's answer"] += not is_right
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)


@dataclass
class Clock:
    """When it is time to end."""

    until_s: float
    enough: Path
    goes_on: bool = True

    async def watch(self) -> None:
        while time.monotonic() < self.until_s and not self.enough.exists():
            await asyncio.sleep(0.1)
        self.goes_on = False


async def load(run_folder: Path, *, clients: int, seconds: float, kind: str) -> Count:
    """So many clients, each with one request at a time."""
    count, clock = Count(), Clock(time.monotonic() + seconds, run_folder.parent / "enough")
    watch = clock.watch

    async def patient(number: int, client: PatientClient) -> None:
        while clock.goes_on:
            count.asked += 1
            prompt, began_s = f"{number}-{count.asked}", time.monotonic()
            try:
                status, content = await client.post("/v1/chat/completions", _body(prompt), timeout_s=60)
            except NoAnswer as error:
                count.errors[str(error)[:200]] += 1
                continue
            if status == 200:
                count.add(json.loads(content), prompt, began_s)
            else:
                count.errors[f"HTTP {status}"] += 1

    async def plain(number: int, session: aiohttp.ClientSession, urls: list[str]) -> None:
        while clock.goes_on:
            count.asked += 1
            prompt, began_s = f"{number}-{count.asked}", time.monotonic()
            url = urls[number % len(urls)]
            try:
                async with session.post(f"{url}/v1/chat/completions", json=_body(prompt)) as answer:
                    body = await answer.json()
                    if answer.status == 200:
                        count.add(body, prompt, began_s)
                    else:
                        count.errors[f"HTTP {answer.status}"] += 1
            except (aiohttp.ClientError, OSError, ValueError) as error:
                count.errors[f"{type(error).__name__} of {url}"] += 1
                await asyncio.sleep(0.05)
                if kind == "rereading":
                    urls = routers(run_folder) or urls

    if kind == "patient":
        async with PatientClient(run_folder) as client:
            await asyncio.gather(watch(), *(patient(number, client) for number in range(clients)))
        return count
    urls = addresses(run_folder, kind)
    if kind == "openai":
        await asyncio.gather(watch(), official(urls[0], run_folder, count, clients, clock))
        return count
    headers = {"Authorization": f"Bearer {token_of(run_folder)}"}
    connector, timeout = aiohttp.TCPConnector(limit=0, ssl=trusted(run_folder)), aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        await asyncio.gather(watch(), *(plain(number, session, urls) for number in range(clients)))
    return count


async def official(url: str, run_folder: Path, count: Count, clients: int, clock: Clock) -> None:
    """The client of OpenAI with its defaults, which are two second tries."""
    import openai

    http, token = openai.DefaultAsyncHttpxClient(verify=trusted(run_folder)), token_of(run_folder)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=token, http_client=http) as client:

        async def ask(number: int) -> None:
            while clock.goes_on:
                count.asked += 1
                prompt, began_s = f"{number}-{count.asked}", time.monotonic()
                try:
                    answer = await client.chat.completions.create(**_body(prompt))
                    count.add(answer.model_dump(), prompt, began_s)
                except openai.APIError as error:
                    count.errors[type(error).__name__] += 1

        await asyncio.gather(*(ask(number) for number in range(clients)))


def trusted(run_folder: Path) -> ssl.SSLContext:
    """What the endpoint's clients trust."""
    return ssl.create_default_context(cafile=str(ca_file(run_folder)))


def routers(run_folder: Path) -> list[str]:
    """Addresses, one for each router that is named."""
    return [each.urls[0] for each in HighAvailabilityCluster.read(run_folder).routers]


def addresses(run_folder: Path, kind: str) -> list[str]:
    """Those of the routers, or the one that slurmft endpoint --forward has printed."""
    return (
        routers(run_folder) if kind in ("plain", "rereading") else [(run_folder.parent / "forward").read_text().strip()]
    )


def _body(prompt: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}]}


def main() -> None:
    found = asyncio.run(load(Path(sys.argv[1]), clients=int(sys.argv[2]), seconds=float(sys.argv[3]), kind=sys.argv[4]))
    told = {"asked": found.asked, "right": found.right, "errors": +found.errors, "longest_s": round(found.longest_s, 3)}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
