"""Batches of an endpoint, as OpenAI's interface has them: files are kept in the run folder, their lines are requests of
low priority.

serving/batches/            mode 0700
    file-ID.json, file-ID   what is known of a file, and its content
    batch_ID.json           a batch as clients see it
    batch_ID.rows           the answers so far, a line for each; of two with one number the first counts
    batch_ID.owner          the router that works on it, and its beat
    batch_ID.cancel         a client has cancelled it

Any router may be asked. One of them works on a batch; another one goes on with it where the beat has stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from slurmft.errors import StorageError
from slurmft.inference.ledger import row_of
from slurmft.inference.requests import request_of
from slurmft.policy.inference import retry_after_s
from slurmft.policy.serving import Priority
from slurmft.system.files import read_bytes, read_json, replace_atomically, write_bytes, write_json

PATHS = re.compile(r"/v1/(files|batches)(?:/((?:file-|batch_)[0-9a-f]{32})(?:/(content|cancel))?)?")
LOOK_S, BEAT_S, SILENT_S = 1.0, 2.0, 15.0
AGAIN_S, LONGEST_PAUSE_S = 1.0, 30.0
OPEN = ("in_progress", "cancelling")
LISTED, TOLD_ERRORS, MOST_BYTES = 100, 20, 1 << 33

log = logging.getLogger(__name__)


class Batches:
    """One router's side of them.

    Args:
        folder: shared by the routers of the run.
        ready: how many replicas are in the rotation.
        error: an error of the router's own, of a status and a text.
        open_paths: that lines may use.
        slots: requests at a time for each replica.
        tries: of a line whose replicas fail.
    """

    def __init__(
        self, folder: Path, *, ready: Callable[[], int], error: Callable[[int, str], web.Response],
        open_paths: Iterable[str], slots: int, tries: int, token: str,
    ) -> None:  # fmt: skip
        self._folder, self._ready, self._error = folder, ready, error
        self._open_paths, self._tries = tuple(open_paths), tries
        self._slots, self._token = Priority.LOW.share_of(slots), token
        self._name, self._seen = uuid.uuid4().hex, dict[str, tuple[bytes, float]]()
        self._work: asyncio.Task[None] | None = None

    def begin(self, url: str) -> None:
        """Work on what there is; ``url``: of this router itself."""
        self._work = asyncio.create_task(self._watch(url))

    async def close(self) -> None:
        """Leave what there is to others."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def answer(self, request: web.BaseRequest, path: str, body: bytes) -> web.StreamResponse:
        """Answer a client's request for ``path``, one of ``PATHS``."""
        try:
            return await asyncio.to_thread(self._answer, request, path, body)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return self._error(400, f"not understood: {error}"[:300])
        except FileNotFoundError:
            return self._error(404, "there is none of this id")
        except (OSError, StorageError) as error:
            return self._error(507, f"the run folder cannot be used: {error}")

    def _answer(self, request: web.BaseRequest, path: str, body: bytes) -> web.Response:
        found = PATHS.fullmatch(path.rstrip("/"))
        kind, name, what = found.groups() if found is not None else ("", None, None)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        match request.method, kind, name, what:
            case "POST", "files", None, None:
                form = form_in(request.headers.get("Content-Type", ""), body)
                told = self._keep(form["file"][1], form["file"][0] or "file", form["purpose"][1].decode())
            case "POST", "batches", None, None:
                told = self._create(json.loads(body))
            case "GET", _, None, None if kind:
                after = request.query.get("after")
                rest = sorted(self._all(kind), key=lambda each: -each["created_at"])
                ids = [each["id"] for each in rest]
                rest = rest[ids.index(after) + 1 if after in ids else 0 :]
                page = rest[: min(LISTED, int(request.query.get("limit", LISTED)))]
                told = {"object": "list", "data": page, "has_more": len(page) < len(rest)}
            case "GET", _, str(), None:
                told = self._read(name)
            case "GET", "files", str(), "content":
                self._read(name)
                content = _content_of(self._folder / name)
                return web.Response(body=content, headers={"Content-Type": "application/octet-stream"})
            case "DELETE", "files", str(), None:
                self._read(name)
                if any(each["input_file_id"] == name and each["status"] in OPEN for each in self._all("batches")):
                    raise ValueError("a batch that is not at its end reads it")
                (self._folder / f"{name}.json").unlink()
                (self._folder / name).unlink(missing_ok=True)
                told = {"id": name, "object": "file", "deleted": True}
            case "POST", "batches", str(), "cancel":
                if self._read(name)["status"] == "in_progress":
                    replace_atomically(self._folder / f"{name}.cancel", str(int(time.time())))
                told = self._read(name)
            case _:
                return self._error(404, "batches and files have no such path or method")
        return web.json_response(told)

    def _all(self, kind: str) -> list[dict[str, Any]]:
        prefix = {"files": "file-", "batches": "batch_"}[kind]
        return [self._read(path.stem) for path in self._folder.glob(f"{prefix}*.json")]

    def _read(self, name: str) -> dict[str, Any]:
        found = read_json(self._folder / f"{name}.json", owners={os.geteuid()})
        if found is None:
            raise FileNotFoundError(name)
        del found["format"]
        if found.get("status") == "in_progress" and (at := _content_of(self._folder / f"{name}.cancel")):
            found |= {"status": "cancelling", "cancelling_at": int(at)}
        return found

    def _write(self, told: dict[str, Any]) -> dict[str, Any]:
        write_json(self._folder / f"{told['id']}.json", told)
        return told

    def _keep(self, content: bytes, filename: str, purpose: str) -> dict[str, Any]:
        name = f"file-{uuid.uuid4().hex}"
        replace_atomically(self._folder / name, content)
        return self._write({"id": name, "object": "file", "bytes": len(content), "created_at": int(time.time()),
                            "filename": filename, "purpose": purpose, "status": "processed"})  # fmt: skip

    def _create(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        now = int(time.time())
        self._read(source := str(asked["input_file_id"]))
        told = {
            "id": f"batch_{uuid.uuid4().hex}", "object": "batch", "endpoint": str(asked["endpoint"]), "errors": None,
            "input_file_id": source, "completion_window": asked.get("completion_window", "24h"),
            "status": "in_progress", "created_at": now, "in_progress_at": now, "output_file_id": None,
            "error_file_id": None, "metadata": asked.get("metadata"),
        }  # fmt: skip
        requests, errors = self._lines(told)
        told["request_counts"] = {"total": len(requests), "completed": 0, "failed": 0}
        if errors or not requests:
            errors = errors or [{"code": "empty_file", "message": "it has no line", "line": None, "param": None}]
            told |= {"status": "failed", "failed_at": now, "errors": {"object": "list", "data": errors}}
        return self._write(told)

    def _lines(self, batch: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The requests of a batch, and what is wrong with the first bad lines."""
        requests, errors, ids = list[dict[str, Any]](), list[dict[str, Any]](), set[str]()
        content = _content_of(self._folder / batch["input_file_id"])
        for number, line in enumerate(content.splitlines(), 1):
            if not line.strip() or len(errors) >= TOLD_ERRORS:
                continue
            try:
                found = request_of(line, f"line-{number}", self._open_paths)
                if found["id"] in ids:
                    raise ValueError(f"its custom_id {found['id'][:80]!r} is there twice")
                if found.get("url") != batch["endpoint"]:
                    raise ValueError("its url is not the endpoint of the batch")
            except ValueError as error:
                errors.append({"code": "invalid_line", "message": str(error), "line": number, "param": None})
            else:
                ids.add(found["id"])
                requests.append(found)
        return requests, errors

    # The work

    async def _watch(self, url: str) -> None:
        # to this process's own socket: no other process can be there
        connector = aiohttp.TCPConnector(limit=0, ssl=False)
        headers = {"Authorization": f"Bearer {self._token}", "X-Priority": "low"}
        async with aiohttp.ClientSession(url, headers=headers, connector=connector,
                                         timeout=aiohttp.ClientTimeout(total=None)) as session:  # fmt: skip
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    for name in await asyncio.to_thread(self._mine):
                        await self._run(name, session)
                except (OSError, StorageError, ValueError, KeyError) as error:
                    log.warning("a batch has to wait: %s", error)

    def _mine(self) -> list[str]:
        """Open batches of which no other router shows a beat."""
        found = []
        for name in [each["id"] for each in self._all("batches") if each["status"] in OPEN]:
            beat = _content_of(self._folder / f"{name}.owner")
            before, since_s = self._seen.get(name, (None, 0.0))
            if beat != before:
                since_s = time.monotonic()
                self._seen[name] = beat, since_s
            if not beat or beat.startswith(self._name.encode()) or time.monotonic() - since_s > SILENT_S:
                found.append(name)
        return found

    async def _run(self, name: str, session: aiohttp.ClientSession) -> None:
        """Answer what is not answered yet, while no other router says that it does."""
        rows = self._folder / f"{name}.rows"
        requests, _ = await asyncio.to_thread(self._lines, self._read(name))
        done: dict[int, dict[str, Any]] = {}
        for line in (await asyncio.to_thread(_content_of, rows)).splitlines():
            with contextlib.suppress(ValueError):  # half a line of a router that has died
                done.setdefault((row := json.loads(line))["index"], row)
        left = iter([number for number in range(len(requests)) if number not in done])

        async def work() -> None:
            for number in left:
                row = {"index": number, **await self._ask(session, requests[number])}
                line = b"\n" + json.dumps(row).encode() + b"\n"  # behind half a line of a router that has died
                await asyncio.to_thread(write_bytes, rows, line, append=True, follow=False)
                done.setdefault(number, row)

        workers = [asyncio.create_task(work()) for _ in range(max(1, self._ready()) * self._slots)]
        working = asyncio.gather(*workers)
        try:
            while (goes_on := await asyncio.to_thread(self._goes_on, name, requests, done)) and not working.done():
                await asyncio.wait([working], timeout=BEAT_S)
            if goes_on:
                await working
        finally:
            for each in workers:
                each.cancel()
            await asyncio.gather(working, return_exceptions=True)
        if goes_on is not None:
            await asyncio.to_thread(self._finish, name, requests, done)

    def _goes_on(self, name: str, requests: list[dict[str, Any]], done: Mapping[int, Mapping[str, Any]]) -> bool | None:
        """Show the beat and the counts; None where another router has begun, False where a client has cancelled."""
        path, mine = self._folder / f"{name}.owner", self._name.encode()
        beat = _content_of(path)
        told = self._read(name)
        is_mine = beat.startswith(mine) or beat == self._seen[name][0]
        if told["status"] not in OPEN or not is_mine:
            return None
        now_s = time.monotonic()
        replace_atomically(path, beat := mine + f" {now_s}".encode())
        self._seen[name] = beat, now_s
        if told["status"] == "cancelling":
            return False
        self._write({**told, "request_counts": self._counts(requests, done)})
        return True

    def _counts(self, requests: list[dict[str, Any]], done: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
        good = sum(row_of(number, "", row)[0] for number, row in dict(done).items())
        return {"total": len(requests), "completed": good, "failed": len(done) - good}

    def _finish(self, name: str, requests: list[dict[str, Any]], done: Mapping[int, Mapping[str, Any]]) -> None:
        """Write the files of answers and errors."""
        told, now = self._read(name), int(time.time())
        files: dict[bool, list[bytes]] = {True: [], False: []}
        for number, row in sorted(dict(done).items()):
            is_good, line = row_of(number, requests[number]["id"], row)
            files[is_good].append(json.dumps(line).encode() + b"\n")
        for is_good, key in (True, "output_file_id"), (False, "error_file_id"):
            if files[is_good]:
                content = b"".join(files[is_good])
                told[key] = self._keep(content, f"{name}_{key.partition('_')[0]}.jsonl", "batch_output")["id"]
        end = "cancelled" if told["status"] == "cancelling" else "completed"
        self._write({**told, "status": end, f"{end}_at": now, "request_counts": self._counts(requests, done)})
        for suffix in ("rows", "cancel", "owner"):
            (self._folder / f"{name}.{suffix}").unlink(missing_ok=True)

    async def _ask(self, session: aiohttp.ClientSession, request: Mapping[str, Any]) -> dict[str, Any]:
        """The row of a request: what is refused for the moment is asked for again, what fails only some times."""
        failed = 0
        while True:
            try:
                async with session.post(request["url"], json=request["body"]) as answer:
                    status, content = answer.status, await answer.read()
                    pause_s = retry_after_s(answer.headers.get("Retry-After"), longest_s=LONGEST_PAUSE_S)
            except (aiohttp.ClientError, OSError) as error:
                status, content, pause_s = 502, str(error).encode(), None
            failed += status in (502, 504)
            if status not in (429, 502, 503, 504) or failed >= self._tries:
                break
            await asyncio.sleep(pause_s if pause_s is not None else AGAIN_S)
        text = content.decode(errors="replace")
        try:
            return {"response": {"status_code": status, "body": json.loads(text)}}
        except (ValueError, RecursionError):
            return {"response": {"status_code": status, "body": {"text": text}}}


def form_in(kind: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """The fields of a form (multipart/form-data, RFC 7578): their file names and contents.

    Raises:
        ValueError: it is none.
    """
    found = re.search(r'boundary="?([^";,]{1,70})"?', kind)
    if not kind.lower().startswith("multipart/form-data") or found is None:
        raise ValueError("not a form (multipart/form-data)")
    fields = {}
    for part in (b"\r\n" + body).split(b"\r\n--" + found[1].encode())[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        names = dict(re.findall(rb'\b(name|filename)="([^"\r\n]*)"', head))
        fields[names.get(b"name", b"").decode()] = names.get(b"filename", b"").decode(errors="replace"), content
    return fields


def _content_of(path: Path) -> bytes:
    return read_bytes(path, owners={os.geteuid()}, limit_bytes=MOST_BYTES) if path.exists() else b""
