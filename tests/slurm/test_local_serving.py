"""An endpoint on this machine: routers, replicas and agents are killed under the load of a hundred clients."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from waiting import SLOWEST

from slurm.conftest import eventually
from slurm.patient_client import post_once
from slurm.test_local import OnThisMachine
from slurmft.inference.endpoint import HighAvailabilityCluster, ca_file, headers_file, token_of
from slurmft.storage.run_folder import RunFolder

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]
SLURMFT = [sys.executable, "-m", "slurmft"]
HERE = Path(__file__).parent
CLIENTS = 100
STRANGERS_BYTES = 400 << 20
"""Of memory for all strangers: a thousand handshakes of 256 KiB, and what they leave behind."""


class Endpoint(OnThisMachine):
    """One endpoint on this machine: two nodes, each with a router and two replicas."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.folder = RunFolder(path)
        self.config = path.with_suffix(".yaml")
        engine = [sys.executable, str(HERE / "serving_engine.py"), "--socket", "{socket}"]
        section = {"engine": {"command": engine}, "replicas_per_node": 2, "concurrency": 64, "hang_timeout_s": 3,
                   "serving": {}, **changes}  # fmt: skip
        faults = {"agent_timeout_s": 3, "supervisor_lease_s": 30, "retry_delay_s": 0}
        self.config.write_text(yaml.safe_dump({"run_folder": str(path), "nodes": 2, "inference": section,
                                               "fault_tolerance": faults}))  # fmt: skip

    def slurmft(self, *arguments: str) -> str:
        result = subprocess.run(
            [*SLURMFT, *arguments], capture_output=True, text=True, timeout=100 * SLOWEST, check=False
        )
        assert result.returncode == 0, result.stderr + self.story()
        return result.stdout

    def start(self, replicas: int = 4) -> None:
        self.slurmft("serve", str(self.config), "--cluster", "local")
        self.wait_for(2, replicas)

    def wait_for(self, routers: int, replicas: int) -> None:
        """Until so many routers listen, and all of them see so many replicas."""

        def is_so() -> bool:
            found = HighAvailabilityCluster.read(self.folder.path).routers
            return len(found) == routers and all(self.status(each.urls[0]) == replicas for each in found)

        eventually(is_so, 60, lambda: f"{routers} routers with {replicas} replicas\n{self.story()}")

    def status(self, url: str) -> int:
        request = urllib.request.Request(f"{url}/status", headers=self.headers)
        try:
            with urllib.request.urlopen(request, timeout=5, context=self.trusted) as answer:
                return int(json.load(answer)["replicas"]["ready"])
        except (OSError, urllib.error.URLError):
            return -1

    @property
    def trusted(self) -> ssl.SSLContext | None:
        path = ca_file(self.folder.path)
        return ssl.create_default_context(cafile=str(path)) if path.exists() else None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {token_of(self.folder.path)}"}

    def load(self, seconds: float, kind: str = "patient") -> subprocess.Popen[str]:
        argv = [sys.executable, str(HERE / "serving_load.py"), str(self.folder.path), str(CLIENTS), str(seconds), kind]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    def processes(self, what: str) -> list[psutil.Process]:
        """Of this run: those whose environment or command names it."""
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
                if what in words and str(self.folder.path) in " ".join([words, *process.environ().values()]):
                    found.append(process)
            except psutil.Error:
                continue
        return sorted(found, key=lambda each: each.pid)

    def routers(self) -> list[int]:
        """Process ids of those that listen on the routers' ports."""
        ports = {each.port for each in HighAvailabilityCluster.read(self.folder.path).routers}
        return [each.pid for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port in ports
                and each.status == psutil.CONN_LISTEN and each.pid]  # fmt: skip

    def story(self) -> str:
        lines = [f"{e.at:%H:%M:%S.%f} {e.attempt} {e.event} {e.details}" for e in self.folder.journal().read()]
        logs = [f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
                for pattern in ("submissions/*.out", "attempts/*/*.log")
                for path in sorted(self.folder.path.glob(pattern))]  # fmt: skip
        return "\n".join([*lines, *logs])


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    found = Endpoint(tmp_path / "endpoint")
    found.start()
    yield found
    found.slurmft("stop", str(found.folder.path), "--timeout", "30")
    assert HighAvailabilityCluster.read(found.folder.path).routers == (), "no router is named that is gone"
    eventually(lambda: found.processes("serving_engine.py") == [], 10, "an engine has outlived its driver")


