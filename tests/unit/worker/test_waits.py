"""Each wait for a device is taken out of the source once, and the test that is named for it must fail.

A copy of the package is changed, and the named tests run on it: so the list stays true whatever is merged. A line that
has moved on is told by its name here. What a read of the device's values waits for by itself is not on the list: there
is nothing to take out of ``float(tensor)``.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from of_each import of_each

import slurmft

TESTS = Path(__file__).parents[1]
PACKAGE = Path(slurmft.__file__).parent

DEVICE = "checkpoint/staging/test_late_device.py"
RESCUE = "checkpoint/test_late_rescue.py"
TIMER = "worker/stragglers/test_straggler_detector.py"
CUDA = "trainer/test_streams.py"

WAITS = {
    # the seam
    "copies have a stream of their own": (
        "trainer/streams.py", "    with device.beside():\n", "    with contextlib.nullcontext():\n",
        DEVICE, "test_a_copy_waits_for_no_other_stream"),
    "copies are waited for": (
        "trainer/streams.py", "            wait_for(done, within_s)\n", "            del within_s\n",
        DEVICE, "test_a_copy_is_there_when_it_is_said_to_be"),
    "the mark comes behind the copies": (
        "trainer/streams.py", "        done = device.event()\n",
        "        done = device.event()\n        done.record()\n        done.record = lambda: None\n",
        DEVICE, "test_a_copy_is_there_when_it_is_said_to_be"),
    "copies before one that fails are waited for": (
        "trainer/streams.py", "        finally:\n            done.record()\n", "        except ZeroDivisionError:\n"
        "            pass\n        else:\n            done.record()\n",
        DEVICE, "test_copies_before_one_that_fails_are_waited_for"),
    "every device is waited for": (
        "trainer/streams.py", "    for device in devices(tensors):\n", "    for device in devices(tensors)[:1]:\n",
        DEVICE, "test_a_model_on_two_devices_is_waited_for_and_copied_on_both"),
    "an event is recorded on its own device": (
        "trainer/streams.py", "torch.cuda.current_stream(self._index)", "torch.cuda.current_stream()",
        CUDA, "test_an_event_is_recorded_on_its_own_device_whichever_is_current"),
    "everything on a device is waited for": (
        "trainer/streams.py", "        torch.cuda.synchronize(self._index)\n", "        pass\n",
        CUDA, "test_all_devices_of_the_tensors_are_waited_for_and_no_other"),
    "the stream beside is the current one": (
        "trainer/streams.py", "        with torch.cuda.stream(self._beside):\n", "        if self._beside:\n",
        CUDA, "test_what_is_beside_has_a_stream_of_its_own_until_its_end_whatever_that_is"),
    "a capture is looked for on its own device": (
        "trainer/streams.py", "        with torch.cuda.device(self._index):\n", "        if True:\n",
        CUDA, "test_a_capture_is_looked_for_on_its_own_device"),
    # saves, loads, digests
    "values are put in order on the stream of the copies": (
        "checkpoint/snapshots.py", "device, _pieces_of(device, pairs, base), within_s",
        "device, list(_pieces_of(device, pairs, base)), within_s",
        DEVICE, "test_values_are_put_in_order_before_they_are_copied"),
    "copies from every device are waited for": (
        "checkpoint/snapshots.py", "        for device in devices:\n", "        for device in devices[:1]:\n",
        DEVICE, "test_a_model_on_two_devices_is_waited_for_and_copied_on_both"),
    "a save waits for the device": (
        "checkpoint/state.py", "    if settles:\n        settle(trainee.model.parameters())\n", "",
        DEVICE, "test_a_save_holds_what_the_host_has_asked_for_whichever_stream_computes_it"),
    "a save asks for that wait": (
        "checkpoint/state.py", "rank=rank, settles=True)", "rank=rank)",
        DEVICE, "test_a_save_holds_what_the_host_has_asked_for_whichever_stream_computes_it"),
    "a save waits for the device before it takes the lock": (
        "checkpoint/manager.py", "            prepared = self._snapshots.prepare(captured(),",
        "            with self._rescue.staging() if self._rescue is not None else contextlib.nullcontext():\n"
        "                prepared = self._snapshots.prepare(captured(),",
        RESCUE, "test_a_save_that_hangs_on_the_device_does_not_keep_a_rescue_waiting"),
    "a load waits for the device": (
        "checkpoint/loading.py", "        settle(self.trainee.model.parameters())", "        ",
        DEVICE, "test_an_update_that_was_asked_for_before_a_load_does_not_change_what_is_loaded"),
    "a digest waits for the device": (
        "worker/digests.py", "    settle(model.parameters())", "    ",
        DEVICE, "test_a_digest_is_of_what_the_host_has_asked_for"),
    # pinned memory
    "the pinning thread sets its device": (
        "checkpoint/snapshots.py", "        self._device.use()\n", "",
        DEVICE, "test_memory_is_pinned_piece_by_piece_and_let_go"),
    "pinning lets the training's copies go first": (
        "checkpoint/snapshots.py", "            self._may_go_on.wait()\n", "",
        DEVICE, "test_nothing_is_pinned_while_the_training_waits_for_a_copy"),
    "a save's copy asks for that": (
        "checkpoint/snapshots.py", "        self._may_warm.clear()\n", "",
        DEVICE, "test_the_copy_of_a_save_keeps_the_pinning_waiting"),
    "memory that is let go is not pinned first": (
        "checkpoint/snapshots.py", "            if not self._is_wanted:\n                return None\n", "",
        DEVICE, "test_a_place_that_is_wanted_anew_is_not_pinned_first"),
    "memory is let go before it is mapped anew": (
        "checkpoint/snapshots.py", "            self._pinned.release()\n", "",
        DEVICE, "test_the_places_of_a_run_are_pinned_beside_the_training_and_let_go_with_it"),
    "letting go waits for the pinning thread": (
        "checkpoint/snapshots.py", "        self._may_go_on.set()\n        self._thread.join()\n",
        "        self._may_go_on.set()\n",
        DEVICE, "test_nothing_is_pinned_after_it_was_let_go"),
    # stragglers
    "a span is read when its end has come": (
        "worker/stragglers.py", "while self._under_way and self._events[self._under_way[0][0]][3].query():",
        "while self._under_way:", TIMER, "test_spans_on_a_device_are_read_when_it_is_done"),
    "a span's events are used again when it was read": (
        "worker/stragglers.py", "self._free.pop() if self._free else None",
        "self._free.pop() if self._free else 0", TIMER, "test_spans_on_a_device_are_read_when_it_is_done"),
    "no event of a wait becomes part of a graph": (
        "worker/stragglers.py", "if self._waits == 0 and not self._device.is_capturing():",
        "if self._waits == 0:", TIMER, "test_no_event_of_a_span_becomes_part_of_a_graph"),
    # the check of a GPU
    "its products are timed until they are done": (
        "worker/gpu_check.py", "        _wait(device)\n", "",
        "worker/checks/test_gpu_check.py", "test_products_are_timed_until_the_device_is_done"),
    "the GPU that is checked is waited for": (
        "worker/gpu_check.py", "        torch.cuda.synchronize(device)\n", "        pass\n",
        "worker/checks/test_gpu_check.py", "test_it_waits_for_the_gpu_that_is_checked"),
    # just in time
    "the thread that keeps a step sets its device": (
        "checkpoint/just_in_time.py", "                self._on_device.device.use()\n", "",
        RESCUE, "test_the_step_that_lies_on_the_device_is_kept_however_far_the_host_is_ahead"),
    "what reads the state of a step is beside the stream that hangs": (
        "checkpoint/just_in_time.py", "stack.enter_context(self._on_device.device.beside())", "pass",
        RESCUE, "test_what_reads_a_number_from_the_device_does_not_wait_for_the_collective"),
    "a copy that does not end is given up": (
        "checkpoint/snapshots.py", "identity, within_s=DEVICE_S)", "identity, within_s=None)",
        RESCUE, "test_a_copy_that_does_not_end_is_given_up"),
    "the beginning of an update is marked": (
        "checkpoint/just_in_time.py", "                self._on_device.state_changes()\n            self._tell()\n",
        "            self._tell()\n",
        RESCUE, "test_an_update_that_is_half_done_is_not_kept"),
    "the end of an update is marked": (
        "checkpoint/just_in_time.py", "            self._on_device.update_ends()\n", "            pass\n",
        RESCUE, "test_an_optimizer_with_a_stream_of_its_own_is_waited_for"),
    "the copies of the buffers are marked at their beginning": (
        "checkpoint/just_in_time.py",
        "                    self._on_device.state_changes()\n                self._copy_buffers()\n",
        "                    pass\n                self._copy_buffers()\n",
        RESCUE, "test_buffers_are_of_the_step_wherever_the_device_stands"),
    "the end of a step is marked behind the copies of its buffers": (
        "checkpoint/just_in_time.py",
        "                self._copy_buffers()\n                self._on_device.boundary(step, self._trainee)\n",
        "                self._on_device.boundary(step, self._trainee)\n                self._copy_buffers()\n",
        RESCUE, "test_buffers_are_of_the_step_wherever_the_device_stands"),
    "the end of a step is marked": (
        "checkpoint/just_in_time.py", "[*self._updates, self._recorded()], []", "[*self._updates], []",
        RESCUE, "test_buffers_are_of_the_step_wherever_the_device_stands"),
    "a step is kept when its events have come": (
        "checkpoint/just_in_time.py", "        return all(event.query() for event in self.events)\n",
        "        return True\n",
        RESCUE, "test_where_the_host_waits_in_the_step_that_hangs_the_one_before_is_kept or however_far"),
    "an update behind the step is looked at": (
        "checkpoint/just_in_time.py", "if any(event.query() for event in one.left) or any(", "if any(",
        RESCUE, "test_an_update_that_is_half_done_is_not_kept"),
    "later steps are looked at": (
        "checkpoint/just_in_time.py", " or any(each.has_begun() for each in later):", ":",
        RESCUE, "test_the_end_of_a_later_step_on_another_stream_leaves_nothing_to_trust"),
    "the device is looked at once more before the copy": (
        "checkpoint/just_in_time.py", "                check()\n", "",
        RESCUE, "test_nothing_is_copied_where_the_device_has_gone_on_before"),
    "the device is looked at after the copy": (
        "checkpoint/just_in_time.py", "        if self.newest() is not step:\n", "        if False:\n",
        RESCUE, "test_an_update_that_begins_during_the_copy_is_not_kept"),
    "that look is asked for": (
        "checkpoint/snapshots.py", "        check()\n", "",
        RESCUE, "test_an_update_that_begins_during_the_copy_is_not_kept"),
    "the steps before a load are forgotten": (
        "checkpoint/just_in_time.py",
        "            if self._on_device is not None:\n                self._on_device.forget()\n", "",
        RESCUE, "test_the_steps_before_a_load_are_not_those_of_what_was_loaded"),
    "the steps before it was armed anew are forgotten": (
        "checkpoint/just_in_time.py",
        "  # updates of what is not armed are not heard of\n                self._on_device.forget()\n",
        "\n                pass\n",
        RESCUE, "test_the_steps_before_it_was_armed_anew_are_not_kept"),
    # the end of a worker, and the beginning of the next one
    "the step is kept before communicators are aborted": (
        "worker/session.py", "            SAVERS.rescue()\n", "            pass\n",
        RESCUE, "test_communicators_are_aborted_only_after_the_step_was_kept"),
    "nothing is kept behind an abort": (
        "worker/session.py", "    SAVERS.forget()\n", "",
        "worker/test_groups.py", "test_nothing_is_kept_of_what_a_device_computes_behind_an_abort"),
    "the next workers wait for the memory of those before": (
        "agent/workers.py", "max(1.0, deadline - time.monotonic())) & set(pids):",
        "max(1.0, deadline - time.monotonic())) & set():",
        "agent/test_gpus.py", "test_the_next_workers_wait_until_the_memory_of_those_before_is_free"),
    "they begin behind that wait": (
        "agent/agent.py",
        "if held := await asyncio.to_thread(wait_until_free, self._workers.earlier_pids(), environment):",
        "if held := set[int]():",
        "agent/test_start_order.py", "test_workers_begin_when_the_memory_of_those_before_is_free"),
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
        text=True, timeout=2400, check=True, cwd=TESTS.parents[1],
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    return {name: (code, said) for name, code, said in map(json.loads, done.stdout.splitlines())}


@of_each(name=WAITS)
def test_the_source_still_has_the_wait(name):
    file, text, without, tests, words = WAITS[name]
    assert (PACKAGE / file).read_text(encoding="utf-8").count(text) == 1, f"{file} has moved on"
    assert text != without
    named = words.split(" or ")[0]
    assert f"def {named}(" in (TESTS / tests).read_text(encoding="utf-8") or not named


@pytest.mark.soak
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("name", WAITS)
def test_without_the_wait_its_test_fails(name, without_each):
    code, said = without_each[name]
    assert code == pytest.ExitCode.TESTS_FAILED, f"nothing notices: {said}"
    assert " failed" in said.splitlines()[-1]
