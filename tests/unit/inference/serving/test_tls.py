"""A router with a certificate speaks HTTPS alone, and refuses a key that others may read."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from serving_world import KEY, TOKEN, run

from slurmft.config.inference import InferenceConfig
from slurmft.errors import UsageError
from slurmft.inference.serving.entry import RouterServer
from slurmft.inference.serving.router import Router


@pytest.fixture
def config(tmp_path: Path) -> InferenceConfig:
    paths = {"tls_certificate": str(tmp_path / "certificate.pem"), "tls_key": str(tmp_path / "key.pem")}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", paths["tls_key"], "-out",
         paths["tls_certificate"]], check=True, capture_output=True,
    )  # fmt: skip
    return InferenceConfig.model_validate({"engine": {"command": ["e", "{port}"]}, "serving": paths})


def test_a_client_that_trusts_the_certificate_gets_in_and_plain_http_does_not(config: InferenceConfig) -> None:
    assert config.serving is not None
    trusted = ssl.create_default_context(cafile=str(config.serving.tls_certificate))

    async def work() -> None:
        router = Router(config, node="n0", token=TOKEN, engine_token="", key=KEY)
        server = RouterServer(router, config)
        port = await server.listen("127.0.0.1", 0)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            async with session.get(f"https://127.0.0.1:{port}/status", ssl=trusted) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"https://127.0.0.1:{port}/status")
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://127.0.0.1:{port}/status")
        await asyncio.sleep(0)
        await server.close()
        await router.close()

    run(work())


def test_a_key_that_others_may_read_is_refused(config: InferenceConfig) -> None:
    assert config.serving is not None and config.serving.tls_key is not None
    config.serving.tls_key.chmod(0o644)

    async def work() -> None:
        router = Router(config, node="n0", token=TOKEN, engine_token="", key=KEY)
        with pytest.raises(UsageError, match="others may read"):
            await RouterServer(router, config).listen("127.0.0.1", 0)
        await router.close()

    run(work())
