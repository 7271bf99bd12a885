"""Constant load on an endpoint in a storm: what became of each request, as its client saw it.

python serving_storm_load.py load RUN_FOLDER    until the file ``enough`` lies beside the run folder; one line of JSON
python serving_storm_load.py slow|garbage|leaves RUN_FOLDER SEED    one bad client, until it is cut off, or leaves
python serving_storm_load.py half-open RUN_FOLDER SEED    (root) connections that are forgotten without a packet
python serving_storm_load.py long|stall RUN_FOLDER SEED    one request that takes longer than a hang, or makes one; its
outcome becomes a line of the file ``outcomes`` beside the run folder
"""

import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from patient_client import PASSING, NoAnswer, PatientClient
from word_engine import next_token, prompt_of

from slurmft.inference.endpoint import HighAvailabilityCluster, token_of

PATIENT, PLAIN, STREAMS, PLAIN_STREAMS, IMPATIENT = 50, 15, 25, 10, 10
"""Clients, each with one request at a time."""

TOKENS = 20
DEADLINE_S = 280.0
"""Of a request of a patient client: longer than the endpoint is ever away."""

PLAIN_DEADLINE_S = 30.0
TOLD_S = 20.0
"""What a plain client tells a router that it will wait; until its own limit an answer or an error has to be there."""

IMPATIENT_S = 3.0
HONEST = (500, b"CUDA error"), (422, b"this request has crashed")
"""Errors that pass: of a sick engine, where the tenth of requests that may be tried again is spent, and of the router
where a request was on one engine after the other that was lost, which may be by chance in a storm."""

