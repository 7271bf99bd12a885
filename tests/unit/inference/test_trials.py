"""Trials of a sweep: their names and folders, adding some while others run, and the process of each."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import until, until_async

from slurmft.config.inference import TrialsConfig
from slurmft.config.run import RunConfig, from_values
from slurmft.config.run import load as load_config
from slurmft.errors import ConfigError, RunBusy
from slurmft.inference import trial_engine
from slurmft.inference.gang import Head, Starts, join
from slurmft.inference.ledger import open_ledger, segments_of
from slurmft.inference.requests import Requests, extend, folder_of, load, records_of
from slurmft.inference.trial_engine import Stopped, TrialEngine, follow
from slurmft.inference.trials import Known, add, add_values, cancel, folder_of_trial, name_of, retry_failed, rows
from slurmft.ipc.messages import ReplicaPlace
from slurmft.operations import submit
from slurmft.policy.inference import EXIT_NODE, TrialEnd, end_of_trial, filled_with
from slurmft.storage.queue import SegmentWriter
from slurmft.storage.run_folder import RunFolder
from slurmft.system.processes import kill_left

BAD_NODE = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def config_of(folder: Path, script: str, **trials: Any) -> RunConfig:
    values = {"run_folder": str(folder / "run"), "command": [sys.executable, "-c", script, "{x}"],
              "trials": {"list": [{"x": 1}], **trials}}  # fmt: skip
    return from_values(values, source="test")


def engine_in(folder: Path, script: str, **trials: Any) -> TrialEngine:
    config = config_of(folder, script, **trials).inference
    assert config is not None
    return TrialEngine(config, folder / "run", "1-0-0-1")


def in_engine(folder: Path, script: str, **trials: Any) -> dict[str, Any]:
    """What becomes of one trial."""

    async def run() -> dict[str, Any]:
        engine = engine_in(folder, script, **trials)
        await engine.start()
        return (await engine.answer([{"id": "a/b", "body": {"x": 7}}]))[0]

    return run_alone(run())


def run_alone(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


# Names, folders, and adding


def test_no_two_names_share_a_folder_and_none_leaves_the_run() -> None:
    names = [
        "x=1",
        "a/b",
        "a_b",
        "a:b",
        "..",
        ".",
        "../x",
        "x=1,y=2",
        "A" * 300,
        "A" * 301,
        "é",
        "a\nb",
        "-",
        ".x",
        " ",
    ]
    names += [folder_of_trial(Path("/run"), name).name for name in names]
    folders = {name: folder_of_trial(Path("/run"), name) for name in names}
    assert len(set(folders.values())) == len(set(names))
    for folder in folders.values():
        assert folder.parent == Path("/run/trials") and folder.name not in (".", "..") and len(folder.name) < 130
    assert folders["x=1,y=2"].name == "x=1,y=2", "where it can, a folder has the trial's name"


def test_a_trial_is_named_by_its_parameters() -> None:
    assert name_of({"lr": 0.1, "batch": [1, "a"]}) == 'batch=[1, "a"],lr=0.1'
    assert name_of({"lr": 0.1}) != name_of({"lr": "0.1"})
    assert name_of({"a=1,b": 2}) != name_of({"a": 1, "b": 2})
    assert name_of({"x": "y" * 200}).startswith("trial-")


def test_only_what_is_new_is_added_and_an_append_that_was_cut_off_leaves_nothing(tmp_path: Path) -> None:
    first = add(tmp_path, TrialsConfig(grid={"x": (1, 2), "y": (1, 2)}))
    assert (first.total, first.new, first.known) == (4, 4, 0)
    folder = folder_of(tmp_path)
    before = load(folder)
    with (folder / "requests.jsonl").open("ab") as stream:
        stream.write(b'{"id": "half of a ')
    with (folder / "requests.offsets").open("ab") as stream:
        stream.write(b"\0" * 11)
    again = add(tmp_path, TrialsConfig(grid={"x": (1, 2, 3), "y": (1, 2)}))
    assert (again.total, again.new, again.known) == (6, 2, 4)
    found = list(records_of(folder))
    with Requests(folder) as requests:
        assert [requests.get(number) for number in range(6)] == found
    assert [each["body"] for each in found[4:]] == [{"x": 3, "y": 1}, {"x": 3, "y": 2}]
    after = load(folder)
    assert before is not None and after is not None and before.digest == after.digest
    assert [row["state"] for row in rows(tmp_path)] == ["open"] * 6


def test_trials_that_are_added_one_by_one_are_read_once_each(tmp_path: Path) -> None:
    known = Known(tmp_path)
    for number in range(5):
        add_values(tmp_path, [({"x": number}, "next")], known)
        add_values(tmp_path, [({"x": -number - 1}, "another process")])
    assert [each["body"]["x"] for each in records_of(folder_of(tmp_path), 7)] == [-4, 4, -5]
    assert not list(records_of(folder_of(tmp_path), 10))
    assert known.look().numbers == {f"x={x}": at for at, x in enumerate([0, -1, 1, -2, 2, -3, 3, -4, 4, -5])}
    with pytest.raises(ConfigError, match="other parameters"):
        add_values(tmp_path, [({"custom_id": "x=-5", "x": 1}, "next")], known)


def test_trials_that_are_added_while_their_sweep_ends_are_submitted_when_its_processes_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was complete, and its supervisor still lived: who added them took the mark away, and waited for it."""
    run, tries = RunFolder(tmp_path / "run"), iter([True, True, False])
    run.create()
    run.mark_done(step=0)

    def submit_run(*_: object, **__: object) -> str:
        if next(tries):
            raise RunBusy("a supervisor owns the run")
        return "submitted"

    monkeypatch.setattr(submit, "submit_run", submit_run)
    sweep = submit.submit_trials(config_of(tmp_path, ""), cluster="local", who="me", command="", tell=lambda *_: None)
    assert (sweep.made, sweep.added.new, run.done()) == ("submitted", 1, None)


