"""Shared by all tests: one marked ``slurm`` or ``gpu`` runs on the real thing, or says by name why it does not."""

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest
from drawn import examples
from hypothesis import HealthCheck, settings
from waiting import SLOWEST, slowness

from slurmft.lab.cluster import Lab

# Thousands of tests stay in memory: to look for garbage among them takes a sixth of the processor time.
gc.disable()
# `python` in a command is the one that the shell finds: as in an activated environment, that of these tests.
if not os.environ["PATH"].startswith(here := f"{Path(sys.executable).parent}{os.pathsep}"):
    os.environ["PATH"] = here + os.environ["PATH"]
# What tests submit is not to be found among the runs of who runs them.
STATE = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="slurmft-state-")

# A machine that is busy makes slow examples; in CI, hypothesis's own profile for it says so as well.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
BASE = settings.get_profile("ci") if os.environ.get("CI") else BUSY
settings.register_profile("ours", BASE, max_examples=examples(100))
settings.load_profile("ours")


@functools.cache
def _why_no_lab() -> str | None:
    return Lab.availability(accounting=True)


@functools.cache
def _why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


MINUTES_S = 100
"""Time limits of tests that wait for real processes, whose waits are longer on a machine that others load."""

LOOP_S = 200.0
"""How long a coroutine's test may take. Waits inside have shorter limits, which say what was waited for."""

SLOW = frozenset({
    "agent/test_agent_keeper.py", "agent/test_rehearsal.py", "agent/test_zygote.py",
    "checkpoint/replicas/test_copies_attacked.py", "checkpoint/replicas/test_keeper.py",
    "checkpoint/replicas/test_step_copies.py", "checkpoint/replicas/test_supply.py", "checkpoint/test_checkpoint.py",
    "checkpoint/test_checkpoint_async.py", "checkpoint/test_checkpoint_kill.py", "checkpoint/test_checkpoint_ranks.py",
    "checkpoint/test_checkpoint_sharded.py", "checkpoint/test_late_rescue.py", "checkpoint/test_memory_restart.py",
    "checkpoint/test_resume_model.py", "checkpoint/test_save_pressure.py", "checkpoint/test_strict_groups.py",
    "checkpoint/writer/test_checkpoint_writer.py", "checkpoint/writer/test_checkpoint_writer_faults.py",
    "checkpoint/writer/test_committer.py", "cli/test_bad_input.py", "cli/test_watch.py", "cli/test_without_torch.py",
    "compat/test_names_on_ranks.py", "examples/test_examples.py", "health/probes/test_gpu_faults.py",
    "inference/serving/test_poison_at_an_endpoint.py", "inference/test_trials.py",
    "integrations/test_huggingface_callback.py", "integrations/test_marked_folders.py",
    "operations/test_launchers_of_scripts.py", "operations/test_old_runs.py", "operations/test_sweep.py",
    "storage/test_odd_files.py", "storage/test_soft_lock.py", "sync/test_sync_folder.py", "system/test_foreign_text.py",
    "system/test_health_isolation.py", "system/test_siginfo.py", "worker/data/test_resumed_loaders.py",
    "worker/rerun/test_rerun_agreement.py", "worker/rerun/test_rerun_ranks.py",
    "worker/standalone/test_failure_checks.py", "worker/standalone/test_watchdog.py",
    "worker/stragglers/test_straggler_detector.py", "worker/test_save_pace_ranks.py", "worker/test_signals.py",
})  # fmt: skip
"""Below tests/unit: what starts many processes, or waits for time to pass. Two thirds of the time of all unit tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that fails is run once more: several clusters and real processes share a machine that others load too."""
    for item in items:
        if item.path.as_posix().partition("/tests/unit/")[2] in SLOW:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("soak") is None:
            item.add_marker(pytest.mark.flaky(reruns=1))
        if (limit := item.get_closest_marker("timeout")) is not None and limit.args[0] >= MINUTES_S:
            item.add_marker(pytest.mark.timeout(limit.args[0] * SLOWEST), append=False)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own, inside those of its fixtures that are async contexts."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(_in_its_loop(pyfuncitem.obj, given))
    return True


async def _in_its_loop(test: Callable[..., Coroutine[Any, Any, None]], given: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(LOOP_S * slowness()), contextlib.AsyncExitStack() as open_contexts:
            for name, value in given.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    given[name] = await open_contexts.enter_async_context(value)
            await test(**given)
    finally:  # handlers of connections that are still open close their sockets before the loop ends
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Odd names in the text of a failure are no UTF-8, which xdist needs; its own error would end the whole run."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_sendable, value))
    return value


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Nothing is hidden by that: what failed at first is told whole."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"FAILED AT FIRST: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (reason := _why_no_gpu()) is not None:
        pytest.skip(f"no GPU: {reason}")
    if item.get_closest_marker("slurm") is None or (reason := _why_no_lab()) is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"the Slurm lab is needed here: {reason}", pytrace=False)
    pytest.skip(f"no Slurm lab: {reason}")


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE, ignore_errors=True)