def test_what_a_user_does(endpoint: Endpoint) -> None:
    url, headers = endpoint.slurmft("endpoint", str(endpoint.folder.path)).strip(), headers_file(endpoint.folder.path)
    assert endpoint.slurmft("endpoint", str(endpoint.folder.path), "--header-file").strip() == str(headers)
    assert headers.stat().st_mode & 0o777 == 0o600
    curl = subprocess.run(["curl", "-sk", "-H", f"@{headers}", f"{url}/v1/models"], capture_output=True, check=True)
    assert json.loads(curl.stdout)["data"][0]["id"] == "m"
    # the client of OpenAI, unchanged
    assert endpoint.trusted is not None
    import openai  # a second and a half, which no other test here needs

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=token_of(endpoint.folder.path), max_retries=0,
                           http_client=openai.DefaultHttpxClient(verify=endpoint.trusted))  # fmt: skip
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    assert whole is not None and len(whole) == 64
    parts = client.chat.completions.create(**asked, stream=True, extra_body={"tokens": 64})
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "BAD"}])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=line["url"], completion_window="24h")
    done = eventually(
        lambda: found if (found := client.batches.retrieve(batch.id)).output_file_id else None, 20, "done"
    )
    (row,) = client.files.content(done.output_file_id).text.splitlines()
    assert json.loads(row)["response"]["body"]["choices"][0]["message"]["content"] == whole
    client.close()

    def logged() -> set[str]:
        logs = endpoint.folder.path.glob("serving/access-*.log")
        return {json.loads(line)["path"] for path in logs for line in path.read_text().splitlines()}

    eventually(lambda: {"/v1/models", "/v1/chat/completions", "/v1/batches"} <= logged(), 30, "lines of all of them")
    eventually(lambda: (endpoint.folder.progress() or {}).get("step", 0) >= 5, 10, "requests count as steps")
    status = json.loads(endpoint.slurmft("status", str(endpoint.folder.path), "--json"))
    assert status["state"] == "running" and status["step"] >= 5
    token = token_of(endpoint.folder.path)
    assert [" ".join(each.cmdline()) for each in endpoint.processes(token) if token in " ".join(each.cmdline())] == []
    files = [path for path in endpoint.folder.path.rglob("*") if path.is_file() and not path.is_symlink()]
    told = {path.name for path in files if token.encode() in path.read_bytes()}
    assert told == {"token", "headers"}, "it is in no log"


def test_a_request_that_crashes_its_engines_is_refused(endpoint: Endpoint) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "DIE"}]}
    status, content = post_once(endpoint.folder.path, "/v1/chat/completions", asked)
    assert status == 422 and "has crashed 2 replicas" in json.loads(content)["error"]["message"], content
    eventually(lambda: len(endpoint.events("replica died")) == 2, 10, endpoint.story)
    endpoint.wait_for(2, 4)
    asked["messages"] = [{"role": "user", "content": "live"}]
    assert post_once(endpoint.folder.path, "/v1/chat/completions", asked)[0] == 200


def test_an_endpoint_with_certificates_of_its_own(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path / "endpoint", serving={"tls_own": True})
    said = endpoint.slurmft("serve", str(endpoint.config), "--cluster", "local")
    try:
        endpoint.wait_for(2, 4)
        line = next(each for each in said.splitlines() if "curl" in each).partition(": ")[2]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        curl = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, check=True)
        assert json.loads(curl.stdout)["data"][0]["id"] == "m"
        url = endpoint.slurmft("endpoint", str(endpoint.folder.path)).strip()
        assert url.startswith("https://")
        assert subprocess.run(["curl", "-s", f"{url}/v1/models"], check=False).returncode == 60, "not trusted"
        asked = {"model": "m", "messages": [{"role": "user", "content": "live"}]}
        assert post_once(endpoint.folder.path, "/v1/chat/completions", asked)[0] == 200
    finally:
        endpoint.slurmft("stop", str(endpoint.folder.path), "--timeout", "30")