def test_what_has_failed_is_tried_again_and_not_what_was_cancelled(tmp_path: Path) -> None:
    add(tmp_path, TrialsConfig(grid={"x": (1, 2, 3)}))
    batch = load(folder_of(tmp_path))
    assert batch is not None
    ledger = open_ledger(batch, 1)
    segment = SegmentWriter(segments_of(batch.folder) / "g000001-n0-r0-1-1.jsonl", {"generation": 1})
    segment.append({"index": number, "error": {"code": "trial_failed", "message": "why"}} for number in range(3))
    ledger.commit([(segment.path.name, segment.end, [[0, 3]])])
    folder_of_trial(tmp_path, "x=2").mkdir(parents=True)
    cancel(tmp_path, "x=2")
    assert (retry_failed(tmp_path).new, retry_failed(tmp_path).new) == (2, 0), "once"
    assert [row["state"] for row in rows(tmp_path)] == ["open", "failed", "open"]


@pytest.mark.parametrize(
    ("given", "says"),
    [([{"x": 1}, {"x": 1}], "is there twice"), ([{"custom_id": "a", "x": 1}, {"custom_id": "b"}], "other parameters"),
     ([{"custom_id": ""}], "custom_id is not a text"), ([{"x": float("nan")}], "has no form in JSON"),
     ([{"custom_id": "\ud800"}], "surrogates not allowed")],
)  # fmt: skip
def test_trials_that_cannot_be_told_apart_or_written_are_refused(tmp_path: Path, given: Any, says: str) -> None:
    add(tmp_path, TrialsConfig(list=({"custom_id": "b", "x": 2},)))
    with pytest.raises(ConfigError, match=says):
        add(tmp_path, TrialsConfig.model_construct(**{**TrialsConfig(list=()).model_dump(), "list": tuple(given)}))
    assert len(list(records_of(folder_of(tmp_path)))) == 1


def test_a_grid_of_ten_million_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match="10000000 trials are more"):
        from_values({"run_folder": "r", "command": ["a"], "trials": {"grid": {k: list(range(10)) for k in "abcdefg"}}},
                    source="test")  # fmt: skip