TCP_REPAIR = 19
"""Of Linux: a socket that is closed in this mode sends nothing."""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass
class Count:
    """What became of the requests of one kind of client."""

    asked: int = 0
    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Proper errors: a status of its own, an event of a stream, a connection that is refused or breaks."""

    wrong: Counter[str] = field(default_factory=Counter)
    """Another answer than the right one, or a stream that ends without its end."""

    longest_s: float = 0.0
    late: list[float] = field(default_factory=list)
    """When those were asked for that had neither an answer nor an error in time."""


def body_of(path: str, number: int, *, stream: bool) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "words", "max_tokens": TOKENS + number % 50 * stream}
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": f"tell me of {number}"}]
    else:
        asked["prompt"] = f"once upon {number}"
    return {**asked, "stream": True} if stream else asked


def right_text(path: str, body: dict[str, Any]) -> str:
    context = prompt = prompt_of(path, body)
    for _ in range(body["max_tokens"]):
        if (token := next_token(context)) is None:
            break
        context += token
    return context.removeprefix(prompt)


def text_of(path: str, answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"]


def judge_stream(path: str, body: dict[str, Any], content: bytes, count: Count) -> None:
    """Whole and right, or ended by an error event; anything else is wrong."""
    text, ids, is_done, last = "", set(), False, ""
    for event in content.decode().split("\n\n"):
        lines = [line for line in event.split("\n") if line.startswith("data: ")]
        if not lines:
            continue
        last = lines[-1][6:]
        if last == "[DONE]":
            is_done = True
            continue
        told = json.loads(last)
        if "error" in told:
            count.refused[f"an error event: {told['error']['message'][:80]}"] += 1
            return
        ids.add((told["id"], told["created"]))
        for choice in told["choices"]:
            text += (choice["delta"].get("content") or "") if path == CHAT else choice["text"]
    right = right_text(path, body)
    if is_done and text == right and len(ids) == 1:
        count.right += 1
    elif not is_done:
        count.wrong[f"a silent cut after {last[-80:]}"] += 1
    else:
        count.wrong[f"{len(ids)} ids, text {text[-30:]!r} of {len(text)}, not {right[-30:]!r} of {len(right)}"] += 1


def judge(path: str, body: dict[str, Any], status: int, content: bytes, count: Count) -> None:
    if status == 200:
        if text_of(path, json.loads(content)) == right_text(path, body):
            count.right += 1
        else:
            count.wrong["another answer"] += 1
    elif status in (429, 502, 503, 504) or any(status == known and words in content for known, words in HONEST):
        count.refused[f"HTTP {status}: {json.loads(content)['error']['message'][:80]}"] += 1
    else:
        count.wrong[f"HTTP {status}: {content[:80].decode(errors='replace')}"] += 1


class Load:
    """All clients of one endpoint."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder, self._enough = run_folder, run_folder.parent / "enough"
        self.counts = {kind: Count() for kind in ("patient", "plain", "patient streams", "plain streams", "impatient")}
        self._number = 0
        self._is_enough = False

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PLAIN_DEADLINE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            PatientClient(self._run_folder, (*PASSING, 500)) as client,
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        ):
            watching = asyncio.create_task(self._watch())
            works = [
                *(self._again_and_again("patient", self._patient, client) for _ in range(PATIENT)),
                *(self._again_and_again("plain", self._plain, session) for _ in range(PLAIN)),
                *(self._again_and_again("patient streams", self._patient_stream, client) for _ in range(STREAMS)),
                *(self._again_and_again("plain streams", self._plain_stream, session) for _ in range(PLAIN_STREAMS)),
                *(self._again_and_again("impatient", self._impatient, session) for _ in range(IMPATIENT)),
            ]
            await asyncio.gather(*works)
            watching.cancel()

    async def _watch(self) -> None:
        while not self._is_enough:
            await asyncio.sleep(0.2)
            self._is_enough = self._enough.exists()

    async def _again_and_again(self, kind: str, work: Any, through: Any) -> None:
        count = self.counts[kind]
        while not self._is_enough:
            self._number += 1
            number, began_s = self._number, time.monotonic()
            count.asked, before = count.asked + 1, sum(count.refused.values())
            path = CHAT if number % 2 else TEXT
            try:
                await work(through, path, body_of(path, number, stream="stream" in kind), count)
            except (NoAnswer, aiohttp.ClientError, OSError) as error:
                if isinstance(error, TimeoutError) and kind.startswith("plain"):
                    count.late.append(time.time())
                count.refused[f"{type(error).__name__}: {str(error)[:160]}"] += 1
            if sum(count.refused.values()) > before:
                await asyncio.sleep(0.3)
            count.longest_s = max(count.longest_s, time.monotonic() - began_s)

    def _headers(self) -> dict[str, str]:
        """Each start of a job again has a token of its own."""
        return {"Authorization": f"Bearer {token_of(self._run_folder)}", "X-Request-Timeout": str(TOLD_S)}

    async def _patient(self, client: PatientClient, path: str, body: dict[str, Any], count: Count) -> None:
        judge(path, body, *await client.post(path, body, timeout_s=DEADLINE_S), count)

    async def _plain(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], count: Count) -> None:
        async with session.post(url_of(self._run_folder) + path, json=body, headers=self._headers()) as answer:
            judge(path, body, answer.status, await answer.read(), count)

    async def _impatient(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], count: Count) -> None:
        """It gives up, and asks again."""
        async with asyncio.timeout(IMPATIENT_S):
            await self._plain(session, path, body, count)

    async def _patient_stream(self, client: PatientClient, path: str, body: dict[str, Any], count: Count) -> None:
        status, content = await client.post(path, body, timeout_s=DEADLINE_S)
        if status == 200:
            judge_stream(path, body, content, count)
        else:
            judge(path, body, status, content, count)

    async def _plain_stream(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], count: Count
    ) -> None:
        async with session.post(url_of(self._run_folder) + path, json=body, headers=self._headers()) as answer:
            content = await answer.read()
            if answer.status == 200:
                judge_stream(path, body, content, count)
            else:
                judge(path, body, answer.status, content, count)


def url_of(run_folder: Path) -> str:
    routers = HighAvailabilityCluster.read(run_folder).routers
    if not routers:
        raise aiohttp.ClientConnectionError("no router")
    return random.choice(routers).urls[0]


