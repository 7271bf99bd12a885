"""Engines and clients as they behave, on this machine: slow is not dead, and alive is not well."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm.conftest import eventually
from slurm.test_local_serving import HERE, Endpoint
from slurmft.inference.endpoint import HighAvailabilityCluster

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

HANG_S = 6.0
New = Callable[..., "Behaving"]


class Behaving(Endpoint):
    """Two nodes with a replica each, and one router."""

    def __init__(self, path: Path, *, files: dict[str, str], **changes: Any) -> None:
        self.engine_folder = path.parent / "engine"
        self.engine_folder.mkdir()
        for name, text in files.items():
            (self.engine_folder / name).write_text(text)
        command = [sys.executable, str(HERE / "behaving_engine.py"), "{port}", str(self.engine_folder)]
        engine = {"command": command, **changes.pop("engine", {})}
        super().__init__(path, **{"engine": engine, "replicas_per_node": 1, "concurrency": 8, "max_restarts": 1,
                                  "hang_timeout_s": HANG_S, "serving": {"routers": 1}, **changes})  # fmt: skip
        self.outcomes: Counter[object] = Counter()
        self.times: list[tuple[float, object]] = []
        self._over = threading.Event()
        self._clients: list[threading.Thread] = []

    def behaves(self, how: str) -> None:
        (self.engine_folder / "behaviour").write_text(how)

    def engines(self) -> list[int]:
        return [each.pid for each in self.processes("behaving_engine.py")]

    def ask(self, timeout_s: float = 60.0, **body: Any) -> tuple[object, dict[str, Any]]:
        """Status, or what kept a plain client from one; and the answer."""
        url = HighAvailabilityCluster.read(self.folder.path).routers[0].urls[0] + "/v1/completions"
        content = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 8, **body}).encode()
        asked = urllib.request.Request(url, content, {**self.headers, "Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=timeout_s, context=self.trusted) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except (TimeoutError, OSError) as error:
            return type(error).__name__, {}

    def clients(self, count: int, *, timeout_s: float, **body: Any) -> None:
        """So many that ask one request after the other from now on, each with a limit of its own."""

        def work() -> None:
            while not self._over.wait(0.1):
                began_s = time.monotonic()
                what = self.ask(timeout_s, **body)[0]
                self.outcomes[what] += 1
                self.times.append((began_s, what))

        new = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        self._clients += new
        for each in new:
            each.start()

    def leave(self) -> None:
        self._over.set()
        for each in self._clients:
            each.join()

    def deaths(self) -> list[dict[str, Any]]:
        return [event.details for event in self.events("replica died")]


@pytest.fixture
def new_endpoint(tmp_path: Path) -> Iterator[New]:
    made: list[Behaving] = []

    def new(files: dict[str, str] | None = None, **changes: Any) -> Behaving:
        found = Behaving(tmp_path / "endpoint", files=files or {}, **changes)
        made.append(found)
        found.slurmft("serve", str(found.config), "--cluster", "local")
        found.wait_for(1, 2)
        return found

    yield new
    for each in made:
        each.leave()
        each.slurmft("stop", str(each.folder.path), "--timeout", "30")
        eventually(lambda: each.engines() == [], 10, "an engine has outlived its driver")  # noqa: B023


def test_a_stopped_engine_is_found_although_its_clients_give_up(new_endpoint: New) -> None:
    """Each asks for three seconds at most, and comes again: nothing is in flight for longer."""
    endpoint = new_endpoint()
    endpoint.clients(4, timeout_s=3.0)
    eventually(lambda: endpoint.outcomes[200] > 20, 30, endpoint.story)
    victim = endpoint.engines()[0]
    os.kill(victim, signal.SIGSTOP)
    stopped_s = time.monotonic()
    eventually(lambda: len(endpoint.deaths()) == 1, 5 * HANG_S, endpoint.story)
    assert "hang_timeout_s" in endpoint.deaths()[0]["reason"] and endpoint.deaths()[0]["failures"] == 0
    assert victim not in endpoint.engines()
    endpoint.wait_for(1, 2)
    endpoint.leave()
    late = Counter(what for began_s, what in endpoint.times if began_s > stopped_s + HANG_S)
    assert set(late) == {200}, (late, endpoint.story())
    assert endpoint.outcomes["TimeoutError"] <= 2 * 4, "it was avoided as soon as it was suspected"


@pytest.mark.long
def test_an_answer_that_takes_long_costs_no_engine_where_the_engine_answers_others(new_endpoint: New) -> None:
    endpoint = new_endpoint()
    endpoint.clients(2, timeout_s=30.0)
    engines = endpoint.engines()
    status, answer = endpoint.ask(60, pause=3 * HANG_S)
    assert status == 200, (answer, endpoint.story())
    endpoint.leave()
    status, answer = endpoint.ask(60, pause=2 * HANG_S)
    assert status == 200, "also with nothing beside it"
    assert endpoint.engines() == engines and not endpoint.deaths(), endpoint.story()
    assert set(endpoint.outcomes) == {200}


@pytest.mark.long
def test_a_request_that_holds_up_two_engines_ends_as_one_error_and_costs_no_restart(new_endpoint: New) -> None:
    """They work on one request at a time, and count nothing: the smallest request waits behind the long one."""
    endpoint = new_endpoint({"serial": "yes"})
    endpoint.clients(2, timeout_s=90.0)
    eventually(lambda: endpoint.outcomes[200] > 5, 30, endpoint.story)
    asked_s = time.monotonic()
    for _ in range(3):  # as a client does that tries again by itself
        status, answer = endpoint.ask(120, pause=600)
        assert status == 422 and "hang_timeout_s" in answer["error"]["message"], (status, answer, endpoint.story())
    assert time.monotonic() - asked_s < 6 * HANG_S
    # one more where another request was with it at first
    eventually(lambda: len(endpoint.deaths()) in (2, 3), 10, endpoint.story)
    assert {each["failures"] for each in endpoint.deaths()} == {0}, endpoint.deaths()
    endpoint.wait_for(1, 2)
    endpoint.leave()
    assert set(endpoint.outcomes) == {200}, endpoint.outcomes


def test_an_engine_that_fails_everything_is_started_again(new_endpoint: New) -> None:
    endpoint = new_endpoint(max_restarts=5, max_retries=0)
    assert endpoint.ask()[0] == 200
    assert [endpoint.ask(status=501)[0] for _ in range(8)] == [501] * 8
    assert [endpoint.ask(status=500)[0] for _ in range(8)] == [500] * 8, "of this request's own making"
    time.sleep(1.0)  # more than it takes to ask an engine
    assert not endpoint.deaths()
    engines = set(endpoint.engines())
    endpoint.behaves("fails")
    endpoint.clients(2, timeout_s=30.0)
    eventually(lambda: len(endpoint.deaths()) >= 2, 30, endpoint.story)
    endpoint.behaves("well")
    assert "fails every request" in endpoint.deaths()[0]["reason"], endpoint.deaths()
    endpoint.wait_for(1, 2)
    assert not engines & set(endpoint.engines())
    before = endpoint.outcomes[200]
    eventually(lambda: endpoint.outcomes[200] > before + 20, 30, endpoint.story)


@pytest.mark.long
def test_an_engine_that_hangs_behind_a_page_of_health_is_found(new_endpoint: New) -> None:
    """A client lists its models all the time, and gets an answer."""
    endpoint = new_endpoint(max_restarts=5)
    assert endpoint.ask()[0] == 200
    endpoint.behaves("hangs")
    looking = threading.Event()

    def look() -> None:
        url = HighAvailabilityCluster.read(endpoint.folder.path).routers[0].urls[0] + "/v1/models"
        while not looking.wait(0.1):
            try:
                asked = urllib.request.Request(url, headers=endpoint.headers)
                urllib.request.urlopen(asked, timeout=5, context=endpoint.trusted).close()
            except OSError:
                continue

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    endpoint.clients(2, timeout_s=60.0)
    eventually(lambda: len(endpoint.deaths()) >= 1, 5 * HANG_S, endpoint.story)
    endpoint.behaves("well")
    looking.set()
    watcher.join()
    assert "hang_timeout_s" in endpoint.deaths()[0]["reason"]


@pytest.mark.long
@pytest.mark.parametrize("counter", ["live", "end"])
def test_a_counter_that_grows_meanwhile_is_progress_and_one_that_grows_at_the_end_costs_no_engine_either(
    new_endpoint: New, counter: str
) -> None:
    """One request at a time; with 4096 tokens asked for, a request without a live counter has four times as long."""
    endpoint = new_endpoint({"serial": "yes", "counter": counter},
                            engine={"progress_metric": "tokens_total", "metrics_path": "/metrics"})  # fmt: skip
    pause_s = 5 * HANG_S if counter == "live" else 3 * HANG_S
    assert endpoint.ask(120, pause=pause_s, max_tokens=8 if counter == "live" else 4096)[0] == 200, endpoint.story()
    assert not endpoint.deaths(), endpoint.story()


class Batch(Endpoint):
    """A batch on this machine, with one replica of the same engine."""

    def __init__(self, path: Path, bodies: list[dict[str, Any]], *, files: dict[str, str], **changes: Any) -> None:
        engine_folder = path.parent / "engine"
        engine_folder.mkdir()
        for name, text in files.items():
            (engine_folder / name).write_text(text)
        lines = [{"custom_id": f"q{number}", "method": "POST", "url": "/v1/completions",
                  "body": {"model": "m", "prompt": "hello", "max_tokens": 8, **body}}
                 for number, body in enumerate(bodies)]  # fmt: skip
        (path.parent / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, str(HERE / "behaving_engine.py"), "{port}", str(engine_folder)]
        engine = {"command": command, **changes.pop("engine", {})}
        super().__init__(path, **{"engine": engine, "replicas_per_node": 1, "concurrency": 4, "hang_timeout_s": 2.0,
                                  "base_delay_s": 0.1, **changes})  # fmt: skip
        config = yaml.safe_load(self.config.read_text())
        del config["inference"]["serving"]
        config["inference"]["input"] = str(path.parent / "in.jsonl")
        self.config.write_text(yaml.safe_dump({**config, "nodes": 1}))

    def written(self, name: str, output: Path | None = None) -> list[dict[str, Any]]:
        path = (output or self.folder.path / "output") / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_done(batch: Batch) -> bool:
    return bool(batch.events("output written"))


@pytest.mark.long
def test_requests_of_a_batch_that_take_longer_than_a_hang_are_no_poison(tmp_path: Path) -> None:
    """The engine answers one after the other, and the smallest request with them; its counter grows meanwhile."""
    batch = Batch(tmp_path / "batch", [{"pause": 5.0}] * 3 + [{}] * 20, files={"serial": "yes", "counter": "live"},
                  engine={"progress_metric": "tokens_total", "metrics_path": "/metrics"})  # fmt: skip
    batch.slurmft("infer", str(batch.config), "--cluster", "local")
    eventually(lambda: is_done(batch), 90, batch.story)
    assert len(batch.written("answers")) == 23 and batch.written("errors") == []
    assert not batch.events("replica died"), batch.story()


def test_a_request_of_a_batch_that_has_no_end_costs_no_engine(tmp_path: Path) -> None:
    batch = Batch(tmp_path / "batch", [{}] * 8 + [{"pause": 10_000}], files={}, max_retries=1)
    batch.slurmft("infer", str(batch.config), "--cluster", "local")
    eventually(lambda: is_done(batch), 90, batch.story)
    (error,) = batch.written("errors")
    assert error["custom_id"] == "q8" and "hang_timeout_s" in error["error"]["message"], error
    assert len(batch.written("answers")) == 8 and not batch.events("replica died"), batch.story()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_under_the_output_pauses_a_batch(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True)
    try:
        ballast = disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        batch = Batch(tmp_path / "batch", [{}] * 20, files={}, output=str(disk / "output"), part_requests=0)
        batch.slurmft("infer", str(batch.config), "--cluster", "local")
        eventually(lambda: batch.events("answers held up"), 60, batch.story)
        assert not is_done(batch)
        ballast.unlink()
        eventually(lambda: is_done(batch), 30, batch.story)
        assert len(batch.written("answers", disk / "output")) == 20
        assert len(batch.events("attempt started")) == 1, batch.story()
        assert "RuntimeWarning" not in batch.story()
    finally:
        eventually(lambda: not batch.processes("slurmft"), 20, "the run has ended")
        subprocess.run(["umount", str(disk)], check=True)