def test_numbers_of_a_configuration_are_numbers_and_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    values = {"x": ["0.5", "1e-3", 7, "a", "1.2.3", None, True]}
    config = from_values({"run_folder": str(tmp_path), "command": ["a"], "trials": {"grid": values, "max_jobs": 4}},
                         source="test")  # fmt: skip
    assert config.trials is not None and config.trials.grid == {"x": (0.5, 0.001, 7, "a", "1.2.3", None, True)}
    (tmp_path / "c.yaml").write_text(config.as_yaml())
    from slurmft.config.run import load as load_config

    assert load_config(tmp_path / "c.yaml") == config
    assert config.size.maximum == 4, "one node for each job"


def test_words_of_a_command() -> None:
    values = {"lr": 0.1, "name": "a b", "each": [1, {"k": None}]}
    assert filled_with("--lr={lr}", values) == "--lr=0.1"
    assert filled_with("{name}-{each}", values) == 'a b-[1, {"k": null}]'
    assert filled_with("{print $1} {unknown} {}", values) == "{print $1} {unknown} {}"


# One process


@pytest.mark.parametrize(
    ("script", "result"),
    [("import os, json; json.dump({'loss': 1}, open(os.environ['SLURMFT_TRIAL_RESULT'], 'w'))", {"loss": 1}),
     ("print('working'); print('[1, 2]')", [1, 2]), ("print('done')", None),
     ("import os, json, sys; print(json.dumps([json.loads(os.environ['SLURMFT_TRIAL']), sys.argv[1]]))",
      [{"x": 7}, "7"])],
)  # fmt: skip
def test_a_result_is_what_it_writes_or_its_last_line(tmp_path: Path, script: str, result: Any) -> None:
    answer = in_engine(tmp_path, script)
    assert answer["response"]["status_code"] == 200 and answer["response"]["body"]["result"] == result
    folder = folder_of_trial(tmp_path / "run", "a/b")
    assert json.loads((folder / "parameters.json").read_text()) == {"x": 7}
    assert not list(folder.glob(".result-*"))


@pytest.mark.parametrize(
    ("script", "says"),
    [("import os; open(os.environ['SLURMFT_TRIAL_RESULT'], 'w').write('NaN')", "NaN is no JSON"),
     ("import os; open(os.environ['SLURMFT_TRIAL_RESULT'], 'w').write('{')", "cannot be taken"),
     ("import os; open(os.environ['SLURMFT_TRIAL_RESULT'], 'w').write('1' * (2 << 20))", "more than 1 MiB"),
     ("raise ValueError('this one')", "exit code 1; its last words: ValueError: this one"),
     ("import os; os.abort()", "ended by SIGABRT"), ("import time; time.sleep(600)", "longer than 1 s")],
)  # fmt: skip
def test_a_trial_that_fails_says_why(tmp_path: Path, script: str, says: str) -> None:
    answer = in_engine(tmp_path, script, timeout_s=1.0)
    assert says in answer["error"]["message"]


async def test_a_program_that_is_not_there_is_a_failed_trial(tmp_path: Path) -> None:
    values = {"run_folder": str(tmp_path / "run"), "command": ["no-such-program"], "trials": [{"x": 1}]}
    config = from_values(values, source="test").inference
    assert config is not None
    [answer] = await _answer(TrialEngine(config, tmp_path / "run", "1"))
    assert "cannot start 'no-such-program'" in answer["error"]["message"]


async def _answer(engine: TrialEngine) -> list[dict[str, Any]]:
    return await engine.answer([{"id": "t", "body": {}}])


def test_it_is_tried_as_often_as_it_may(tmp_path: Path) -> None:
    script = "open('count', 'a').write('x'); raise SystemExit(3 if len(open('count').read()) < 3 else 0)"
    script = f"import os; os.chdir(os.environ['SLURMFT_TRIAL_FOLDER']); {script}"
    assert "error" in in_engine(tmp_path / "one", script, retries=1)
    assert "response" in in_engine(tmp_path / "two", script, retries=2)


