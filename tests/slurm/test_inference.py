"""Batches of requests on a real cluster: whatever dies, every one is answered exactly once."""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from word_engine import next_token, tokens_in

from slurm.conftest import Run, eventually, preempt
from slurmft.inference.ledger import segments_of
from slurmft.inference.requests import folder_of
from slurmft.lab.cluster import Lab
from slurmft.storage.queue import read

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewBatch = Callable[..., "BatchRun"]
ENGINE = Path(__file__).with_name("inference_engine.py")
WORDS = Path(__file__).parents[1] / "unit" / "support" / "word_engine.py"
CONCURRENCY, REPLICAS, NODES = 4, 2, 2
IN_FLIGHT = CONCURRENCY * REPLICAS * NODES


class BatchRun(Run):
    """A batch of requests whose right answers are known."""

    ENGINE = "^[^ ]*python[^ ]* [^ ]*/engine.py"
    """Its command line."""

    prompts: list[str]

    def submit(self, *options: str) -> str:
        output = self.slurmft("infer", str(self.config), *options)
        return output.split(" as job ")[1].split()[0]

    @property
    def output_folder(self) -> Path:
        return self.path / "output"

    def answers(self, name: str = "answers.jsonl") -> list[dict]:
        return [json.loads(line) for line in (self.output_folder / name).read_text().splitlines()]

    def wait_for_answers(self, count: int) -> None:
        self.wait_for_step(count)

    def assert_exactly_once(self, *, errors: tuple[int, ...] = ()) -> None:
        """Each request has its one right answer, in the order of the input."""
        self.wait_until_done()
        right = [
            {
                "id": f"batch_req_{index}", "custom_id": f"q{index}", "error": None,
                "response": {"status_code": 200, "request_id": f"req_{index}",
                             "body": {"text": hashlib.sha256(prompt.encode()).hexdigest()}},
            }
            for index, prompt in enumerate(self.prompts) if index not in errors
        ]  # fmt: skip
        assert self.answers() == right, self.story()
        assert [record["custom_id"] for record in self.answers("errors.jsonl")] == [f"q{index}" for index in errors]

    def repeated(self) -> int:
        """Answers that were computed more than once."""
        seen: Counter[int] = Counter()
        for path in segments_of(folder_of(self.path)).iterdir():
            seen.update(record.value["index"] for record in read(path) if "index" in record.value)
        return sum(count - 1 for count in seen.values())

    def kill_processes(self, node: str, pattern: str, signal: str = "KILL") -> None:
        job = self.events("attempt started")[-1].attempt.split(".")[0]
        script = 'for p in $(pgrep -f "$1"); do grep -qzx "SLURM_JOB_ID=$2" /proc/$p/environ && echo $p; done'
        pids = self.lab.run_on_as_admin(node, ["bash", "-c", script, "", pattern, job], check=False).stdout.split()
        assert pids, f"no process like {pattern} on {node}\n{self.story()}"
        self.lab.run_on_as_admin(node, ["kill", f"-{signal}", pids[0]])

    def engines(self, node: str) -> list[str]:
        """Process ids of the engines on a node."""
        argv = ["pgrep", "-f", f"^[^ ]*python[^ ]* {self.path.parent}/engine.py"]
        return self.lab.run_on_as_admin(node, argv, check=False).stdout.split()

    def kill_supervisor(self) -> None:
        """And not its guardian."""
        host = self.batch_host
        pids = self.lab.run_on_as_admin(host, ["pgrep", "-f", f"slurmft run {self.path}"]).stdout.split()
        self.lab.run_on_as_admin(host, ["kill", "-KILL", max(pids, key=int)])

    @property
    def agent(self) -> str:
        """The command line of an agent."""
        return f"^[^ ]*python[^ ]* .*slurmft agent {self.path}"

    @property
    def batch_host(self) -> str:
        return self.events("attempt started")[-1].details["host"]

    @property
    def nodes(self) -> list[str]:
        return [event.details["node"] for event in self.events("node answers")]


