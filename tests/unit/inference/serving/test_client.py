"""The client goes on where a router refuses, breaks off or is not there, until the deadline of the request."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import web
from serving_world import TOKEN, answers, never, run, serving, streams

from slurmft.errors import UsageError
from slurmft.inference import Client, RequestFailed
from slurmft.inference.serving.endpoint import (
    HighAvailabilityCluster,
    RouterAddress,
    headers_file,
    prepare,
    token_in,
    token_of,
)


def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_router_that_is_not_there_costs_nothing() -> None:
    async def work() -> None:
        async with (
            serving({"a": answers("a")}) as world,
            Client([nobody(), world.url, nobody()], token=TOKEN) as client,
        ):
            for _ in range(10):
                assert (await client.post_async("/v1/x", {}, timeout_s=20)).json() == {"by": "a"}

    run(work())


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_refusal_is_tried_again_until_it_is_none(status: int) -> None:
    async def work() -> None:
        refusals = 3

        async def refuse(_request: web.BaseRequest) -> web.Response:
            nonlocal refusals
            refusals -= 1
            return web.json_response({}, status=status if refusals >= 0 else 200, headers={"Retry-After": "0"})

        async with serving({"a": refuse}, max_retries=0) as world:
            async with Client([world.url], token=TOKEN) as client:
                assert (await client.post_async("/v1/x", {}, timeout_s=30)).status == 200
            assert refusals == -1

    run(work())


@pytest.mark.parametrize("status", [200, 400, 404, 500])
def test_any_other_answer_is_the_answer(status: int) -> None:
    async def work() -> None:
        async with serving({"a": answers("a", status=status)}, max_retries=0) as world:
            async with Client([world.url], token=TOKEN) as client:
                assert (await client.post_async("/v1/x", {})).status == status
            assert len(world["a"].seen) == 1

    run(work())


def test_a_request_ends_at_its_deadline_and_says_why() -> None:
    async def work() -> None:
        async with serving({"a": never}) as world, Client([world.url], token=TOKEN) as client:
            with pytest.raises(RequestFailed, match=r"no answer within 0\.5 s"):
                await client.post_async("/v1/x", {}, timeout_s=0.5)
        async with Client([nobody()], token=TOKEN) as client:
            with pytest.raises(RequestFailed, match="Cannot connect"):
                await client.post_async("/v1/x", {}, timeout_s=0.5)

    run(work())


def test_a_stream_that_has_begun_is_not_sent_again() -> None:
    async def work() -> None:
        async with serving({"a": streams([b"half", b"never"], delay_s=30, kind="application/x-thing")}) as world:
            async with Client([world.url], token=TOKEN) as client:
                parts = client.stream_async("/v1/x", {})
                assert await anext(parts) == b"half"
                await world["a"].die()
                with pytest.raises(RequestFailed, match="broke off"):
                    await anext(parts)
            assert len(world["a"].seen) == 1

    run(work())


def test_it_works_without_an_event_loop() -> None:
    async def work() -> None:
        async with serving({"a": streams([b"one", b"two"])}) as world:

            def blocking() -> None:
                with Client([world.url], token=TOKEN) as client:
                    assert client.post("/v1/x", {}).body == b"onetwo"
                    assert b"".join(client.stream("/v1/x", {})) == b"onetwo"
                    assert next(client.stream("/v1/x", {})) == b"one", "the rest is not waited for"
                with Client([world.url], token="wrong") as stranger:
                    assert stranger.post("/v1/x", {}).status == 401

            await asyncio.to_thread(blocking)

    run(work())


def test_it_finds_the_routers_in_the_run_folder_as_they_come_and_go(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving({"a": answers("a")}) as world:
            prepare(tmp_path, None)
            (tmp_path / "serving" / "token").write_text(TOKEN)
            HighAvailabilityCluster().write(tmp_path)
            async with Client.of_run(tmp_path) as client:
                asked = asyncio.create_task(client.post_async("/v1/x", {}, timeout_s=30))
                await asyncio.sleep(0.1)
                assert not asked.done()
                # the first address of a router may be one that this machine does not reach
                address = RouterAddress(0, "n0", ("127.0.0.2", "127.0.0.1"), world.port)
                HighAvailabilityCluster((address,)).write(tmp_path)
                assert (await asked).json() == {"by": "a"}

    run(work())


def test_secrets_are_private_and_stay_the_same(tmp_path: Path) -> None:
    prepare(tmp_path, None)
    token = token_of(tmp_path)
    prepare(tmp_path, None)
    assert token_of(tmp_path) == token and len(token) > 30
    assert headers_file(tmp_path).read_text() == f"Authorization: Bearer {token}\n"
    for path in (tmp_path / "serving").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    own = tmp_path / "own"
    own.write_text("my-own-secret-token\n")
    own.chmod(0o600)
    prepare(tmp_path, own)
    assert token_of(tmp_path) == "my-own-secret-token"


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [("a-good-token-of-its-length", 0o644, "others may read"), ("short", 0o600, "at least 16"),
     ("with a space in the token", 0o600, "without spaces"), ("line\r\nX-Evil: yes, and long", 0o600, "at least 16")],
)  # fmt: skip
def test_a_token_that_is_none_is_refused(tmp_path: Path, content: str, mode: int, why: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(UsageError, match=why):
        token_in(path)