def test_of_endless_output_the_end_is_kept(tmp_path: Path) -> None:
    script = "import sys\nfor number in range(3000): sys.stdout.write('x' * 10000 + '\\n')\nprint('\"the end\"')"
    answer = in_engine(tmp_path, script, log_bytes=1 << 20)
    assert answer["response"]["body"]["result"] == "the end"
    logs = list(folder_of_trial(tmp_path / "run", "a/b").glob("log*.txt"))
    assert sum(path.stat().st_size for path in logs) < 1.2 * (1 << 20)
    assert (folder_of_trial(tmp_path / "run", "a/b") / "log.txt").read_text().endswith('"the end"\n')


def test_nothing_that_a_trial_starts_outlives_it_and_an_open_pipe_holds_nothing_up(tmp_path: Path) -> None:
    script = (
        "import subprocess, os\nfor new in (True, False):\n    "
        "subprocess.Popen(['sh', '-c', 'sleep 600 & sleep 600'], start_new_session=new)\nprint(os.getpid())"
    )
    pid = in_engine(tmp_path, script)["response"]["body"]["result"]
    assert not psutil.pid_exists(pid)
    assert not psutil.Process().children(recursive=True)


async def test_at_a_stop_a_trial_with_a_handler_saves_and_goes_on_elsewhere(tmp_path: Path) -> None:
    script = ("import signal, sys, time\ndef save(*_):\n    open('saved', 'w').write('here'); sys.exit(0)\n"
              "import os; os.chdir(os.environ['SLURMFT_TRIAL_FOLDER'])\n"
              "if os.path.exists('saved'): print('\"went on\"'); sys.exit()\n"
              "signal.signal(signal.SIGTERM, save); open('ready', 'w').close(); time.sleep(600)")  # fmt: skip
    engine, folder = engine_in(tmp_path, script), folder_of_trial(tmp_path / "run", "t")
    task = asyncio.create_task(_answer(engine))
    await until_async((folder / "ready").exists)
    engine.stop()
    with pytest.raises(Stopped):
        await task
    assert (folder / "saved").exists()
    with pytest.raises(Stopped):
        await _answer(engine)  # nothing begins during a stop
    [answer] = await _answer(engine_in(tmp_path, script))
    assert answer["response"]["body"]["result"] == "went on"


@pytest.mark.parametrize("handles", [True, False])
async def test_a_trial_that_is_cancelled_may_save_and_is_not_run_again(tmp_path: Path, handles: bool) -> None:
    script = ("import os, signal, sys, time\nos.chdir(os.environ['SLURMFT_TRIAL_FOLDER'])\n"
              + "def save(*_):\n    open('saved', 'w').close(); sys.exit(1)\nsignal.signal(15, save)\n" * handles
              + "open('ready', 'w').close(); time.sleep(600)")  # fmt: skip
    engine, folder = engine_in(tmp_path, script, retries=3), folder_of_trial(tmp_path / "run", "t")
    await engine.start()
    task = asyncio.create_task(_answer(engine))
    await until_async((folder / "ready").exists)
    cancel(tmp_path / "run", "t")
    assert (await task)[0]["error"]["code"] == "cancelled"
    assert (folder / "saved").exists() == handles
    (folder / "ready").unlink()
    assert (await _answer(engine))[0]["error"]["code"] == "cancelled"
    assert not (folder / "ready").exists()


async def test_a_save_at_a_signal_to_the_whole_job_is_no_failure_though_the_stop_comes_later(tmp_path: Path) -> None:
    script = ("import os, signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(143))\n"
              "open(os.environ['SLURMFT_TRIAL_FOLDER'] + '/ready', 'w').close(); time.sleep(600)")  # fmt: skip
    engine, folder = engine_in(tmp_path, script), folder_of_trial(tmp_path / "run", "t")
    await engine.start()
    task = asyncio.create_task(_answer(engine))
    await until_async((folder / "ready").exists)
    trial = psutil.Process().children()[0]
    os.kill(os.getpid(), signal.SIGTERM)
    trial.terminate()
    await until_async(lambda: not trial.is_running() or trial.status() == psutil.STATUS_ZOMBIE)
    engine.stop()
    with pytest.raises(Stopped):
        await task