@pytest.fixture
def new_batch(lab: Lab, left_idle: None, request: pytest.FixtureRequest) -> NewBatch:
    def make(
        count: int = 300, *, pause: float = 0.2, special: dict[int, str] | None = None, engine: Path = ENGINE,
        body: dict | None = None, **changes,
    ) -> BatchRun:  # fmt: skip
        name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")
        name += "-again" * (getattr(request.node, "execution_count", 1) > 1)
        folder = lab.home / "batches" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(engine, folder / "engine.py")
        run = BatchRun(lab, folder / "run", folder / "batch.yaml")
        run.prompts = [(special or {}).get(index, f"prompt {index}") for index in range(count)]
        lines = [{"custom_id": f"q{index}", "prompt": each, **(body or {})} for index, each in enumerate(run.prompts)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        section = {
            "input": str(folder / "prompts.jsonl"), "replicas_per_node": REPLICAS, "concurrency": CONCURRENCY,
            "engine": {
                "command": ["python", str(folder / "engine.py"), "{port}", str(pause), str(folder / "engine.log")],
                **changes.pop("settings", {}),
            },
            "hang_timeout_s": 5, "base_delay_s": 0.1, **changes.pop("inference", {}),
        }  # fmt: skip
        config = {
            "run_folder": str(run.path), "nodes": NODES, "inference": section, "slurm": {"partition": "low"},
            "fault_tolerance": {"agent_timeout_s": 3, "supervisor_lease_s": 15, "retry_delay_s": 0}, **changes,
        }  # fmt: skip
        run.config.write_text(yaml.safe_dump(config))
        for path in (folder.parent, folder, *folder.iterdir()):
            os.chown(path, lab.uid, lab.gid)
        return run

    return make


def test_a_calm_batch_has_every_answer_once(new_batch: NewBatch) -> None:
    run = new_batch()
    run.submit()
    run.assert_exactly_once()
    assert run.repeated() == 0
    assert len(run.nodes) == NODES and len(run.events("replica ready")) == NODES * REPLICAS


@pytest.mark.parametrize("victim", ["engine", "zygote", pytest.param("driver", marks=pytest.mark.soak)])
def test_a_dead_replica_is_restarted_while_the_others_go_on(new_batch: NewBatch, victim: str) -> None:
    run = new_batch()
    run.submit()
    run.wait_for_answers(40)
    node = run.nodes[0]
    if victim == "engine":
        run.kill_processes(node, run.ENGINE)
    elif victim == "driver":
        run.kill(node, min(run.pids(node)))
    else:
        run.kill_processes(node, "[s]lurmft.agent.zygote")
    run.assert_exactly_once()
    assert run.events("replica died"), run.story()
    assert len([event for event in run.events() if event.event == "attempt started"]) == 1
    assert run.repeated() <= CONCURRENCY * (REPLICAS if victim == "zygote" else 1)


@pytest.mark.long
def test_an_engine_that_is_asked_to_end_finishes_what_it_has_and_is_blamed_for_no_request(new_batch: NewBatch) -> None:
    """As most servers do, it takes no connection from then on, for longer than all tries of a request last."""
    run = new_batch(120, pause=2.0, inference={"max_retries": 1})
    run.submit()
    run.wait_for_answers(20)
    run.kill_processes(run.nodes[0], run.ENGINE, "TERM")
    run.assert_exactly_once()
    assert run.events("replica died"), run.story()
    assert run.repeated() == 0


@pytest.mark.parametrize("victim", ["engine", pytest.param("driver", marks=pytest.mark.soak)])
def test_a_stopped_replica_is_found_by_its_missing_progress(new_batch: NewBatch, victim: str) -> None:
    run = new_batch(inference={"hang_timeout_s": 2})
    run.submit()
    run.wait_for_answers(40)
    node = run.nodes[0]
    if victim == "engine":
        run.kill_processes(node, run.ENGINE, "STOP")
    else:
        run.kill(node, min(run.pids(node)), signal="STOP")
    run.assert_exactly_once()
    assert "hang_timeout_s" in run.events("replica died")[0].details["reason"]


def test_a_dead_agent_and_a_dead_node_cost_their_own_work_only(lab: Lab, new_batch: NewBatch) -> None:
    # the rest waits: on a busy machine the batch would be over before the next agent has started
    run = new_batch(
        600, special={index: f"WAIT {index}" for index in range(280, 600)}, inference={"hang_timeout_s": 300}
    )
    run.submit()
    run.wait_for_answers(60)
    run.kill_processes(run.nodes[-1], run.agent)
    run.wait_for("node answers", NODES + 1)
    run.wait_for_answers(250)
    victim = next(node for node in run.nodes if node != run.batch_host)
    lab.kill_node(victim)
    (run.path.parent / "go").touch()
    try:
        run.assert_exactly_once()
    finally:
        lab.start_node(victim)
    assert len(run.events("agent lost")) == 2
    assert len(run.events("attempt started")) == 1
    assert run.repeated() <= 2 * CONCURRENCY * REPLICAS


@pytest.mark.long
@pytest.mark.parametrize("how", ["preempted", pytest.param("requeued", marks=pytest.mark.soak)])
def test_the_next_start_repeats_no_finished_request(lab: Lab, new_batch: NewBatch, how: str) -> None:
    run = new_batch(400)
    job = run.submit()
    run.wait_for_answers(60)
    if how == "preempted":
        preempt(lab)
    else:
        run.slurmft("requeue", str(run.path))
    run.wait_for("requests opened", 2)
    assert run.events("requests opened")[1].details["answered"] >= 60
    run.assert_exactly_once()
    assert run.repeated() == 0, f"job {job}\n{run.story()}"


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_engines_outlive_the_supervisor(new_batch: NewBatch, times: int) -> None:
    # a lease that a busy machine cannot miss: without a supervisor for that long, agents end
    run = new_batch(200 + 200 * times, fault_tolerance={"agent_timeout_s": 3, "supervisor_lease_s": 60})
    run.submit()
    for start in range(1, times + 1):
        run.wait_for("requests opened", start)
        run.wait_for_answers(start * 100)
        engines = {node: run.engines(node) for node in set(run.nodes)}
        run.kill_supervisor()
        run.wait_for("requests opened", start + 1)
        assert run.events("requests opened")[start].details["answered"] >= start * 100
        run.wait_for_answers(start * 100 + 60)
        assert {node: run.engines(node) for node in engines} == engines, run.story()
    run.assert_exactly_once()
    assert not run.events("replica died") and not run.events("requeueing"), run.story()
    assert [event.details["action"] for event in run.events("decision")] == ["restart"] * times + ["finish"]
    assert run.repeated() <= times * IN_FLIGHT, run.story()


@pytest.mark.long
def test_a_stopped_batch_goes_on_when_it_is_submitted_again(new_batch: NewBatch) -> None:
    run = new_batch(300)
    job = run.submit()
    run.wait_for_answers(40)
    run.slurmft("stop", str(run.path))
    run.wait_until_out_of_queue(job)
    assert run.events("decision")[-1].details["action"] == "stop"
    run.submit()
    run.assert_exactly_once()
    assert run.repeated() == 0


@pytest.mark.long
def test_long_answers_go_on_where_a_dead_engine_and_a_stop_have_cut_them_off(new_batch: NewBatch) -> None:
    count, limit, token_s = 24, 160, 0.05
    run = new_batch(
        count, pause=token_s, engine=WORDS, body={"max_tokens": limit},
        settings={"request_path": "/v1/completions", "continue_from_prefix": "always"},
        preemption={"stop_timeout_s": 6}, inference={"hang_timeout_s": 60},
    )  # fmt: skip
    log = run.config.parent / "engine.log"

    def tokens() -> list[str]:
        return log.read_text().splitlines() if log.exists() else []

    run.submit()
    eventually(lambda: len(tokens()) > 50 * IN_FLIGHT, 60, "tokens of the first answers")
    run.kill_processes(run.nodes[0], "^[^ ]*python[^ ]* [^ ]*/engine.py")
    run.wait_for("replica died")
    at_death = len(tokens())
    eventually(lambda: len(tokens()) > at_death + 20 * IN_FLIGHT, 60, "tokens after the death")
    run.slurmft("requeue", str(run.path))
    run.wait_for("requests opened", 2)
    run.wait_until_done()
    for prompt, record in zip(run.prompts, run.answers(), strict=True):
        text, made = "", 0
        while made < limit and (token := next_token(prompt + text)) is not None:
            text, made = text + token, made + 1
        asked = tokens_in(prompt)
        body = record["response"]["body"]
        assert body["choices"][0]["text"] == text
        assert body["choices"][0]["finish_reason"] == ("length" if made == limit else "stop")
        assert body["usage"] == {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
    cut_off = CONCURRENCY + IN_FLIGHT
    repeated = len(tokens()) - len(set(tokens()))
    assert repeated <= 15 * cut_off, f"{repeated} of {len(tokens())} tokens were made twice\n{run.story()}"


@pytest.mark.long
def test_bad_requests_end_in_errors_and_hurt_no_other(new_batch: NewBatch) -> None:
    """Two that kill the engine, one that hangs it, one that it refuses, and some that want it for themselves."""
    special = {20: "POISON a", 150: "POISON b", 80: "HANG c", 30: "BAD d", 60: "OOM e", 61: "OOM f"}
    run = new_batch(240, special=special, inference={"hang_timeout_s": 2, "max_retries": 8})
    run.submit()
    run.assert_exactly_once(errors=(20, 30, 80, 150))
    found = {record["custom_id"]: record for record in run.answers("errors.jsonl")}
    assert found["q30"]["response"]["status_code"] == 400
    # the hung one is cut off by itself, as its engine answers others meanwhile
    for name, code, words in (("q20", "poison_request", "SIGSEGV"), ("q150", "poison_request", "SIGSEGV"),
                              ("q80", "no_answer", "hang_timeout_s")):  # fmt: skip
        assert found[name]["error"]["code"] == code
        assert words in found[name]["error"]["message"]
    assert run.events("replica smaller"), run.story()


def test_an_engine_that_cannot_start_ends_the_run_with_its_reason(new_batch: NewBatch) -> None:
    run = new_batch(inference={"max_restarts": 1}, fault_tolerance={"num_job_retries_on_failure": 0,
                                                                     "num_in_job_restarts": 0})  # fmt: skip
    config = yaml.safe_load(run.config.read_text())
    config["inference"]["engine"]["command"] = ["false", "{port}"]
    run.config.write_text(yaml.safe_dump(config))
    job = run.submit()
    run.wait_until_out_of_queue(job)
    (verdict,) = run.events("verdict")
    assert "no replica is left" in verdict.details["reason"]
    assert run.events("decision")[-1].details["action"] == "stop"
    eventually(lambda: not (run.output_folder / "answers.jsonl").exists(), 1, "no output of an unfinished batch")
