"""Batches of requests where nodes come and go, disks are full, Slurm is away, and others use the nodes as well."""

import json
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from slurm.conftest import eventually, preempt
from slurm.test_inference import IN_FLIGHT, BatchRun, NewBatch, new_batch  # noqa: F401 - a fixture
from slurm.test_storage_faults import SmallDisk, disk  # noqa: F401 - a fixture
from slurmft.inference.ledger import answered, segments_of
from slurmft.inference.requests import folder_of
from slurmft.lab.cluster import Lab
from slurmft.lab.members import Account

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.mark.long
def test_replicas_follow_nodes_that_come_and_go(lab: Lab, new_batch: NewBatch) -> None:  # noqa: F811
    special = {index: f"WAIT {index}" for index in range(100, 400)}
    run = new_batch(
        400, pause=1.0, special=special, nodes=1, elastic={"min_nodes": 1, "max_nodes": 2},
        inference={"hang_timeout_s": 200},
    )  # fmt: skip
    run.submit()
    run.wait_for("node answers")
    options = ["--nodes", "1", "--", "--time=5", f"--exclude={run.batch_host}"]
    lender = run.slurmft("join", str(run.path), *options).split("job ")[1].split(",")[0]
    lent = run.wait_for("node answers", 2).details["node"]
    assert lent != run.batch_host
    run.wait_for("replica ready", 4)
    (run.config.parent / "go").touch()
    run.wait_for_answers(140)
    lab.run(["scancel", lender])
    left = run.wait_for("agent left")
    assert left.details["node"] == lent
    assert run.folder.done() is None, "the run goes on without it"
    run.assert_exactly_once()
    assert run.repeated() == 0, run.story()
    logs = [path.name for path in run.folder.attempts.glob("*/rank-*.log")]
    assert sorted(logs) == [f"rank-{rank}.log" for rank in range(4)], "each replica has a number of its own"
    assert len(run.events("attempt started")) == 1, run.story()


@pytest.mark.soak
def test_a_spare_works_from_the_start_and_makes_up_for_a_lost_node(lab: Lab, new_batch: NewBatch) -> None:  # noqa: F811
    run = new_batch(900, spare_nodes=1)
    run.submit()
    run.wait_for("node answers", 3)
    run.wait_for_answers(60)
    victim = next(node for node in run.nodes if node != run.batch_host)
    lab.kill_node(victim)
    try:
        run.assert_exactly_once()
    finally:
        lab.start_node(victim)
    assert len(run.events("attempt started")) == len(run.events("agent lost")) == 1
    # what it had in flight, and what it had answered within commit_interval_s: its requests go to others at once
    assert run.repeated() <= IN_FLIGHT


def on_disk(run: BatchRun, disk: SmallDisk) -> BatchRun:  # noqa: F811
    """The same batch with its run folder on that disk."""
    moved = BatchRun(run.lab, disk.path / "run", written_at=run.config)
    moved.prompts = run.prompts
    moved.configure(run_folder=str(moved.path))
    return moved


@pytest.mark.long
def test_a_full_disk_holds_everything_up_and_loses_nothing(new_batch: NewBatch, disk: SmallDisk) -> None:  # noqa: F811
    """For longer than what counts as a hang: that is not the engines' fault."""
    run = on_disk(new_batch(500, inference={"hang_timeout_s": 3, "max_restarts": 0}), disk)
    run.submit()
    run.wait_for_answers(60)
    disk.fill()
    seen: list[tuple[float, int]] = []

    def stands_still(for_s: float) -> bool:
        seen.append((time.monotonic(), answered(folder_of(run.path), len(run.prompts))))
        return seen[-1][0] - next(at for at, count in seen if count == seen[-1][1]) > for_s

    eventually(lambda: stands_still(7.0), 60, run.story)
    assert seen[-1][1] < len(run.prompts)
    disk.free()
    run.assert_exactly_once()
    assert not run.events("replica died") and len(run.events("attempt started")) == 1, run.story()
    assert "No space left on device" in run.events("answers held up")[0].details["reason"]
    assert run.repeated() == 0