@pytest.mark.long
@pytest.mark.parametrize(
    "victim",
    [
        "engine",
        "supervisor",
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("driver", "engine stopped", "agent")),
    ],
)
def test_no_request_of_a_patient_client_fails_when_something_dies(endpoint: Endpoint, victim: str) -> None:
    load = endpoint.load(8)
    eventually(lambda: (endpoint.folder.progress() or {}).get("step", 0) > 300, 30, endpoint.story)
    engines = {each.pid for each in endpoint.processes("serving_engine.py")}
    if victim == "agent":
        endpoint.processes("slurmft agent")[1].kill()
    elif victim == "supervisor":
        endpoint.supervisor.kill()
    elif victim == "driver":
        endpoint.processes("serving_engine.py")[0].parent().kill()  # type: ignore[union-attr]
    else:
        number = signal.SIGSTOP if victim == "engine stopped" else signal.SIGKILL
        endpoint.processes("serving_engine.py")[0].send_signal(number)
    told = json.loads(load.communicate(timeout=120 * SLOWEST)[0])
    assert told["errors"] == {}, f"{told}\n{endpoint.story()}"
    assert told["right"] == told["asked"] > 300, told
    if victim == "supervisor":
        eventually(lambda: len(endpoint.events("endpoint opened")) == 2, 60, endpoint.story)
    endpoint.wait_for(2, 4)
    if victim == "supervisor":
        assert {each.pid for each in endpoint.processes("serving_engine.py")} == engines, "they live on"
        for router in HighAvailabilityCluster.read(endpoint.folder.path).routers:
            asked = urllib.request.Request(f"{router.urls[0]}/metrics", headers=endpoint.headers)
            with urllib.request.urlopen(asked, timeout=5, context=endpoint.trusted) as answer:
                assert 'tries_again_total{why="lost"}' not in answer.read().decode(), "nothing was computed again"
    elif victim != "agent":
        assert len(endpoint.events("replica died")) == 1
        assert endpoint.events("agent lost") == [], "it goes on with another life of its replica"


@pytest.mark.parametrize("kind", ["patient", pytest.param("plain", marks=pytest.mark.soak)])
def test_a_dead_router_costs_a_plain_client_what_it_had_a_patient_one_nothing(endpoint: Endpoint, kind: str) -> None:
    load = endpoint.load(6, kind)
    eventually(lambda: (endpoint.folder.progress() or {}).get("step", 0) > 300, 30, endpoint.story)
    os.kill(endpoint.routers()[0], signal.SIGKILL)
    told = json.loads(load.communicate(timeout=120 * SLOWEST)[0])
    assert told["right"] > 300, told
    if kind == "patient":
        assert told["errors"] == {}, f"{told}\n{endpoint.story()}"
    else:  # what was in flight; then connections are refused until it listens again, on the same port
        cut = {what: count for what, count in told["errors"].items() if not what.startswith("ClientConnectorError")}
        assert 0 < sum(cut.values()) <= CLIENTS // 2, f"{told}\n{endpoint.story()}"
    endpoint.wait_for(2, 4)
    assert len(endpoint.events("router ended")) == 1


@pytest.mark.soak
def test_a_replica_that_ends_again_and_again_stays_down_and_the_others_go_on(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path / "endpoint", max_restarts=1)
    try:
        endpoint.start()
        load = endpoint.load(12)
        before = {each.pid for each in endpoint.processes("serving_engine.py")}
        endpoint.processes("serving_engine.py")[0].kill()
        again = eventually(
            lambda: [each for each in endpoint.processes("serving_engine.py") if each.pid not in before], 30, "again"
        )
        endpoint.wait_for(2, 4)
        again[0].kill()
        (down,) = eventually(lambda: endpoint.events("replica down"), 30, endpoint.story)
        assert "SIGKILL" in down.details["reason"] or "-9" in down.details["reason"], down
        told = json.loads(load.communicate(timeout=120 * SLOWEST)[0])
        assert told["errors"] == {} and told["right"] == told["asked"] > 1000, f"{told}\n{endpoint.story()}"
        endpoint.wait_for(2, 3)
        assert len(endpoint.events("replica down")) == 1
    finally:
        endpoint.slurmft("stop", str(endpoint.folder.path), "--timeout", "30")