async def test_at_a_stop_a_trial_without_a_handler_may_come_to_its_end(tmp_path: Path) -> None:
    script = "import os, time; open(os.environ['SLURMFT_TRIAL_FOLDER'] + '/ready', 'w').close(); time.sleep(1)"
    script += "; open(os.environ['SLURMFT_TRIAL_RESULT'], 'w').write('5')"
    engine, folder = engine_in(tmp_path, script), folder_of_trial(tmp_path / "run", "t")
    task = asyncio.create_task(_answer(engine))
    await until_async((folder / "ready").exists)
    engine.stop()
    assert (await task)[0]["response"]["body"]["result"] == 5


async def test_a_lease_that_is_void_ends_the_process_at_once(tmp_path: Path) -> None:
    script = "import os, time; open(os.environ['SLURMFT_TRIAL_FOLDER'] + '/ready', 'w').close(); time.sleep(600)"
    engine, folder = engine_in(tmp_path, script), folder_of_trial(tmp_path / "run", "t")
    task = asyncio.create_task(_answer(engine))
    await until_async((folder / "ready").exists)
    engine.cut_off()
    with pytest.raises(Stopped):
        await task
    assert not psutil.Process().children(recursive=True)


async def test_what_the_node_is_to_blame_for_ends_the_engine_and_not_the_trial(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, f"raise SystemExit({BAD_NODE!r})")
    task = asyncio.create_task(_answer(engine))
    assert await engine.ended() == EXIT_NODE
    assert not task.done()
    task.cancel()


@pytest.mark.parametrize(
    ("code", "has_result", "is_stopping", "text", "end"),
    [(0, False, False, "", TrialEnd.RESULT), (0, True, True, "", TrialEnd.RESULT),
     (0, False, True, "", TrialEnd.STOPPED), (143, False, True, "", TrialEnd.STOPPED),
     (-9, True, False, "", TrialEnd.FAILED), (1, False, False, BAD_NODE, TrialEnd.NODE),
     (1, False, False, "ValueError: x", TrialEnd.FAILED)],
)  # fmt: skip
def test_the_meaning_of_an_end(code: int, has_result: bool, is_stopping: bool, text: str, end: TrialEnd) -> None:
    assert end_of_trial(code, has_result=has_result, is_stopping=is_stopping, text=text) is end


def test_a_trial_ends_with_the_process_that_looks_after_it(tmp_path: Path) -> None:
    script = "import os, time; open(os.environ['SLURMFT_TRIAL_FOLDER'] + '/pid', 'w').write(str(os.getpid()))"
    code = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1]); import test_trials as t; from pathlib import Path\n"
        "async def run(): await t._answer(t.engine_in(Path(sys.argv[2]), sys.argv[3]))\nasyncio.run(run())"
    )
    argv = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path), f"{script}; time.sleep(600)"]
    path = folder_of_trial(tmp_path / "run", "t") / "pid"
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as keeper:
        until(lambda: path.exists() and path.read_text(), 60)
        keeper.kill()
    until(lambda: not psutil.pid_exists(int(path.read_text())) or
          psutil.Process(int(path.read_text())).status() == psutil.STATUS_ZOMBIE)  # fmt: skip


def test_appending_to_a_batch_of_nothing(tmp_path: Path) -> None:
    assert extend(tmp_path / "inference", [], digest="d").total == 0
    assert extend(tmp_path / "inference", [{"id": "a", "body": {}}], digest="e") == load(tmp_path / "inference")


# Several ranks


