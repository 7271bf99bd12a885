"""The router over real sockets: what it passes on, what it refuses, and what follows when a replica fails."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from serving_world import TOKEN, World, answers, never, serving, streams
from waiting import until_async
from yarl import URL

from slurmft.errors import LaunchError
from slurmft.inference import router
from slurmft.inference.router import AccessLog, RouterServer
from slurmft.ipc.messages import Members, ReplicaPlace

PARTS = [f"data: {number}\n\n".encode() for number in range(5)]


async def test_requests_go_to_the_replica_with_the_fewest_in_flight() -> None:
    async with serving({"a": answers("a", delay_s=0.1), "b": answers("b", delay_s=0.1)}) as world:
        found = await asyncio.gather(*(world.ask() for _ in range(8)))
        assert sorted(answer["by"] for _, answer in found) == ["a"] * 4 + ["b"] * 4


async def test_any_method_path_header_and_body_passes_unchanged_but_for_the_hops_own() -> None:
    async def echo(request: web.BaseRequest) -> web.Response:
        headers = [[name.lower(), value] for name, value in request.headers.items()]
        told = {"method": request.method, "path": request.raw_path, "headers": headers,
                "body": (await request.read()).hex()}  # fmt: skip
        return web.json_response(told, status=207, headers={"X-Own": "yes", "Content-Encoding": "identity"})

    async with serving({"a": echo}) as world:
        given = {"X-Thing": "1", "Content-Type": "application/x-thing", "Connection": "X-Hop", "X-Hop": "2"}
        url = URL(f"{world.url}/any/%C3%A4?b=%2F&c", encoded=True)
        async with world.client.request("PATCH", url, data=b"\x00\xff", headers=given) as answer:
            told = await answer.json()
            assert (answer.status, answer.headers["X-Own"]) == (207, "yes")
        assert (told["method"], told["path"], told["body"]) == ("PATCH", "/any/%C3%A4?b=%2F&c", "00ff")
        names = dict(told["headers"])
        assert (names["x-thing"], names["content-type"]) == ("1", "application/x-thing")
        assert not {"x-hop", "authorization"} & names.keys(), "the token is for the router alone"


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/v1/x", "", 401), ("/v1/x", "Bearer wrong", 401), ("/v1/x", f"Basic {TOKEN}", 401), ("/status", "", 401),
        ("/metrics", "", 401), ("/sleep", f"Bearer {TOKEN}", 403), ("/v1/load_lora_adapter/", f"Bearer {TOKEN}", 403),
        ("/V1/Unload_Lora_Adapter", f"Bearer {TOKEN}", 403), ("/%73leep", f"Bearer {TOKEN}", 403),
        ("/x/../sleep", f"Bearer {TOKEN}", 400), ("//sleep", f"Bearer {TOKEN}", 400),
        ("/x%2f..%2fsleep", f"Bearer {TOKEN}", 400), ("/%2573leep", f"Bearer {TOKEN}", 400),
        ("/SLEEP/", f"Bearer {TOKEN}", 403), ("/sleep/x", f"bearer {TOKEN}", 403), ("/sleep?x", f"Bearer {TOKEN}", 403),
        ("/sleep%3fx", f"Bearer {TOKEN}", 400), ("/sleep%23", f"Bearer {TOKEN}", 400),
        ("/sleep;x", f"Bearer {TOKEN}", 400),
        ("/sleep%20", f"Bearer {TOKEN}", 400), ("/sleep%00", f"Bearer {TOKEN}", 400),
        ("/%5csleep", f"Bearer {TOKEN}", 400),
        ("/x/%2e%2E/sleep", f"Bearer {TOKEN}", 400), ("/v1//load_lora_adapter", f"Bearer {TOKEN}", 400),
        ("http://h/sleep", f"Bearer {TOKEN}", 403), ("*", f"Bearer {TOKEN}", 400), ("/v1/x", f"Bearer {TOKEN} x", 401),
    ],
)  # fmt: skip
async def test_what_never_reaches_an_engine(path: str, header: str, status: int) -> None:
    async with serving({"a": answers("a")}, engine={"command": ["vllm", "{socket}"]}) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        lines = [f"GET {path} HTTP/1.1", "Host: h", *([f"Authorization: {header}"] if header else []), "", ""]
        writer.write("\r\n".join(lines).encode())
        assert (await reader.readline()).split()[1] == str(status).encode()
        writer.close()
        assert world["a"].seen == []


async def test_paths_are_closed_unless_the_engine_s_list_or_the_configuration_names_them() -> None:
    engine = {"command": ["transformers", "serve", "{port}"], "allow_paths": ["/reset"]}
    async with serving({"a": answers("a")}, engine=engine) as world:
        for path, status in {"/reset": 200, "/v1/chat/completions": 200, "/load_model": 403, "/new": 403}.items():
            assert (await world.ask(path))[0] == status
        assert world["a"].seen == ["/reset", "/v1/chat/completions"]


async def test_what_a_dead_replica_had_is_done_by_another_one() -> None:
    async with serving({"a": never, "b": answers("b")}) as world:
        asked = [asyncio.create_task(world.ask()) for _ in range(2)]
        await until_async(lambda: len(world["a"].seen) == 1)
        await world["a"].die()
        assert [await each for each in asked] == [(200, {"by": "b"})] * 2
        assert world.router.budget.has_one
        assert world.router.replicas.ready == 1


async def test_a_replica_that_its_supervisor_names_no_more_is_lost() -> None:
    async with serving({"a": never, "b": answers("b")}) as world:
        asked = [asyncio.create_task(world.ask()) for _ in range(2)]
        await until_async(lambda: len(world["a"].seen) == 1)
        world.name_members("b", expected=2)
        assert [await each for each in asked] == [(200, {"by": "b"})] * 2


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_clients_mistake_is_answered_once_and_opens_no_breaker(status: int) -> None:
    async with serving({"a": answers("a", status=status), "b": answers("b", status=status)}) as world:
        for _ in range(10):
            assert (await world.ask())[0] == status
        assert len(world["a"].seen) + len(world["b"].seen) == 10
        assert not any(load.avoided for load in world.router.replicas.loads())


async def test_a_sick_replica_costs_no_request_and_is_avoided_while_another_one_works() -> None:
    async with serving({"a": answers("a", status=500), "b": answers("b")}) as world:
        assert [await world.ask() for _ in range(30)] == [(200, {"by": "b"})] * 30
        assert len(world["a"].seen) == 5


async def test_when_all_replicas_are_sick_retries_are_a_tenth_of_the_requests() -> None:
    async with serving({"a": answers("a", status=500), "b": answers("b", status=500)}) as world:
        for _ in range(300):
            assert await world.ask() in ((500, {"by": "a"}), (500, {"by": "b"}))
        tries = len(world["a"].seen) + len(world["b"].seen)
        assert 300 < tries <= 300 + 10 + 30


async def test_a_full_router_refuses_at_once() -> None:
    async with serving({"a": never}, {"max_queue": 3}, concurrency=2) as world:
        asked = [asyncio.create_task(world.ask()) for _ in range(5)]
        await until_async(lambda: world.router.waiting == 3)
        async with world.client.post("/v1/x") as answer:
            assert answer.status == 429 and int(answer.headers["Retry-After"]) >= 1
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until_async(lambda: world.router.waiting == 0 and world.router.in_flight == 0)
        assert world.router.replicas.by_name["a"].in_flight == 0, "a client that goes away frees its place"


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_bodies_beyond_the_memory_for_them_are_refused_before_they_are_read(is_chunked: bool) -> None:
    async with serving({"a": never}, {"max_held_bytes": 100_000}, concurrency=64) as world:
        asked = [asyncio.create_task(world.ask(body=b"x" * 60_000))]
        await until_async(lambda: len(world["a"].seen) == 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        length = "Transfer-Encoding: chunked" if is_chunked else "Content-Length: 60000\r\nExpect: 100-continue"
        writer.write(f"POST /v1/x HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {TOKEN}\r\n{length}\r\n\r\n".encode())
        if is_chunked:  # most of it never comes
            writer.write(b"c000\r\n" + b"x" * 0xC000)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After: 1\r\n" in answer
        writer.close()
        asked.append(asyncio.create_task(world.ask(body=b"x" * 30_000)))
        await until_async(lambda: len(world["a"].seen) == 2)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until_async(lambda: world.router.in_flight == 0)
        assert world.router.held_bytes == 0, "room is given back"


async def test_a_higher_priority_is_next_and_low_ones_leave_room() -> None:
    free = asyncio.Event()

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        await free.wait()
        return web.json_response({})

    async with serving({"a": engine}, concurrency=4) as world:

        def ask(name: str, priority: str) -> asyncio.Task[Any]:
            return asyncio.create_task(world.ask(f"/v1/{name}", headers={"X-Priority": priority}))

        asked = [ask(f"l{number}", "low") for number in range(5)]
        await until_async(lambda: (world.router.waiting, len(world["a"].seen)) == (2, 3))  # a quarter is left
        asked.append(ask("n1", ""))
        await until_async(lambda: len(world["a"].seen) == 4)
        for name, priority in ("n2", "nonsense"), ("h1", "high"), ("h2", "HIGH"):
            before = world.router.waiting
            asked.append(ask(name, priority))
            await until_async(lambda before=before: world.router.waiting == before + 1)
        free.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 9
        assert world["a"].seen[3:7] == ["/v1/n1", "/v1/h1", "/v1/h2", "/v1/n2"]


async def test_the_access_log_has_a_line_for_each_request(tmp_path: Path) -> None:
    async with serving({"a": answers("a", delay_s=0.3), "b": answers("b")}, max_retries=0) as world:
        log = world.server.access = AccessLog(tmp_path / "access.log")
        log.begin()
        await world.ask("/v1/x?secret=1", headers={"X-Request-ID": "mine"})
        async with world.client.get("/v1/x", headers={"Authorization": "Bearer wrong"}) as answer:
            given = answer.headers["X-Request-ID"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(world.ask("/v1/y"), world.ask("/v1/y")), 0.1)
        await until_async(lambda: world.router.in_flight == 0)
        await log.close()
        found = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
        assert [(each["id"], each["path"], each["status"], each["tries"]) for each in found[:2]] == [
            ("mine", "/v1/x", 200, 1), (given, "/v1/x", 401, 0)
        ]  # fmt: skip
        assert found[0]["replica"] in "ab" and found[0]["bytes"] == len('{"by": "a"}')
        assert 499 in [each["status"] for each in found[2:]], "a client that has gone"
        assert (tmp_path / "access.log").stat().st_mode & 0o777 == 0o600


async def test_an_access_log_that_cannot_be_written_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router, "MOST_BYTES", 300)
    async with serving({"a": answers("a")}) as world:
        log = world.server.access = AccessLog(tmp_path / "access.log")
        for _ in range(2):
            await world.ask()
            await log.close()
        assert (tmp_path / "access.log.1").exists(), "a long one is put aside"
        (tmp_path / "access.log").mkdir()
        assert await world.ask() == (200, {"by": "a"})
        await log.close()
        assert "the access log has lost 1 lines" in caplog.text


async def test_requests_that_wait_are_answered_in_their_turn() -> None:
    async with serving({"a": answers("a", delay_s=0.01)}, concurrency=1) as world:
        assert await asyncio.gather(*(world.ask() for _ in range(40))) == [(200, {"by": "a"})] * 40


@pytest.mark.parametrize("engine", ["slow", "full"])
async def test_a_request_ends_at_its_own_deadline(engine: str) -> None:
    async with serving({"a": never}, concurrency=1) as world:
        other = asyncio.create_task(world.ask()) if engine == "full" else None
        await until_async(lambda: len(world["a"].seen) == (engine == "full"))
        began_s = asyncio.get_running_loop().time()
        status, answer = await world.ask(headers={"X-Request-Timeout": "0.3"})
        assert status == 504 and "deadline" in answer["error"]["message"]
        assert 0.25 < asyncio.get_running_loop().time() - began_s < 3
        if other is not None:
            other.cancel()


async def streamed(world: World, path: str = "/v1/x") -> tuple[int, bytes]:
    async with world.client.post(path) as answer:
        return answer.status, await answer.read()


async def test_a_stream_passes_part_by_part() -> None:
    async with serving({"a": streams(PARTS, delay_s=0.2)}) as world, world.client.post("/v1/x") as answer:
        began_s = asyncio.get_running_loop().time()
        assert await answer.content.readany() == PARTS[0]
        assert asyncio.get_running_loop().time() - began_s < 0.15
        assert await answer.read() == b"".join(PARTS[1:])
        assert answer.content_type == "text/event-stream"


@pytest.mark.parametrize("last", [b"data: 1\n\n", b"data: hal"])
async def test_a_stream_whose_replica_dies_ends_with_an_error_event_of_its_own(last: bytes) -> None:
    async with serving({"a": streams([last, b"never"], delay_s=30)}) as world:
        async with world.client.post("/v1/x") as answer:
            assert await answer.content.readany() == last
            await world["a"].die()
            rest = await answer.read()
        *_, event = [each for each in (last + rest).split(b"\n\n") if each]
        kind, _, data = event.partition(b"\n")
        assert kind == b"event: error"
        assert json.loads(data.removeprefix(b"data: "))["error"]["code"] == 502


async def test_another_answer_that_has_no_end_is_no_whole_one_for_its_client() -> None:
    async with (
        serving({"a": streams([b"half", b"never"], delay_s=30, kind="application/x-thing")}) as world,
        world.client.post("/v1/x") as answer,
    ):
        assert await answer.content.readany() == b"half"
        await world["a"].die()
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


async def test_a_stream_beyond_its_deadline_says_so() -> None:
    async with (
        serving({"a": streams(PARTS, delay_s=30)}) as world,
        world.client.post("/v1/x", headers={"X-Request-Timeout": "0.3"}) as answer,
    ):
        assert b"the deadline of the request" in await answer.read()


async def test_a_client_that_goes_away_ends_the_engines_work() -> None:
    ended = asyncio.Event()

    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"more")
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    async with serving({"a": endless}) as world:
        answer = await world.client.post("/v1/x")
        await answer.content.readany()
        answer.close()
        await asyncio.wait_for(ended.wait(), 10)
        await until_async(lambda: world.router.in_flight == 0)


async def test_an_endpoint_with_too_few_replicas_is_degraded_and_comes_back() -> None:
    engines = {name: answers(name) for name in "abcd"}
    async with serving(engines, concurrency=8) as world:
        low = {"X-Priority": "low"}
        assert (await world.ask(headers=low))[0] == 200
        for name in "abc":
            await world[name].die()
        await until_async(lambda: world.router.degraded)
        async with world.client.post("/v1/x", headers=low) as answer:
            assert (answer.status, answer.headers["X-Slurmft-State"]) == (503, "degraded")
            assert int(answer.headers["Retry-After"]) > 0
        async with world.client.post("/v1/x") as answer:
            assert (answer.status, answer.headers["X-Slurmft-State"]) == (200, "degraded")
        told = await (await world.client.get("/status")).json()
        assert (told["state"], told["concurrency"], told["replicas"]) == (
            "degraded", 4, {"ready": 1, "expected": 4},
        )  # fmt: skip


async def test_a_degraded_endpoint_answers_shorter_and_with_a_smaller_model() -> None:
    seen: list[Any] = []

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(await request.json())
        return web.json_response({})

    settings = {"degraded_max_tokens": 64, "degraded_model": "small"}
    async with serving({"a": engine, "b": engine, "c": engine}, settings) as world:
        asked = {"model": "large", "prompt": "x", "max_tokens": 500}
        await (await world.client.post("/v1/completions", json=asked)).read()
        for name in "bc":
            await world[name].die()
        await until_async(lambda: world.router.degraded)
        async with world.client.post("/v1/completions", json=asked) as answer:
            assert answer.headers["X-Slurmft-Degraded"] == "max_tokens=64, model=small"
        async with world.client.post("/v1/x", json=asked) as answer:
            assert "X-Slurmft-Degraded" not in answer.headers
        assert seen == [asked, {"model": "small", "prompt": "x", "max_tokens": 64}, asked]


async def test_an_endpoint_that_drains_refuses_what_is_new_and_finishes_what_it_has() -> None:
    async with serving({"a": answers("a", delay_s=0.5)}) as world:
        asked = asyncio.create_task(world.ask())
        await until_async(lambda: len(world["a"].seen) == 1)
        gate = world["a"].gate
        assert gate is not None
        world.name_members("a", closing=True)
        gate.say("draining")
        async with world.client.post("/v1/x") as answer:
            assert answer.status == 503 and "Retry-After" in answer.headers
        assert await asked == (200, {"by": "a"})
        assert world.router.status()["state"] == "closing"


@pytest.mark.parametrize("ends", ["crashes", "is renewed"])
async def test_requests_wait_for_the_next_life_of_the_only_replica(ends: str) -> None:
    async with serving({"a": answers("a"), "b": answers("b")}, {"degraded_below": 0.0}) as world:
        world.name_members("a", expected=1)
        gate = world["a"].gate
        assert gate is not None
        if ends == "crashes":
            gate.say("ended", crashed=True)
        else:
            gate.say("draining")
        await until_async(lambda: world.router.replicas.ready == 0)
        asked = asyncio.create_task(world.ask())
        await until_async(lambda: world.router.waiting == 1)
        assert world.router.status()["state"] == "waiting"
        world.name_members("b", expected=1)
        assert await asked == (200, {"by": "b"})
        assert world.router.status()["state"] == "well"


@pytest.mark.parametrize("say", [b"", b"GET /v1/x HT", b"POST /v1/x HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer "
                                 + TOKEN.encode() + b"\r\nContent-Length: 9\r\n\r\nhalf"])  # fmt: skip
async def test_a_client_that_does_not_finish_its_request_is_cut_off(say: bytes) -> None:
    async with serving({"a": answers("a")}, {"client_timeout_s": 0.5}) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(say)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1 << 20), 10)
        writer.close()
        assert world["a"].seen == []


async def test_a_client_that_does_not_take_its_answer_is_cut_off() -> None:
    async with serving({"a": streams([b"x" * (1 << 20)] * 64, delay_s=0)}, {"client_timeout_s": 0.5}) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1024)
        writer.write(f"GET /v1/x HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        await reader.readline()
        await until_async(lambda: world.router.in_flight == 0)
        assert "slow client" in world.router.metrics.answer("")[0].decode()
        writer.close()


@pytest.mark.parametrize(
    ("limits", "request_of", "status"),
    [
        ({"max_body_bytes": 10}, {"data": b"x" * 11}, 413),
        ({"max_header_bytes": 200}, {"headers": {"X-Long": "x" * 400}}, 431),
    ],
)
async def test_what_is_too_long_is_refused(limits: dict[str, Any], request_of: dict[str, Any], status: int) -> None:
    async with serving({"a": answers("a")}, limits) as world:
        async with world.client.post("/v1/x", **request_of) as answer:
            assert answer.status == status
        assert world["a"].seen == []


async def test_a_body_without_a_length_has_the_same_limit() -> None:
    async def parts() -> Any:
        for _ in range(100):
            yield b"xx"

    async with (
        serving({"a": answers("a")}, {"max_body_bytes": 10}) as world,
        world.client.post("/v1/x", data=parts()) as answer,
    ):
        assert answer.status == 413


async def test_a_router_that_leaves_tells_clients_not_to_use_their_connections_again() -> None:
    async with serving({"a": answers("a", delay_s=0.2)}) as world:
        asking = asyncio.create_task(world.client.post("/v1/x", data=b"{}"))
        await until_async(lambda: world.router.in_flight == 1)
        leaving = asyncio.create_task(world.server.leave())
        async with await asking as answer:
            assert (answer.status, answer.headers["Connection"]) == (200, "close")
        await leaving
        with pytest.raises(aiohttp.ClientConnectorError):  # refused: nothing was computed for it
            await world.ask()


async def test_metrics_say_how_many_replicas_are_in_the_rotation_and_how_many_are_to_be_on() -> None:
    async with serving({"a": answers("a")}) as world:

        def gauges() -> dict[str, float]:
            lines = world.router.metrics.answer("")[0].decode().splitlines()
            return {
                name: float(value)
                for name, value in (line.split() for line in lines if line.startswith("slurmft_replicas_"))
            }

        assert gauges() == {f"slurmft_replicas_{name}": 1.0 for name in ("ready", "expected", "wanted")}
        places = (ReplicaPlace(name="a", hosts=("127.0.0.1",), port=world["a"].port),)
        world.router.replicas.take(Members(epoch=1, router=True, expected=1, replicas=places, wanted=3))
        assert gauges() == {
            "slurmft_replicas_ready": 1.0,
            "slurmft_replicas_expected": 1.0,
            "slurmft_replicas_wanted": 3.0,
        }


async def test_a_port_that_the_router_of_before_still_has_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving({"a": answers("a")}) as world:
        after = RouterServer(world.router, world.config)
        waiting = asyncio.create_task(after.listen("127.0.0.1", world.port))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await world.server.close()
        assert await waiting == world.port
        monkeypatch.setattr(router, "PORT_S", 0.1)
        with pytest.raises(LaunchError, match=f"cannot listen on port {world.port}: Address already in use"):
            await RouterServer(world.router, world.config).listen("127.0.0.1", world.port)
        await after.close()