@pytest.mark.soak
def test_a_port_that_another_process_has_ends_the_attempt_by_its_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        endpoint = Endpoint(tmp_path / "endpoint", max_restarts=0, serving={"routers": 1, "port": port})
        endpoint.slurmft("serve", str(endpoint.config), "--cluster", "local")
        found = eventually(lambda: endpoint.events("decision"), 60, endpoint.story)
        assert (
            f"no router is left: 127.0.0.1: exit code 75; its last words: slurmft: cannot listen on port {port}"
            in (found[0].details["reason"])
        )
    eventually(lambda: endpoint.events("router ready"), 60, endpoint.story)
    endpoint.slurmft("stop", str(endpoint.folder.path), "--timeout", "30")


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[Endpoint]:
    """An endpoint that has no replica while no request comes."""
    found = Endpoint(tmp_path / "endpoint", concurrency=25, serving={"replicas": {"min": 0, "idle_s": 6}})
    found.start(replicas=0)
    yield found
    found.slurmft("stop", str(found.folder.path), "--timeout", "30")


@pytest.mark.long
def test_replicas_follow_the_load_from_none_to_none_and_no_request_fails(idle: Endpoint, tmp_path: Path) -> None:
    endpoint = idle
    assert endpoint.processes("serving_engine.py") == [], "no engine runs while no request comes"
    # a router that is started again while there is no replica
    os.kill(endpoint.routers()[0], signal.SIGKILL)
    eventually(lambda: len(endpoint.events("router ready")) == 3, 30, endpoint.story)
    load = endpoint.load(60, "plain")
    eventually(lambda: len(endpoint.processes("serving_engine.py")) >= 2, 30, endpoint.story)
    endpoint.processes("serving_engine.py")[-1].kill()  # one that only starts, or has just begun
    eventually(lambda: len(endpoint.events("replica ready")) >= 4, 40, endpoint.story)
    # long answers are on all replicas when fewer are enough
    routers = HighAvailabilityCluster.read(endpoint.folder.path).routers
    asked = {"model": "m", "stream": True, "tokens": 400, "messages": [{"role": "user", "content": "long"}]}
    streams = [
        subprocess.Popen(["curl", "-sk", "-H", f"@{headers_file(endpoint.folder.path)}", "-d", json.dumps(asked), "-H",
                          "Content-Type: application/json", f"{routers[n % 2].urls[0]}/v1/chat/completions"],
                         stdout=subprocess.PIPE, text=True)
        for n in range(8)
    ]  # fmt: skip
    (tmp_path / "enough").touch()
    told = json.loads(load.communicate(timeout=90 * SLOWEST)[0])
    assert told["errors"] == {}, (told, endpoint.story())
    assert told["right"] == told["asked"] > 100
    eventually(lambda: endpoint.events("replicas wanted")[-1].details["wanted"] == 1, 30, endpoint.story)
    assert any(each.poll() is None for each in streams), "it shrinks while long answers are on their way"
    for each in streams:
        assert each.communicate(timeout=60 * SLOWEST)[0].endswith("data: [DONE]\n\n"), endpoint.story()
    endpoint.wait_for(2, 0)
    eventually(lambda: endpoint.processes("serving_engine.py") == [], 20, endpoint.story)
    wanted = [each.details["wanted"] for each in endpoint.events("replicas wanted")]
    assert max(wanted) == 4 and wanted[-1] == 0
    assert endpoint.events("replica down") == []


@pytest.mark.soak
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_ten_thousand_strangers_cost_a_router_no_client_and_bounded_memory(
    tmp_path: Path, request: pytest.FixtureRequest, tls: bool
) -> None:
    """Each comes again as soon as it is cut off."""
    endpoint = Endpoint(tmp_path / "endpoint", serving={"tls_own": tls, "routers": 1})
    endpoint.slurmft("serve", str(endpoint.config), "--cluster", "local")
    request.addfinalizer(lambda: endpoint.slurmft("stop", str(endpoint.folder.path), "--timeout", "30"))
    endpoint.wait_for(1, 4)
    (pid,) = set(endpoint.routers())
    router, sizes = psutil.Process(pid), list[int]()
    argv = [sys.executable, str(HERE / "serving_strangers.py"), str(endpoint.folder.path), "10000", "30"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as siege:
        assert siege.stdout is not None
        while siege.poll() is None:
            sizes.append(router.memory_info().rss)
            with contextlib.suppress(subprocess.TimeoutExpired):
                siege.wait(0.2)
        told = json.loads(siege.stdout.read())
    assert told["errors"] == {} and told["asked"] >= 10, told
    assert told["opened"] >= 10_000, "they have all been there"
    assert max(sizes) - sizes[0] < STRANGERS_BYTES, (sizes[0], max(sizes), told)
    assert router.is_running() and not endpoint.events("replica died") and not endpoint.events("router ended")