RANKS = """
import json, os, pathlib, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
rank, world, local, locals_, node = (int(os.environ[name]) for name in names[:5])
assert rank == node * locals_ + local and os.environ["MASTER_ADDR"] == "127.0.0.1", dict(os.environ)
folder = pathlib.Path(os.environ["SLURMFT_TRIAL_FOLDER"])
(folder / f"port-{rank}").write_text(os.environ["MASTER_PORT"])
while len(ports := [each.read_text() for each in folder.glob("port-*")]) < world or "" in ports:
    time.sleep(0.02)
assert len(set(ports)) == 1, ports
print("rank", rank)
pathlib.Path(os.environ["SLURMFT_TRIAL_RESULT"]).write_text(json.dumps([rank, world]))
"""


def in_gang(folder: Path, script: str = "", then: Any = None, *, config: Any = None, **trials: Any) -> Any:
    """What becomes of one trial over two nodes, of which each is a task of this process."""

    async def run() -> Any:
        tasks = asyncio.all_tasks()
        section = (config or config_of(folder, script, nodes=2, **trials)).inference
        told = list[dict[str, Any]]()
        head = Head(b"k" * 64, nodes=2, config="c", host="127.0.0.1", tell=lambda **each: told.append(each))
        engine = TrialEngine(section, folder / "run", "1-0-0-1", head)
        starting = asyncio.create_task(engine.start())
        await until_async(lambda: bool(told))
        place = ReplicaPlace(name="head", hosts=("127.0.0.1",), port=told[0]["port"])
        channel = await join(place, 1, b"k" * 64)
        starts = Starts.parse(await channel.receive() or {}, "the head")
        member = asyncio.create_task(follow(channel, starts, 1, section, folder / "run"))
        await starting
        task = asyncio.create_task(_answer(engine))
        try:
            return await (task if then is None else then(engine, channel, told, task))
        finally:
            await engine.close()
            await asyncio.wait({member})
            task.cancel()
            await asyncio.wait({task})
            channel.close()
            await until_async(lambda: asyncio.all_tasks() == tasks)
            assert not psutil.Process().children(recursive=True)

    with pytest.MonkeyPatch.context() as patch:  # else each would end what is left of the other's, too
        patch.setattr(trial_engine, "kill_left", lambda ended, within_s, _own: kill_left(ended, within_s))
        patch.setattr(trial_engine, "reap_adopted", lambda _own: None)
        return run_alone(run())


def test_ranks_of_one_node_and_of_two_know_their_places_and_rank_zero_has_the_result(tmp_path: Path) -> None:
    assert in_engine(tmp_path, RANKS, nproc_per_node=3)["response"]["body"]["result"] == [0, 3]
    answer = in_gang(tmp_path, RANKS, nproc_per_node=2)[0]
    assert answer["response"]["body"]["result"] == [0, 4]
    folder = folder_of_trial(tmp_path / "run", "t")
    assert [(folder / name).read_text() for name in ("log.txt", "log-3.txt")] == ["rank 0\n", "rank 3\n"]
    assert not list(folder.glob(".result*")) and json.loads((folder / "result.json").read_text()) == [0, 4]


def test_a_callable_is_called_in_each_rank_and_that_of_rank_zero_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ranks_here.py").write_text("import os\ndef rank():\n    return int(os.environ['RANK'])\n")
    monkeypatch.chdir(tmp_path)
    trials = {"list": [{"x": 1}], "callable": "ranks_here:rank", "nodes": 2}
    config = from_values({"run_folder": str(tmp_path / "run"), "trials": trials}, source="test")
    answer = in_gang(tmp_path, config=config)[0]
    assert answer["response"]["body"]["result"] == 0
    assert json.loads((folder_of_trial(tmp_path / "run", "t") / "result-1.json").read_text()) == 1


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_rank_that_fails_ends_all_and_each_try_is_of_all(tmp_path: Path, failing: int) -> None:
    script = ("import os, sys, time\nrank = os.environ['RANK']\n"
              "open(os.environ['SLURMFT_TRIAL_FOLDER'] + '/starts-' + rank, 'a').write('s')\n"
              f"if rank == '{failing}': sys.exit('rank ' + rank + ' is tired')\ntime.sleep(600)")  # fmt: skip
    answer = in_gang(tmp_path, script, nproc_per_node=2, retries=1)[0]
    assert f"rank {failing} is tired" in answer["error"]["message"]
    assert (folder_of_trial(tmp_path / "run", "t") / f"starts-{failing}").read_text() == "ss"