SQUATTER = r"""
import http.server, os, pathlib, re, sys

def port():
    while True:
        for each in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found = re.search(rb"engine\.py (\d+)", each.read_bytes())
            except OSError:
                continue
            if found:
                return int(found[1])

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self):
        told = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with open(sys.argv[1], "ab") as heard:
            heard.write(self.command.encode() + b" " + told + b"\n")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"text": "forged"}')
    do_GET = do_POST = reply

server = http.server.ThreadingHTTPServer(("127.0.0.1", port()), Handler)
open(sys.argv[1], "ab").write(b"listening\n")
server.serve_forever()
"""


@pytest.fixture
def neighbour(lab: Lab) -> Iterator[Account]:
    """Another user, who is on every node."""
    yield lab.second_user()
    for node in lab.nodes:
        lab.run_on_as_admin(node, ["pkill", "-KILL", "--uid", str(lab.second_user().uid)], check=False)


@pytest.mark.long
def test_another_user_of_the_nodes_reads_nothing_and_answers_nothing(
    lab: Lab, new_batch: NewBatch, neighbour: Account, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    run = new_batch(300)
    section = yaml.safe_load(run.config.read_text())["inference"]
    program = section["engine"]["command"][1]
    section["engine"]["command"] = ["sh", "-c", f"sleep 3; exec python {program} {{port}} 0.2"]
    run.configure(inference=section)
    heard, script = lab.folder / "home2" / "heard", lab.folder / "home2" / "squatter.py"
    heard.unlink(missing_ok=True)
    script.write_text(textwrap.dedent(SQUATTER))
    script.chmod(0o755)
    as_neighbour = ["setpriv", f"--reuid={neighbour.uid}", f"--regid={neighbour.gid}", "--clear-groups"]

    def of_neighbour(node: str, *argv: str) -> str:
        done = lab.run_on_as_admin(node, [*as_neighbour, *argv], check=False)
        return done.stdout + done.stderr

    for node in lab.nodes:  # the job may run on any
        lab.run_on_as_admin(node, ["sh", "-c", 'setsid "$@" > /dev/null 2>&1 &', "sh", *as_neighbour,
                                   "/usr/bin/python3", str(script), str(heard)])  # fmt: skip
    run.submit()
    run.wait_for_answers(40)
    node, folder = run.nodes[0], folder_of(run.path)
    for path in (folder / "requests.jsonl", folder / "requests.offsets", *segments_of(folder).iterdir()):
        assert "Permission denied" in of_neighbour(node, "cat", str(path))
    listening = lab.run_on_as_admin(node, ["cat", "/proc/net/unix"]).stdout.split()
    sockets = [word for word in listening if word.endswith("replicas.sock")]
    assert sockets, listening
    connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    assert "PermissionError" in of_neighbour(node, "/usr/bin/python3", "-c", connect, sockets[0])
    driver = run.pids(node).popitem()[1]
    assert "Permission denied" in of_neighbour(node, "cat", f"/proc/{driver}/environ")
    run.assert_exactly_once()
    assert "Permission denied" in of_neighbour(node, "ls", str(run.output_folder))
    assert "listening" in heard.read_text(), "it was there before the engine"
    assert [line for line in heard.read_text().splitlines() if line != "listening"] == []
    reasons = [event.details["reason"] for event in run.events("replica died")]
    assert reasons and all(f"user {neighbour.uid} listens at port" in reason for reason in reasons), reasons


@pytest.mark.soak
def test_an_odd_folder_of_requests(lab: Lab, new_batch: NewBatch) -> None:  # noqa: F811
    """Names that break lines, an empty file, a line of 17 MiB, and an input that changes while it is answered."""
    run = new_batch(120, inference={"on_bad_input": "report"})
    plain, folder = run.path.parent / "prompts.jsonl", run.path.parent / "requests"
    folder.mkdir()
    lines = plain.read_text().splitlines(keepends=True)
    (folder / "a\nb\x1b[31m.jsonl").write_text("".join(lines[:60]))
    (folder / "c.jsonl").touch()
    (folder / "d.jsonl").write_text("".join(lines[60:]) + json.dumps({"prompt": "x" * (17 << 20)}) + "\n")
    (folder / "e.txt").write_text("not one of them")
    for path in (folder, *folder.iterdir()):
        os.chown(path, lab.uid, lab.gid)
    section = yaml.safe_load(run.config.read_text())["inference"]
    run.configure(inference={**section, "input": str(folder)})
    run.submit()
    run.wait_for_answers(20)
    (folder / "c.jsonl").write_text(lines[0])
    run.wait_until_done()
    (error,) = run.answers("errors.jsonl")
    assert (error["custom_id"], error["error"]["code"]) == ("d.jsonl:61", "bad_request")
    assert "16 MiB" in error["error"]["message"]
    assert [record["custom_id"] for record in run.answers()] == [f"q{index}" for index in range(120)]
    told = run.lab.run(["slurmft", "infer", str(run.config)], check=False)
    assert told.returncode == 2 and "is not what this run was started with" in told.stderr, told.stderr
    (folder / "a\nb\x1b[31m.jsonl").write_text("{broken\n")
    (folder / "d.jsonl").unlink()
    run.configure(inference={**section, "input": str(folder), "on_bad_input": "refuse"},
                  run_folder=str(run.path.with_name("second")))  # fmt: skip
    told = run.lab.run(["slurmft", "infer", str(run.config)], check=False)
    assert told.returncode == 2 and "1 of 2 lines are no requests" in told.stderr, told.stderr
    assert "\x1b" not in told.stderr, "a name does not paint the terminal"
    assert not run.lab.run(["squeue", "-h"]).stdout.strip()
    shutil.rmtree(folder.parent)


@pytest.mark.soak
def test_the_time_limit(new_batch: NewBatch) -> None:  # noqa: F811
    run = new_batch(4000, pause=0.5, slurm={"partition": "low", "time": "2"}, preemption={"signal_lead_s": 20})
    job = run.submit()
    run.assert_exactly_once()
    assert "time limit" in [event.details["cause"] for event in run.events("verdict")], run.story()
    assert len(run.events("requests opened")) > 1
    assert run.repeated() == 0
    assert run.folder.jobs() == [job]


@pytest.mark.soak
def test_a_full_disk_at_a_stop_and_at_the_next_start(lab: Lab, new_batch: NewBatch, disk: SmallDisk) -> None:  # noqa: F811
    run = on_disk(new_batch(500), disk)
    job = run.submit()
    run.wait_for_answers(60)
    disk.fill()
    preempt(lab)
    look = ["squeue", "-h", "-j", job, "-O", "RestartCnt,State"]
    eventually(lambda: lab.run(look).stdout.split() == ["1", "RUNNING"], 60, "the next start")
    time.sleep(3)  # into the wait of the new start
    disk.free()
    run.assert_exactly_once()
    assert run.folder.jobs() == [job]


@pytest.mark.soak
@pytest.mark.parametrize("fault", [SmallDisk.forbid, SmallDisk.freeze], ids=["read-only", "stalls"])
def test_a_disk_that_takes_nothing_for_a_while(
    new_batch: NewBatch, disk: SmallDisk, fault: Callable[[SmallDisk], None]  # noqa: F811
) -> None:  # fmt: skip
    run = on_disk(new_batch(500), disk)
    run.submit()
    run.wait_for_answers(60)
    fault(disk)
    time.sleep(10)  # longer than the lease and what counts as a hang; the time itself is what is tested
    if fault is SmallDisk.forbid:
        disk.allow()
    else:
        disk.thaw()
    run.assert_exactly_once()
