"""The real nvidia-ml-py and the real probes on the stand-in for NVIDIA's library: it answers as nvml.h says."""

import os
import re
import subprocess
from pathlib import Path

import gpu_stand_in
import pytest

from slurmft.health import gpu
from slurmft.health.node import Scene

pytestmark = gpu_stand_in.needs_stand_in


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = gpu_stand_in.build(tmp_path_factory.mktemp("nvml"))
    gpu_stand_in.preload(built)
    return built


@pytest.fixture
def node(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_stand_in.Node:
    found = gpu_stand_in.Node(tmp_path / "n1.gpus")
    monkeypatch.setenv("NVML_STAND_IN", str(found.path))
    return found


def asked(tmp_path: Path) -> gpu.Survey:
    return gpu.survey(Scene(node="n1", now=0.0, root=tmp_path, environment={"PATH": "/nowhere"}))


def test_every_question_of_the_probes_has_an_answer(library, node, tmp_path):
    found = asked(tmp_path)
    assert (found.source, found.errors, len(found.gpus)) == ("nvml", (), 8)
    assert found.gpus[2] == gpu.Gpu(
        index=2, uuid=gpu_stand_in.uuid_of("n1", 2), name="NVIDIA H100 80GB HBM3", bus="00000000:3B:00.0",
        uncorrected=0, corrected=0, pending=False, remap_failed=False, temperature_c=34, throttle=1, width=16,
        max_width=16, max_generation=5, links=(True,) * 18,
    )  # fmt: skip
    for name in set(re.findall(r"\"(nvmlDevice\w+)\"", Path(gpu.__file__).read_text())):
        assert re.search(rf"\b{name}(_v\d)?\b", gpu_stand_in.SOURCE.read_text()), name


def test_what_the_file_says_is_answered_at_once(node, tmp_path):
    asked(tmp_path)
    node.set(1, temp=91, reasons="0x48", uncorrected=7, remapped="1:2:1:1", down="0x5", pids=f"17:{os.getpid()}")
    node.set(2, uncorrected=None, temp=None)
    node.set(4, lost=1)
    node.set(5, reset=1)
    node.set(6, fail="nvmlDeviceGetUUID:999")
    node.set(7, fail="nvmlDeviceGetName:999+nvmlDeviceGetHandleByIndex_v2:0")
    found = asked(tmp_path)
    first, without, last = found.gpus[1], found.gpus[2], found.gpus[-1]
    assert (first.temperature_c, first.throttle, first.uncorrected) == (91, 0x48, 7)
    assert (first.pending, first.remap_failed, first.pids) == (True, True, (17, os.getpid()))
    assert first.links[:4] == (False, True, False, True)
    assert (without.uncorrected, without.temperature_c) == (None, None)
    assert found.errors == ("GPU 4: GPU is lost", "GPU 5: GPU requires restart", "GPU 6: Unknown Error")
    assert (last.index, last.name) == (7, ""), (
        "of a question that is not vital, an unknown error may only be the question's"
    )


def test_mig_instances_and_events_and_the_driver(node):
    import pynvml as nvml

    node.set(0, mig=2)
    node.set_driver(xid="79:3")
    nvml.nvmlInit()
    device = nvml.nvmlDeviceGetHandleByIndex(0)
    assert (nvml.nvmlDeviceGetMigMode(device)[0], nvml.nvmlDeviceGetMaxMigDeviceCount(device)) == (1, 2)
    instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 1)
    assert nvml.nvmlDeviceGetUUID(instance) == f"MIG-{gpu_stand_in.uuid_of('n1', 0)[4:]}-1"
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 2)
    assert (nvml.nvmlDeviceGetPowerUsage(device), nvml.nvmlDeviceGetClockInfo(device, 0)) == (72_000, 345)
    assert nvml.nvmlDeviceGetNvLinkErrorCounter(device, 0, 1) == 0
    assert nvml.nvmlSystemGetDriverVersion() == "580.65.06"
    events = nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
    assert nvml.nvmlEventSetWait(events, 10).eventData == 79
    node.set_driver(xid=None)
    with pytest.raises(nvml.NVMLError_Timeout):
        nvml.nvmlEventSetWait(events, 10)
    nvml.nvmlEventSetFree(events)
    node.remove_driver()
    with pytest.raises(nvml.NVMLError_DriverNotLoaded):
        nvml.nvmlInit()


def test_the_nvidia_smi_beside_it_lists_what_the_library_says(library, node):
    argv = [str(library.parent / "nvidia-smi"), "--format=csv,noheader"]
    node.set(1, pids="17")
    rows = subprocess.run([*argv, "--query-gpu=index,uuid"], capture_output=True, text=True, check=True).stdout
    assert rows.splitlines()[7] == f"7, {gpu_stand_in.uuid_of('n1', 7)}"
    pids = subprocess.run([*argv, "--query-compute-apps=pid"], capture_output=True, text=True, check=True).stdout
    assert pids.split() == ["17"]
