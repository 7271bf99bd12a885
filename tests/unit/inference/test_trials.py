"""Trials of a sweep: their names and folders, adding some while others run, and the process of each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import until, until_async

from slurmft.config.run import RunConfig, from_values
from slurmft.config.trials import TrialsConfig
from slurmft.errors import ConfigError
from slurmft.inference.ledger import open_ledger, segments_of
from slurmft.inference.requests import Requests, extend, folder_of, load, records_of
from slurmft.inference.trial_engine import EXIT_NODE, Stopped, TrialEngine
from slurmft.inference.trials import Known, add, add_values, cancel, folder_of_trial, name_of, retry_failed, rows
from slurmft.policy.inference import TrialEnd, end_of_trial, filled_with
from slurmft.storage.segments import SegmentWriter

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


def test_a_program_that_is_not_there_is_a_failed_trial(tmp_path: Path) -> None:
    values = {"run_folder": str(tmp_path / "run"), "command": ["no-such-program"], "trials": [{"x": 1}]}
    config = from_values(values, source="test").inference

    async def run() -> None:
        assert config is not None
        [answer] = await _answer(TrialEngine(config, tmp_path / "run", "1"))
        assert "cannot start 'no-such-program'" in answer["error"]["message"]

    run_alone(run())


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


def test_at_a_stop_a_trial_with_a_handler_saves_and_goes_on_elsewhere(tmp_path: Path) -> None:
    script = ("import signal, sys, time\ndef save(*_):\n    open('saved', 'w').write('here'); sys.exit(0)\n"
              "import os; os.chdir(os.environ['SLURMFT_TRIAL_FOLDER'])\n"
              "if os.path.exists('saved'): print('\"went on\"'); sys.exit()\n"
              "signal.signal(signal.SIGTERM, save); open('ready', 'w').close(); time.sleep(600)")  # fmt: skip

    async def run() -> None:
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

    run_alone(run())


@pytest.mark.parametrize("handles", [True, False])
def test_a_trial_that_is_cancelled_may_save_and_is_not_run_again(tmp_path: Path, handles: bool) -> None:
    script = ("import os, signal, sys, time\nos.chdir(os.environ['SLURMFT_TRIAL_FOLDER'])\n"
              + "def save(*_):\n    open('saved', 'w').close(); sys.exit(1)\nsignal.signal(15, save)\n" * handles
              + "open('ready', 'w').close(); time.sleep(600)")  # fmt: skip

    async def run() -> None:
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

    run_alone(run())


def test_a_save_at_a_signal_to_the_whole_job_is_no_failure_though_the_stop_comes_later(tmp_path: Path) -> None:
    script = ("import os, signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(143))\n"
              "open(os.environ['SLURMFT_TRIAL_FOLDER'] + '/ready', 'w').close(); time.sleep(600)")  # fmt: skip

    async def run() -> None:
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

    run_alone(run())


def test_at_a_stop_a_trial_without_a_handler_may_come_to_its_end(tmp_path: Path) -> None:
    script = "import os, time; open(os.environ['SLURMFT_TRIAL_FOLDER'] + '/ready', 'w').close(); time.sleep(1)"
    script += "; open(os.environ['SLURMFT_TRIAL_RESULT'], 'w').write('5')"

    async def run() -> None:
        engine, folder = engine_in(tmp_path, script), folder_of_trial(tmp_path / "run", "t")
        task = asyncio.create_task(_answer(engine))
        await until_async((folder / "ready").exists)
        engine.stop()
        assert (await task)[0]["response"]["body"]["result"] == 5

    run_alone(run())


def test_a_lease_that_is_void_ends_the_process_at_once(tmp_path: Path) -> None:
    script = "import os, time; open(os.environ['SLURMFT_TRIAL_FOLDER'] + '/ready', 'w').close(); time.sleep(600)"

    async def run() -> None:
        engine, folder = engine_in(tmp_path, script), folder_of_trial(tmp_path / "run", "t")
        task = asyncio.create_task(_answer(engine))
        await until_async((folder / "ready").exists)
        engine.cut_off()
        with pytest.raises(Stopped):
            await task
        assert not psutil.Process().children(recursive=True)

    run_alone(run())


def test_what_the_node_is_to_blame_for_ends_the_engine_and_not_the_trial(tmp_path: Path) -> None:
    async def run() -> None:
        engine = engine_in(tmp_path, f"raise SystemExit({BAD_NODE!r})")
        task = asyncio.create_task(_answer(engine))
        assert await engine.ended() == EXIT_NODE
        assert not task.done()
        task.cancel()

    run_alone(run())


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
