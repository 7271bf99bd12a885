"""``sync`` with S3: moto's server on loopback, which is killed in the middle of an upload."""

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from extras import needs

from slurm.conftest import eventually
from slurm.test_sync import events, local_run, output

pytestmark = [needs("moto", "s3fs"), pytest.mark.timeout(400)]

SERVER = """
import sys
from moto.server import main
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""


class S3:
    """A server of its own; its buckets are gone when it ends."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER, str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        eventually(self.answers, 60, "moto's server answers")
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/bucket", method="PUT"), timeout=20).close()

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/moto-api/", timeout=2).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def is_receiving(self) -> bool:
        """Parts of an object have come, and not yet all of them."""
        with urllib.request.urlopen(f"{self.url}/bucket?uploads", timeout=20) as answer:
            return b"<UploadId>" in answer.read()

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    server = S3()
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-that-no-file-may-hold")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield server
    server.kill()


@pytest.mark.long
def test_the_server_is_killed_in_the_middle_of_an_upload(tmp_path: Path, s3: S3) -> None:
    """Training goes on; the next upload completes; another node's restore finds it. The secret is in no file."""
    run = local_run(tmp_path, "s3://bucket/kept", steps=20, every=10, size=24 << 20, bandwidth_mb_s=10)
    run.submit()
    eventually(s3.is_receiving, 200, run.story)
    s3.kill()
    eventually(lambda: events(run, "sync failed"), 200, run.story)
    s3.start()
    eventually(lambda: events(run, "sync works again"), 200, run.story)
    (tmp_path / "go").touch()
    run.wait_until_done()
    assert output(run).count("began at") == 1, run.story()
    content = (tmp_path / "models" / "snapshot").read_bytes()
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"a-secret-that-no-file-may-hold" not in path.read_bytes(), path

    # a node that has nothing
    (tmp_path / "models").rename(tmp_path / "models of the first node")
    (tmp_path / ".models.slurmft").rename(tmp_path / "state of the first node")
    (tmp_path / "run" / "done.json").unlink()
    run.submit()
    eventually(lambda: events(run, "folder restored"), 200, run.story)
    assert (tmp_path / "models" / "snapshot").read_bytes() == content
    assert events(run, "folder restored")[-1]["files"] == 1, run.story()