async def misbehave(how: str, run_folder: Path, chance: random.Random) -> None:
    """One client of the kind that a router must survive."""
    routers = HighAvailabilityCluster.read(run_folder).routers
    if not routers:
        return
    place = urlsplit(chance.choice(routers).urls[0])
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    body = json.dumps(body_of(TEXT, 7, stream=True)).encode()
    if how == "leaves":
        body = json.dumps(body_of(TEXT, 49, stream=chance.random() < 0.7)).encode()
    head = (f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token_of(run_folder)}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode()  # fmt: skip
    if how == "slow":
        said = head + body
        for number in range(chance.randrange(1, len(said))):
            writer.write(said[number : number + 1])
            await asyncio.sleep(0.01)
    elif how == "leaves":
        writer.write(head + body)
        await asyncio.sleep(chance.uniform(0.0, 2.0))
        (writer.transport.abort if chance.random() < 0.5 else writer.close)()
        return
    else:
        endless = b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"
        for _ in range(20):
            cut = head[: chance.randrange(len(head))]
            writer.write(chance.choice([chance.randbytes(200), cut, b"GET / HTTP/9.9\r\n", endless, head + body]))
    with suppress(OSError, TimeoutError):
        await writer.drain()
        async with asyncio.timeout(30):
            while await reader.read(1 << 16):
                pass


def forget(run_folder: Path, chance: random.Random) -> None:
    """Connections that say nothing, half a request or a whole one, and whose client is gone without a packet."""
    for _ in range(60):
        place = urlsplit(url_of(run_folder))
        with suppress(OSError):
            connection = socket.create_connection((place.hostname or "", place.port or 0), timeout=5)
            body = json.dumps(body_of(TEXT, 49, stream=True)).encode()
            head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token_of(run_folder)}\r\n"
            said = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            connection.sendall(said[: chance.choice([0, len(said) // 2, len(said) - 1, len(said)])])
            connection.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
            connection.close()


async def ask_for_much(how: str, run_folder: Path, number: int) -> None:
    """One plain request, and what became of it."""
    count, began_s, path = Count(asked=1), time.monotonic(), CHAT if number % 2 else TEXT
    body = {**body_of(path, number, stream=False), **({"max_tokens": 300} if how == "long" else {"stall": 15})}
    headers = {"Authorization": f"Bearer {token_of(run_folder)}", "X-Request-Timeout": "100"}
    timeout = aiohttp.ClientTimeout(total=110)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.post(url_of(run_folder) + path, json=body) as answer,
        ):
            judge(path, body, answer.status, await answer.read(), count)
    except (aiohttp.ClientError, OSError) as error:
        count.refused[f"{type(error).__name__}: {error}"] += 1
        count.late += [time.time()] * isinstance(error, TimeoutError)
    count.longest_s = round(time.monotonic() - began_s, 2)
    with (run_folder.parent / "outcomes").open("a") as file:
        file.write(json.dumps({"kind": how, **vars(count)}) + "\n")


def main() -> None:
    run_folder = Path(sys.argv[2])
    if sys.argv[1] == "half-open":
        forget(run_folder, random.Random(int(sys.argv[3])))
        return
    if sys.argv[1] in ("long", "stall"):
        asyncio.run(ask_for_much(sys.argv[1], run_folder, int(sys.argv[3])))
        return
    if sys.argv[1] != "load":
        with suppress(OSError):
            asyncio.run(misbehave(sys.argv[1], run_folder, random.Random(int(sys.argv[3]))))
        return
    load = Load(run_folder)
    asyncio.run(load.run())
    told = {
        kind: {"asked": count.asked, "right": count.right, "refused": count.refused, "wrong": count.wrong,
               "longest_s": round(count.longest_s, 2), "late": count.late}
        for kind, count in load.counts.items()
    }  # fmt: skip
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
