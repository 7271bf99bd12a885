"""A router with a certificate speaks HTTPS alone, and refuses a key that others may read."""

import asyncio
import contextlib
import gc
import ssl
import subprocess
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from serving_world import KEY, TOKEN

from slurmft.config.inference import InferenceConfig, ServingConfig
from slurmft.errors import UsageError
from slurmft.inference.endpoint import ca_file, context_for, prepare, prepare_authority, token_of
from slurmft.inference.router import Router, RouterServer
from slurmft.policy.values import Strangers


@pytest.fixture
def config(tmp_path: Path) -> InferenceConfig:
    paths = {"tls_certificate": str(tmp_path / "certificate.pem"), "tls_key": str(tmp_path / "key.pem")}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", paths["tls_key"], "-out",
         paths["tls_certificate"]], check=True, capture_output=True,
    )  # fmt: skip
    return InferenceConfig.model_validate({"engine": {"command": ["e", "{port}"]}, "serving": paths})


@contextlib.asynccontextmanager
async def listening(config: InferenceConfig) -> AsyncIterator[tuple[RouterServer, int]]:
    """A router of the configuration, and its port."""
    router = Router(config, node="n0", token=TOKEN, engine_token="", key=KEY)
    server = RouterServer(router, config)
    yield server, await server.listen("127.0.0.1", 0)
    await asyncio.sleep(0)
    await server.close()
    await router.close()


def with_token() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})


async def asks_status(config: InferenceConfig, session: aiohttp.ClientSession, port: int) -> None:
    """As a client that trusts the certificate."""
    assert config.serving is not None
    trusted = ssl.create_default_context(cafile=str(config.serving.tls_certificate))
    async with session.get(f"https://127.0.0.1:{port}/status", ssl=trusted) as answer:
        assert answer.status == 200


async def test_a_client_that_trusts_the_certificate_gets_in_and_plain_http_does_not(config: InferenceConfig) -> None:
    async with listening(config) as (_, port), with_token() as session:
        await asks_status(config, session, port)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(f"https://127.0.0.1:{port}/status")
        for more in b"", b"x" * 900_000:
            async with session.post(f"http://127.0.0.1:{port}/status", data=more) as answer:
                assert answer.status == 400 and "begins with https" in (await answer.json())["error"]["message"]


async def test_a_client_that_does_not_finish_the_handshake_is_cut_off(
    config: InferenceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmft.inference.router.HANDSHAKE_S", 0.2)
    async with listening(config) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_handshakes_that_fail_leave_no_buffers_behind(config: InferenceConfig) -> None:
    """They are 256 KiB each, and nobody has to look for circles first."""
    async with listening(config) as (server, port):
        gc.collect()
        gc.disable()
        try:
            for said in (b"\x16ET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b""):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                writer.write_eof()
                await asyncio.wait_for(reader.read(), 10)
                writer.close()
            async with asyncio.timeout(10):
                while len(server.strangers):
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not [each for each in gc.get_objects() if type(each) is SSLProtocol]
        finally:
            gc.enable()


async def test_silent_connections_are_counted_before_their_handshake(config: InferenceConfig) -> None:
    async with listening(config) as (server, port):
        server.strangers = Strangers(20, 10)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in silent]
        async with asyncio.timeout(30):
            while sum(each.done() for each in ended) < 40:
                await asyncio.sleep(0)
        assert len(server.strangers) == 10
        async with with_token() as session:
            await asks_status(config, session, port)
            assert len(server.strangers) == 9, "a client with the token is none"
        for each in ended:
            each.cancel()
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(("sent", "at_most"), [(b"", 0), (b"\x16", 10)], ids=["silent", "one byte"])
async def test_connections_without_a_handshake_hold_no_buffers(
    config: InferenceConfig, sent: bytes, at_most: int
) -> None:
    def held() -> int:
        return sum(type(each) is SSLProtocol for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        async with listening(config) as (server, port):
            server.strangers = Strangers(20, 10)
            before = held()
            streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
            for _, writer in streams:
                writer.write(sent)
            ended = [asyncio.create_task(reader.read()) for reader, _ in streams]
            async with asyncio.timeout(30):
                while sum(each.done() for each in ended) < 40 or len(server._arriving) > 10:
                    await asyncio.sleep(0)
            assert held() - before <= at_most
            for each in ended:
                each.cancel()
            for _, writer in streams:
                writer.close()
    finally:
        gc.enable()


async def test_a_key_that_others_may_read_is_refused(config: InferenceConfig) -> None:
    assert config.serving is not None and config.serving.tls_key is not None
    config.serving.tls_key.chmod(0o644)
    router = Router(config, node="n0", token=TOKEN, engine_token="", key=KEY)
    with pytest.raises(UsageError, match="others may read"):
        await RouterServer(router, config).listen("127.0.0.1", 0)
    await router.close()


async def test_a_run_makes_its_own_authority_once_and_a_certificate_for_each_start(tmp_path: Path) -> None:
    given = {"engine": {"command": ["e", "{port}"]}, "serving": {"tls_own": True}}
    config = InferenceConfig.model_validate(given)
    prepare(tmp_path, None)
    prepare_authority(tmp_path)
    authority, key = ca_file(tmp_path), tmp_path / "serving" / "ca.key"
    before = authority.read_bytes(), key.read_bytes()
    assert key.stat().st_mode & 0o777 == 0o600
    prepare_authority(tmp_path)
    assert (authority.read_bytes(), key.read_bytes()) == before, "clients that trust it go on"
    seen = []
    for _ in range(2):
        router = Router(config, node="n0", token=token_of(tmp_path), engine_token="", key=KEY)
        server = RouterServer(router, config)
        port = await server.listen("127.0.0.1", 0, context_for(tmp_path, ["node-7.example", "127.0.0.1"]))
        trusted = ssl.create_default_context(cafile=str(authority))
        shown = {"Authorization": f"Bearer {token_of(tmp_path)}"}
        place = f"https://127.0.0.1:{port}/status"
        async with aiohttp.ClientSession(headers=shown) as client, client.get(place, ssl=trusted) as answer:
            assert answer.status == 200
        for name in ("node-7.example", "localhost"):
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted, server_hostname=name)
            seen.append(writer.get_extra_info("ssl_object").getpeercert()["serialNumber"])
            writer.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("127.0.0.1", port, ssl=trusted, server_hostname="another.example")
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"https://127.0.0.1:{port}/status")
        await asyncio.sleep(0)
        await server.close()
        await router.close()
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_without_openssl_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="tls_own: openssl cannot be run"):
        prepare_authority(tmp_path)