def test_a_trial_of_two_nodes_ends_at_its_limit_at_a_stop_and_with_a_member(tmp_path: Path) -> None:
    sleeps = "import os, time\nopen(os.environ['SLURMFT_TRIAL_FOLDER'] + '/up-' + os.environ['RANK'], 'w').close()\n"
    assert "longer than 1 s" in in_gang(tmp_path / "a", sleeps + "time.sleep(600)", timeout_s=1)[0]["error"]["message"]

    async def stopped(engine: Any, _channel: Any, _told: Any, task: Any) -> None:
        await until_async(lambda: all((folder_of_trial(tmp_path / "b/run", "t") / f"up-{r}").exists() for r in (0, 1)))
        engine.stop()
        with pytest.raises(Stopped):
            await task

    saves = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(0))\n"
    in_gang(tmp_path / "b", saves + sleeps + "time.sleep(600)", stopped)

    async def alone(engine: Any, channel: Any, told: Any, _task: Any) -> None:
        await until_async((folder_of_trial(tmp_path / "c/run", "t") / "up-1").exists)
        channel.close()
        assert await engine.ended() == -9
        assert (told[-1]["kind"], told[-1]["rank"]) == ("broken", 1)

    in_gang(tmp_path / "c", sleeps + "time.sleep(600)", alone)


@pytest.mark.long
def test_a_node_that_is_to_blame_is_named_also_where_it_is_a_members(tmp_path: Path) -> None:
    async def ended(engine: Any, _channel: Any, told: Any, _task: Any) -> None:
        assert await engine.ended() == EXIT_NODE
        assert (told[-1]["kind"], told[-1]["rank"], told[-1]["code"]) == ("broken", 1, EXIT_NODE)

    script = f"import os, time\nif os.environ['RANK'] == '1': raise SystemExit({BAD_NODE!r})\ntime.sleep(600)"
    in_gang(tmp_path, script, ended)


@pytest.mark.parametrize(
    ("more", "trials", "says"),
    [({}, {"nodes": 0}, "trials.nodes"), ({}, {"nodes": 2, "per_node": 2}, "per_node (2) must be 1"),
     ({"nodes": 3}, {"nodes": 2}, "no multiple of trials.nodes (2)"), ({}, {"nproc_per_node": 0}, "nproc_per_node")],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, more: Any, trials: Any, says: str) -> None:
    values = {"run_folder": str(tmp_path), "command": ["x"], "trials": {"list": [{"x": 1}], **trials}, **more}
    with pytest.raises(ConfigError, match=re.escape(says)):
        from_values(values, source="test")


@pytest.mark.parametrize(
    ("more", "trials", "own", "most"),
    [({}, {}, 1, 1), ({}, {"max_jobs": 3}, 1, 3), ({}, {"nodes": 2}, 2, 2), ({}, {"nodes": 2, "max_jobs": 3}, 2, 6),
     ({"nodes": 4}, {"nodes": 2, "max_jobs": 2}, 4, 6), ({"nodes": 2}, {"per_node": 4, "max_jobs": 2}, 2, 3),
     ({}, {"nodes": 2, "gpus": 4, "callable": "a:b"}, 2, 2)],
)  # fmt: skip
def test_nodes_of_the_jobs(tmp_path: Path, more: Any, trials: Any, own: int, most: int) -> None:
    command = {} if "callable" in trials else {"command": ["x"]}
    values = {"run_folder": str(tmp_path), **command, "trials": {"list": [{"x": 1}], **trials}, **more}
    config = from_values(values, source="test")
    assert (config.nodes, config.size.maximum) == (own, most)
    (tmp_path / "again.yaml").write_text(config.as_yaml())
    assert load_config(tmp_path / "again.yaml") == config
