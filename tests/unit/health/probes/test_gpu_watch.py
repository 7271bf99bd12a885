"""The watch of GPUs beside a run: what it tells after each look, and the program on the stand-in."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_stand_in
import pytest
from gpu_faults import FAULTS, NodeUnderTest
from waiting import slowness

from slurmft.config.health import GpuLimits, HealthConfig
from slurmft.health import gpu
from slurmft.health.gpu import Gpu, Survey, Xid
from slurmft.health.gpu_watch import MAX_XIDS, Watch, Xids, visible
from slurmft.health.node import Scene
from slurmft.policy.node_health import Status

GPUS = tuple(
    Gpu(index=index, uuid=f"GPU-{index}a", bus=f"00000000:{0x1B + index:02X}:00.0", uncorrected=3, corrected=9,
        pending=False, remap_failed=False, temperature_c=40, throttle=0, width=16, max_width=16, max_generation=5,
        links=(True,) * 18, link_errors=100)
    for index in range(8)
)  # fmt: skip
WELL = Survey(gpus=GPUS, source="nvml", on_bus=8, driver_loaded=True)


def scene(root: Path = Path("/nowhere"), **environment: str) -> Scene:
    limits = GpuLimits(pcie_width=16, pcie_generation=5, nvlinks=18)
    return Scene(node="n1", now=0.0, config=HealthConfig(gpu=limits), context="agent", root=root,
                 environment={"PATH": "/nowhere", **environment})  # fmt: skip


def after(*surveys: Survey, xids: tuple[Xid, ...] = (), **environment: str) -> list[tuple[bool, str]]:
    """Whether each told line ends the node, and its check, after the first look and these."""
    watch = Watch(scene(**environment))
    lines = list(watch.look(WELL, (), 0.0))
    for number, found in enumerate(surveys):
        lines += watch.look(found, xids if number == 0 else (), 2.5 * (number + 1))
    return [(line["ends"], line["what"].partition(":")[0]) for line in lines]


def with_gpu(index: int, **changes: Any) -> Survey:
    return replace(WELL, gpus=tuple(replace(each, **changes) if each.index == index else each for each in GPUS))


def test_a_fault_is_told_when_a_second_look_agrees_and_once():
    dead = replace(WELL, gpus=GPUS[:3] + GPUS[4:], errors=("GPU 3: GPU is lost",))
    assert after(dead) == []
    assert after(dead, WELL, dead) == []
    assert after(dead, dead, dead) == [(True, "gpu-count")]


def test_counters_count_from_the_first_look_on():
    assert after(WELL, WELL) == [], "three old errors and a hundred recoveries"
    assert after(with_gpu(2, uncorrected=4)) == [(False, "gpu-ecc")]
    assert after(with_gpu(2, uncorrected=8), with_gpu(2, uncorrected=8)) == [(True, "gpu-ecc")]
    assert after(with_gpu(2, link_errors=109)) == []
    assert after(with_gpu(2, link_errors=110)) == [(False, "gpu-nvlink")]
    assert after(with_gpu(2, uncorrected=0), with_gpu(2, uncorrected=0)) == [], "a driver that begins anew"
    watch, unknown = Watch(scene()), with_gpu(2, uncorrected=None)
    assert [line for at, found in enumerate((unknown, WELL, WELL)) for line in watch.look(found, (), 2.5 * at)] == []


def test_a_warning_may_become_grave_and_each_device_is_told_by_itself():
    hot, grave = with_gpu(1, temperature_c=90), with_gpu(1, temperature_c=91, remap_failed=True)
    assert after(hot, hot, grave, grave) == [(False, "gpu-clocks"), (True, "gpu-ecc")]
    both = replace(WELL, gpus=tuple(replace(each, temperature_c=90) for each in GPUS[:2]) + GPUS[2:])
    assert after(hot, both) == [(False, "gpu-clocks")] * 2


def test_what_is_wrong_at_the_first_look_ends_nothing():
    ill = with_gpu(5, remap_failed=True)
    ill = replace(ill, errors=("GPU 9: Insufficient Permissions",))
    watch = Watch(scene())
    lines = [line for at in range(4) for line in watch.look(ill, (), 2.5 * at)]
    assert [(line["ends"], line["what"]) for line in lines] == [(False, "gpu-ecc: GPU 5: a row could not be remapped")]


def test_xids_count_on_devices_of_the_job_alone_and_those_of_programs_never():
    def xid(code: int, device: str = "0000:1d:00", text: str = "", kind: str = "Xid") -> Xid:
        return Xid(device=device, code=code, at_s=1.0, text=text, kind=kind)

    assert after(WELL, WELL, xids=(xid(79),)) == [(True, "xid")]
    assert after(WELL, WELL, xids=(xid(63), xid(79))) == [(False, "xid"), (True, "xid")]
    assert after(WELL, WELL, xids=(xid(31), xid(13), xid(43))) == []
    assert after(WELL, WELL, xids=(xid(79, "0000:99:00"),)) == []
    assert after(WELL, WELL, xids=(xid(20034, "0000:84:00.0", "Fatal, Link 29", "SXid"),)) == [(True, "xid")]
    assert after(WELL, WELL, xids=(xid(79),), CUDA_VISIBLE_DEVICES="0,1") == []
    assert after(WELL, WELL, xids=(xid(79),), CUDA_VISIBLE_DEVICES="1,2") == [(True, "xid")]
    assert after(WELL, WELL, xids=(xid(145, text="RLW_RXPIPE Nonfatal XC0"),)) == [(False, "xid")]


def test_only_the_devices_of_the_job_are_watched():
    assert [each.index for each in visible(GPUS, {})] == list(range(8))
    assert [each.index for each in visible(GPUS, {"CUDA_VISIBLE_DEVICES": "3,1"})] == [1, 3]
    assert [each.index for each in visible(GPUS, {"CUDA_VISIBLE_DEVICES": "GPU-4a, GPU-0"})] == [0, 4]
    assert len(visible(GPUS, {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"})) == 8
    assert visible(GPUS, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == ()
    dead = replace(WELL, gpus=GPUS[1:], errors=("GPU 0: GPU is lost",))
    assert after(dead, dead, CUDA_VISIBLE_DEVICES="1,2") == []
    watch = Watch(scene(CUDA_VISIBLE_DEVICES=""))
    assert list(watch.look(WELL, (), 0.0)) == [] and watch.is_empty


def test_a_healthy_device_may_make_noise():
    """An hour and a half of looks: heat, idle clocks, errors that are corrected, crashes of programs, a busy driver."""
    dice, watch = random.Random(1), Watch(scene())
    errors, grave = 0, []
    for number in range(2_000):
        errors += dice.random() < 1e-3
        gpus = tuple(
            replace(each, temperature_c=dice.randint(30, 86), throttle=dice.choice((0, 1, 4)),
                    corrected=number, uncorrected=3 + (errors if each.index == 0 else 0))
            for each in GPUS
        )  # fmt: skip
        found = replace(WELL, gpus=gpus)
        if dice.random() < 0.001:
            found = replace(WELL, gpus=gpus[1:], not_asked=("GPU 0: Timeout",))
        if dice.random() < 0.001:  # one look alone
            found = replace(WELL, gpus=gpus[1:], errors=("GPU 0: Unknown Error",))
        crash = [Xid(device="0000:1b:00", code=dice.choice((13, 31, 43, 45)), at_s=1.0, text="")]
        grave += [line for line in watch.look(found, crash if dice.random() < 0.01 else (), 2.5 * number)
                  if line["ends"]]  # fmt: skip
    assert grave == []


def test_a_driver_that_hangs_is_a_warning_first_and_told_once():
    watch = Watch(scene())
    list(watch.look(WELL, (), 0.0))
    lines = [line for seconds in (8.0, 9.0, 30.0, 31.0, 32.0) for line in watch.hangs(seconds)]
    assert [line["ends"] for line in lines] == [False, True]
    assert "hangs" in lines[1]["what"] and "30 s" in lines[1]["what"]
    assert [line["ends"] for line in Watch(scene()).hangs(30.0)] == [False], "it may be waking up"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_stand_in.build(tmp_path_factory.mktemp("nvml"))


on_stand_in = gpu_stand_in.needs_stand_in


class TestOnTheStandIn:
    """Real nvidia-ml-py, real judges."""

    pytestmark = on_stand_in

    def test_each_kind_of_fault_is_told_as_a_sweep_would_judge_it(
        self, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpu_stand_in.preload(library)
        dice, wrong = random.Random(1), []
        for fault in FAULTS:
            if "hang" in fault.name:
                continue
            node = NodeUnderTest("n1", tmp_path / fault.name.replace(" ", "-"))
            monkeypatch.setenv("NVML_STAND_IN", str(node.gpus.path))
            here = scene(node.root)
            watch, xids = Watch(here), Xids(here)
            lines = list(watch.look(gpu.survey(here), xids.new(), 0.0))
            fault.inject(node, 3, dice)
            for number in (1, 2):
                lines += watch.look(gpu.survey(here), xids.new(), 2.5 * number)
            found = {line["ends"] for line in lines}
            right = {Status.CRITICAL: {True}, Status.WARNING: {False}}.get(fault.status, set())
            if found != right:
                wrong.append((fault.name, lines))
        assert wrong == []

    def test_without_the_kernels_log_the_drivers_events_tell(
        self, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpu_stand_in.preload(library)
        node = NodeUnderTest("n1", tmp_path)
        (tmp_path / "dev/kmsg").unlink()
        monkeypatch.setenv("NVML_STAND_IN", str(node.gpus.path))
        xids = Xids(scene(tmp_path))
        assert xids.new() == []
        node.gpus.set_driver(xid="79:3")  # given again for each question
        found = xids.new()
        assert {(each.code, each.device) for each in found} == {(79, node.gpus.gpus[3]["pci"])}
        assert len(found) == MAX_XIDS, "one that never stops is not listened to for ever"
        node.gpus.set_driver(xid="147:3")
        assert {gpu.cause_of(each).status for each in xids.new()} == {Status.WARNING}, "not known whether it is fatal"


@pytest.fixture
def program(library: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], gpu_stand_in.Node]]:
    node = gpu_stand_in.Node(tmp_path / "n1.gpus")
    health = tmp_path / "health.yaml"
    health.write_text("gpu: {answer_s: 3}\n")
    with started(library, NVML_STAND_IN=str(node.path), SLURMFT_HEALTH_CONFIG=str(health)) as process:
        yield process, node
        process.kill()


def started(library: Path, **environment: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-P", "-m", "slurmft.health.gpu_watch"]
    env = {**os.environ, **gpu_stand_in.environment_of(library), **environment}
    return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line: dict[str, Any] = json.loads(process.stdout.readline())
    return line


class TestProgram:
    pytestmark = on_stand_in

    def test_a_lost_device_is_told_within_ten_seconds(
        self, program: tuple[subprocess.Popen[str], gpu_stand_in.Node]
    ) -> None:
        process, node = program
        node.set(1, temp=95)
        assert line_of(process)["ends"] is False, "it runs"
        began = time.monotonic()
        node.set(4, lost=1)
        line = line_of(process)
        assert line["ends"] and line["fault"] and line["what"].startswith("gpu-count: GPU 4"), line
        assert time.monotonic() - began < 10 * slowness()

    def test_a_call_that_hangs_stops_nothing_but_a_thread(
        self, program: tuple[subprocess.Popen[str], gpu_stand_in.Node]
    ) -> None:
        process, node = program
        node.set(1, temp=95)
        line_of(process)
        node.set(2, hang="nvmlDeviceGetTemperature")
        line = line_of(process)
        assert line["ends"] and "what it asks hangs" in line["what"], line
        process.terminate()
        assert process.wait(10) != 0

    def test_it_ends_where_there_is_nothing_to_watch(self, library: Path, tmp_path: Path) -> None:
        empty = gpu_stand_in.Node(tmp_path / "n1.gpus", count=0)
        with started(library, NVML_STAND_IN=str(empty.path)) as process:
            assert process.communicate(timeout=60)[0] == "" and process.returncode == 0