def test_only_one_kind_of_certificate_is_taken(config: InferenceConfig) -> None:
    assert config.serving is not None
    with pytest.raises(ValueError, match="give tls_own, or"):
        ServingConfig.model_validate({**config.serving.model_dump(), "tls_own": True})


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({}, True),
        ({"tls_own": False}, False),
        ({"tls_certificate": "/c.pem", "tls_key": "/k.pem"}, False),
        ({"tls_certificate": None}, True),
    ],
)
def test_routers_speak_https_unless_plain_http_is_asked_for(given: dict[str, object], own: bool) -> None:
    found = ServingConfig.model_validate(given)
    assert found.tls_own is own
    assert found.is_https is (given != {"tls_own": False})
    assert ServingConfig.model_validate(found.model_dump()) == found


def test_another_job_has_another_token_and_a_handover_keeps_it(tmp_path: Path) -> None:
    def token(**job: Any) -> str:
        prepare(tmp_path, None, **job)
        return token_of(tmp_path)

    first = token()
    assert token(job="7.0") == first, "what serve has shown is the first job's"
    assert token(job="7.0") == token() == first
    assert token(job="8.0", goes_on=True) == first
    assert token(job="8.0") == first
    assert token(job="8.1") != first
    second = token(job="8.1")
    assert token(job="9.0") not in (first, second)


def test_a_token_of_the_users_own_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("m" * 20)
    (tmp_path / "mine").chmod(0o600)
    for job in ("7.0", "8.0"):
        prepare(tmp_path, tmp_path / "mine", job=job)
        assert token_of(tmp_path) == "m" * 20


async def test_a_forger_at_a_dead_routers_port_gets_no_token(tmp_path: Path) -> None:
    """Another process that listens there cannot show a certificate of the run."""
    prepare(tmp_path, None)
    prepare_authority(tmp_path)
    heard, forging = bytearray(), set[Any]()

    async def forge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forging.add(asyncio.current_task())
        heard.extend(await reader.read(4096))
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"answer":"forged"}')
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(forge, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    scheme = "https" if ServingConfig.model_validate({}).is_https else "http"  # as where nothing is configured
    client = openai.AsyncOpenAI(
        base_url=f"{scheme}://127.0.0.1:{port}/v1", api_key=token_of(tmp_path), max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=str(ca_file(tmp_path)))),
    )  # fmt: skip
    with pytest.raises(openai.APIConnectionError):
        await client.completions.create(model="m", prompt="secret")
    await client.close()
    server.close()
    await asyncio.gather(*forging)
    assert heard
    assert token_of(tmp_path).encode() not in heard and b"secret" not in heard
