"""Each wait for a device is taken out of the source once, and the test that is named for it must fail.

A copy of the package is changed, and the named tests run on it: so the lists in ``test_late_device`` and
``test_late_rescue`` stay true whatever is merged. A line that has moved on is told by its name here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import slurmft

TESTS = Path(__file__).parents[1]
PACKAGE = Path(slurmft.__file__).parent

DEVICE = "checkpoint/staging/test_late_device.py"
RESCUE = "checkpoint/test_late_rescue.py"
TIMER = "worker/stragglers/test_straggler_detector.py"

WAITS = {
    "copies wait for what has written their sources": (
        "trainer/streams.py", "    with device.beside(after):\n", "    with device.beside():\n",
        DEVICE, "test_a_copy_waits_for_what_has_written_its_source"),
    "copies are waited for": (
        "trainer/streams.py", "    wait_for(done, within_s)\n", "    del within_s\n",
        DEVICE, "test_a_copy_waits_for_what_has_written_its_source"),
    "the mark comes behind the copies": (
        "trainer/streams.py", "        done = device.event()\n        done.record()\n",
        "    done = device.event()\n    done.record()\n",
        DEVICE, "test_a_copy_waits_for_what_has_written_its_source"),
    "copies have a stream of their own": (
        "trainer/streams.py", "    with device.beside(after):\n", "    with contextlib.nullcontext():\n",
        DEVICE, "test_a_copy_waits_for_no_other_stream"),
    "a save waits for the device": (
        "checkpoint/format/flat_state.py", "    if settles:\n        settle(trainee.model.parameters())\n", "",
        DEVICE, "test_a_save_holds_what_the_host_has_asked_for_whichever_stream_computes_it"),
    "a save asks for that wait": (
        "checkpoint/manager.py", "rank=team.rank, settles=True)", "rank=team.rank)",
        DEVICE, "test_a_save_holds_what_the_host_has_asked_for_whichever_stream_computes_it"),
    "a digest waits for the device": (
        "worker/checks/digest.py", "    settle(model.parameters())", "    ",
        DEVICE, "test_a_digest_is_of_what_the_host_has_asked_for"),
    "the pinning thread sets its device": (
        "checkpoint/staging/pinning.py", "        self._device.use()\n", "",
        DEVICE, "test_memory_is_pinned_piece_by_piece_and_let_go"),
    "pinning lets the training's copies go first": (
        "checkpoint/staging/pinning.py", "            self._may_go_on.wait()\n", "",
        DEVICE, "test_nothing_is_pinned_while_the_training_waits_for_a_copy"),
    "memory is let go before it is mapped anew": (
        "checkpoint/staging/arena.py", "            self._pinned.release()\n", "",
        DEVICE, "test_the_places_of_a_run_are_pinned_beside_the_training_and_let_go_with_it"),
    "letting go waits for the pinning thread": (
        "checkpoint/staging/pinning.py", "        self._may_go_on.set()\n        self._thread.join()\n",
        "        self._may_go_on.set()\n",
        DEVICE, "test_nothing_is_pinned_after_it_was_let_go"),
    "a span is read when its end has come": (
        "worker/stragglers/device_time.py", "while self._under_way and self._events[self._under_way[0][0]][3].query():",
        "while self._under_way:", TIMER, "test_spans_on_a_device_are_read_when_it_is_done"),
    "the end of an update is marked": (
        "checkpoint/just_in_time.py", "            self._on_device.update_ends()\n", "            pass\n",
        RESCUE, "test_an_optimizer_with_a_stream_of_its_own_is_waited_for"),
    "a step is kept when its events have come": (
        "checkpoint/staging/device_steps.py", "        return all(event.query() for event in self.events)\n",
        "        return True\n",
        RESCUE, "test_where_the_host_waits_in_the_step_that_hangs_the_one_before_is_kept or however_far"),
    "an update behind the step is looked at": (
        "checkpoint/staging/device_steps.py", "if any(event.query() for event in one.left) or any(", "if any(",
        RESCUE, "test_an_update_that_is_half_done_is_not_kept"),
    "later steps are looked at": (
        "checkpoint/staging/device_steps.py", " or any(each.has_begun() for each in later):", ":",
        RESCUE, "test_the_end_of_a_later_step_on_another_stream_leaves_nothing_to_trust"),
    "the device is looked at after the copy": (
        "checkpoint/staging/device_steps.py", "        if self.newest() is not step:\n", "        if False:\n",
        RESCUE, "test_an_update_that_begins_during_the_copy_is_not_kept"),
}  # fmt: skip
"""What is waited for -> file, text, text without the wait, file of tests, tests of which one must fail (-k)."""


_DRIVER = """
import contextlib, io, json, os, pathlib, sys
import pytest, torch.distributed  # once, and not in each child

package = pathlib.Path(sys.argv[1])
for name, (file, text, without, tests, words) in json.load(sys.stdin).items():
    path = package / file
    source = path.read_text()
    path.write_text(source.replace(text, without))
    sys.stdout.flush()
    if not (child := os.fork()):
        said, code = io.StringIO(), -1
        try:
            with contextlib.redirect_stdout(said):
                code = int(pytest.main(["-q", "-p", "no:cacheprovider", "--timeout", "100", "-k", words, tests]))
        finally:
            print(json.dumps([name, code, said.getvalue()[-1500:]]), flush=True)
            os._exit(0)
    os.waitpid(child, 0)
    path.write_text(source)
"""


@pytest.fixture(scope="module")
def without_each(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """pytest's exit code and last words, for the package without each of the waits."""
    folder = tmp_path_factory.mktemp("without")
    shutil.copytree(PACKAGE, folder / "slurmft", ignore=shutil.ignore_patterns("__pycache__"))
    cases = {name: (*wait[:3], str(TESTS / wait[3]), wait[4]) for name, wait in WAITS.items()}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _DRIVER, str(folder / "slurmft")], input=json.dumps(cases), capture_output=True,
        text=True, timeout=1200, check=True, cwd=TESTS.parents[1],
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    return {name: (code, said) for name, code, said in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", WAITS)
def test_the_source_still_has_the_wait(name):
    file, text, without, tests, words = WAITS[name]
    assert (PACKAGE / file).read_text(encoding="utf-8").count(text) == 1, f"{file} has moved on"
    assert text != without
    named = words.split(" or ")[0]
    assert f"def {named}(" in (TESTS / tests).read_text(encoding="utf-8") or not named


@pytest.mark.soak
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", WAITS)
def test_without_the_wait_its_test_fails(name, without_each):
    code, said = without_each[name]
    assert code == pytest.ExitCode.TESTS_FAILED, f"nothing notices: {said}"
    assert " failed" in said.splitlines()[-1]
