"""GPUs without one: recorded answers of nvidia-smi, a library that stands in for NVML, kernel logs with Xids."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from of_each import of_each

from slurmft.config.health import GpuLimits, HealthConfig
from slurmft.health import gpu
from slurmft.health.gpu import CAUSES, Gpu, Survey, judge_xids, parse_smi, parse_xids, survey, xid
from slurmft.health.node import Process, Scene
from slurmft.policy.node_health import Problem, Status

OK, WARNING, CRITICAL, UNKNOWN = Status
GOOD = Gpu(index=0, uuid="GPU-a", uncorrected=0, corrected=0, pending=False, remap_failed=False, temperature_c=40.0,
           throttle=1, width=16, max_width=16, max_generation=5, links=(True,) * 18)  # fmt: skip

SMI = """0, GPU-a, NVIDIA H100 80GB HBM3, 00000000:1B:00.0, 0, 0, No, 31, 0x0000000000000001, 16, 16, 5
1, GPU-b, NVIDIA H100 80GB HBM3, 00000000:29:00.0, 7, 2, Yes, 91, 0x0000000000000048, 8, 16, 5
2, GPU-c, NVIDIA L4, 00000000:3A:00.0, [N/A], [N/A], [N/A], 45, Not Active, 16, 16, 4
3, [Unknown Error], [GPU is lost]
"""


def scene(tmp_path, environment=None, **gpu_limits) -> Scene:
    return Scene(node="n1", now=time.time(), root=tmp_path / "root", config=HealthConfig(gpu=gpu_limits),
                 environment=environment or {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"})  # fmt: skip


def install(tmp_path, body: str, name: str = "nvidia-smi") -> None:
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def no_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_what_nvidia_smi_says():
    found = parse_smi(SMI)
    gpus = found.gpus
    assert (found.source, len(gpus), len(found.errors)) == ("nvidia-smi", 3, 1)
    assert gpus[0] == replace(GOOD, name="NVIDIA H100 80GB HBM3", bus="00000000:1B:00.0", remap_failed=None, links=(),
                              temperature_c=31)  # fmt: skip
    assert (gpus[1].uncorrected, gpus[1].pending, gpus[1].throttle, gpus[1].width) == (7, True, 0x48, 8)
    assert (gpus[2].uncorrected, gpus[2].pending, gpus[2].throttle) == (None, None, None)


@pytest.mark.parametrize("text", ["", "\n\n", "no devices", "\0\x1b[31m", ",,,,,,,,,,,", "0" * 100_000],
                         ids=["empty", "lines", "words", "control", "commas", "long"])  # fmt: skip
def test_output_of_any_kind_is_read(text):
    parse_smi(text)


def test_no_gpu_is_skipped_and_not_unknown(tmp_path, no_nvml):
    assert gpu.gpus(scene(tmp_path)) == []
    assert gpu.gpu_compute(scene(tmp_path)) == []
    assert gpu.diagnose(scene(tmp_path)) == []


def test_a_gpu_that_is_expected_is_missed(tmp_path, no_nvml):
    found = gpu.gpus(scene(tmp_path, expected=8))
    assert [(result.name, result.status) for result in found] == [("gpu-count", CRITICAL)]
    assert found[0].detail == "0 of 8 GPUs on the PCI bus"


def test_a_driver_that_nobody_can_ask_is_unknown(tmp_path, no_nvml):
    (tmp_path / "root/proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "root/proc/driver/nvidia/version").touch()
    found = [*gpu.gpus(scene(tmp_path)), xid(scene(tmp_path))]
    assert {result.name: result.status for result in found} == {"gpu-count": UNKNOWN, "xid": UNKNOWN}


def test_nvidia_smi_on_a_node_with_a_lost_gpu(tmp_path, no_nvml):
    install(tmp_path, f"cat <<'X'\n{SMI}X")
    found = {result.name: result for result in gpu.gpus(scene(tmp_path))}
    assert {name: result.status for name, result in found.items()} == {
        "gpu-count": CRITICAL, "gpu-ecc": CRITICAL, "gpu-clocks": WARNING, "gpu-pcie": WARNING, "gpu-nvlink": OK,
        "gpu-processes": OK,
    }  # fmt: skip
    assert "GPU is lost" in found["gpu-count"].detail


def test_inside_of_a_job_fewer_gpus_are_no_fault(tmp_path, no_nvml):
    install(tmp_path, f"cat <<'X'\n{SMI.splitlines()[0]}\nX")
    environment = {"PATH": str(tmp_path / "bin") + ":/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}
    assert gpu.gpus(scene(tmp_path, environment, expected=8))[0].status is UNKNOWN
    assert gpu.gpus(scene(tmp_path, environment | {"SLURM_GPUS_ON_NODE": "8"}, expected=8))[0].status is CRITICAL
    outside = {"PATH": environment["PATH"]}
    assert gpu.gpus(scene(tmp_path, outside, expected=8))[0].status is CRITICAL


class FakeNvmlError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML says {value}")
        self.value = value


def nvml(**answers):
    """A library with these answers; any other question is not supported. An exception is raised."""

    def answer(value):
        def ask(*arguments):
            found = value(*arguments) if callable(value) else value
            if isinstance(found, Exception):
                raise found
            return found

        return ask

    names = ["nvmlDeviceGetRemappedRows", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetNvLinkState",
             "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetUUID", "nvmlDeviceGetTemperature"]  # fmt: skip
    base = {name: FakeNvmlError(3) for name in names}
    base |= {"nvmlInit": None, "nvmlDeviceGetCount": 2, "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}"}
    functions = {name: answer(value) for name, value in (base | answers).items()}
    return SimpleNamespace(
        NVMLError=FakeNvmlError,
        NVML_ERROR_GPU_IS_LOST=15,
        NVML_ERROR_RESET_REQUIRED=16,
        NVML_ERROR_UNKNOWN=999,
        **functions,
    )


def test_nvml_is_asked_first_and_may_not_know_everything(tmp_path, monkeypatch):
    library = nvml(nvmlDeviceGetUUID=b"GPU-\xff", nvmlDeviceGetRemappedRows=(0, 1, 1, 0),
                   nvmlDeviceGetNvLinkState=lambda handle, link: link % 2 if link < 4 else FakeNvmlError(2),
                   nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=7)])  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", library)
    found = survey(scene(tmp_path))
    first = found.gpus[0]
    assert (found.source, len(found.gpus)) == ("nvml", 2)
    assert (first.pending, first.remap_failed, first.links) == (True, False, (False, True, False, True))
    assert (first.uncorrected, first.temperature_c, first.pids) == (None, None, (7,))


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ({"nvmlDeviceGetHandleByIndex": lambda index: FakeNvmlError(15) if index else "first"}, CRITICAL),
        ({"nvmlDeviceGetTemperature": FakeNvmlError(16)}, CRITICAL),
        ({"nvmlInit": FakeNvmlError(18)}, CRITICAL),
        ({"nvmlDeviceGetCount": FakeNvmlError(999)}, CRITICAL),
    ],
    ids=["lost", "needs a reset", "driver and library differ", "unknown error"],
)
def test_gpus_that_nvml_cannot_reach(tmp_path, monkeypatch, answers, status):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(**answers))
    found = gpu.gpus(scene(tmp_path))
    assert (found[0].name, found[0].status) == ("gpu-count", status)


def test_no_driver_for_nvml_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=FakeNvmlError(9)))
    assert gpu.gpus(scene(tmp_path)) == []


@of_each(
    judge__gpus__limits__status=[
        (gpu.judge_ecc, [GOOD], GpuLimits(), OK),
        (gpu.judge_ecc, [replace(GOOD, uncorrected=None, pending=None)], GpuLimits(), OK),
        (gpu.judge_ecc, [replace(GOOD, uncorrected=1)], GpuLimits(), WARNING),
        (gpu.judge_ecc, [replace(GOOD, pending=True)], GpuLimits(), WARNING),
        (gpu.judge_ecc, [replace(GOOD, uncorrected=5)], GpuLimits(), CRITICAL),
        (gpu.judge_ecc, [replace(GOOD, remap_failed=True)], GpuLimits(), CRITICAL),
        (gpu.judge_clocks, [GOOD, replace(GOOD, throttle=0x4)], GpuLimits(), OK),
        (gpu.judge_clocks, [replace(GOOD, throttle=0x80)], GpuLimits(), WARNING),
        (gpu.judge_clocks, [replace(GOOD, temperature_c=95.0)], GpuLimits(), WARNING),
        (gpu.judge_clocks, [replace(GOOD, temperature_c=None, throttle=None)], GpuLimits(), OK),
        (gpu.judge_pcie, [GOOD], GpuLimits(pcie_width=16, pcie_generation=5), OK),
        (gpu.judge_pcie, [replace(GOOD, width=8)], GpuLimits(), WARNING),
        (gpu.judge_pcie, [replace(GOOD, width=8)], GpuLimits(pcie_width=16), CRITICAL),
        (gpu.judge_pcie, [replace(GOOD, max_generation=4)], GpuLimits(pcie_generation=5), CRITICAL),
        (gpu.judge_pcie, [replace(GOOD, width=None)], GpuLimits(pcie_width=16), OK),
        (gpu.judge_nvlink, [GOOD], GpuLimits(), OK),
        (gpu.judge_nvlink, [replace(GOOD, links=())], GpuLimits(), OK),
        (gpu.judge_nvlink, [replace(GOOD, links=(True, False))], GpuLimits(), WARNING),
        (gpu.judge_nvlink, [GOOD, replace(GOOD, links=())], GpuLimits(nvlinks=18), CRITICAL),
        (gpu.judge_nvlink, [replace(GOOD, links=())], GpuLimits(nvlinks=18), CRITICAL),
    ]
)
def test_judging_gpus(judge, gpus, limits, status):
    assert judge(gpus, limits).status is status


@pytest.mark.parametrize(
    ("job", "uid", "running", "status"),
    [("5", 1000, {"6"}, WARNING), ("5", 1000, {"5"}, OK), ("", 1000, set(), OK), ("5", 0, set(), OK),
     ("5", 1000, None, UNKNOWN)],
    ids=["left over", "running", "no job", "root", "a job is starting"],
)  # fmt: skip
def test_processes_on_gpus(job, uid, running, status):
    owner = Process(pid=7, uid=uid, started=1, job=job, name="python")
    known = frozenset(running) if running is not None else None
    assert gpu.judge_processes([replace(GOOD, pids=(7, 8))], {7: owner, 8: None}, known).status is status


def test_more_on_the_bus_than_answer():
    found = Survey(gpus=(GOOD,), source="nvml", on_bus=2, driver_loaded=True)
    assert gpu.judge_count(found, GpuLimits(), confined=False).status is CRITICAL
    assert gpu.judge_count(found, GpuLimits(), confined=True).status is UNKNOWN
    assert gpu.judge_count(found, GpuLimits(expected=1), confined=False).status is OK


def kmsg(code: int, at_s: float, words: str = "pid=12, name=python, something", device: str = "PCI:0000:3b:00") -> str:
    return f"4,1234,{int(at_s * 1e6)},-;NVRM: Xid ({device}): {code}, {words}"


def sxid(words: str) -> str:
    return f"3,1,90000000000,-;nvidia-nvswitch1: SXid (PCI:0000:84:00.0): {words}"


@pytest.mark.parametrize(
    ("lines", "status", "problem"),
    [
        ([], OK, Problem.NODE),
        (["6,1,2,-;usb 1-1: new device", " SUBSYSTEM=pci", "garbage", "", ";;;", "4,1,x,-;NVRM: Xid (1): 79"], OK,
         Problem.NODE),
        ([kmsg(79, 90_000)], CRITICAL, Problem.HARDWARE),
        ([kmsg(31, 90_000)], OK, Problem.USER),
        ([kmsg(94, 90_000)], WARNING, Problem.HARDWARE),
        ([kmsg(31, 90_000), kmsg(48, 90_001), kmsg(45, 90_002)], CRITICAL, Problem.HARDWARE),
        ([kmsg(79, 100)], OK, Problem.NODE),
        ([kmsg(999, 90_000)], WARNING, Problem.HARDWARE),
        ([kmsg(154, 90_000, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)")], CRITICAL,
         Problem.HARDWARE),
        ([kmsg(154, 90_000, "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)")], OK,
         Problem.HARDWARE),
        ([kmsg(79, 90_000, device="0000:03:00")], CRITICAL, Problem.HARDWARE),
        ([kmsg(144, 90_000, "SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001)")], WARNING, Problem.HARDWARE),
        ([kmsg(149, 90_000, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6)")], CRITICAL, Problem.HARDWARE),
        (["3,1,90000000000,-;NVRM: GPU 0000:04:00.0: RmInitAdapter failed! (0x26:0xffff:1127)"], CRITICAL,
         Problem.HARDWARE),
        (["3,1,90000000000,-;NVRM: GPU 0000:04:00.0: GPU has fallen off the bus."], CRITICAL, Problem.HARDWARE),
        (["3,1,90000000000,-;NVRM: The NVIDIA probe routine failed for 1 device(s)."], CRITICAL, Problem.HARDWARE),
        ([kmsg(94, 90_000, "Contained: SM (0x1)", device="PCI:0000:3b:00 GPU-I:03")], WARNING, Problem.HARDWARE),
        ([kmsg(13, 90_000, "Graphics Exception", device="PCI:0000:3b:00 GPU-I:03 GPU-CI:00")], OK, Problem.USER),
        ([sxid("20034, Fatal, Link 29 LTSSM Fault Up"), sxid("20034, Severity 1 Engine instance 29")], CRITICAL,
         Problem.HARDWARE),
        ([sxid("24007, Non-fatal, Link 4 corrected"), sxid("24007, Data {0x000001c0}")], WARNING, Problem.HARDWARE),
        ([sxid("12028, Data {0x000001c0, 0x00bd5c8a}")], CRITICAL, Problem.HARDWARE),
    ],
    ids=["none", "others", "off the bus", "a program's", "contained", "several", "long ago", "not in the table",
         "reboot asked for", "recovered", "old format", "a link's, not fatal", "a link's", "a GPU that did not start",
         "off the bus, without a code", "a GPU without an address", "of a part of a GPU (MIG)",
         "a program's, on a part of a GPU", "a switch's", "a switch's, not fatal", "a switch's, its beginning is lost"],
)  # fmt: skip
def test_xids(lines, status, problem):
    found = judge_xids(parse_xids(lines), 100_000, 24)
    assert (found.status, found.problem) == (status, problem)
    assert bool(found.remedy) is (status in (WARNING, CRITICAL))


def test_every_cause_says_what_to_do():
    assert all(cause.meaning and cause.remedy for cause in CAUSES.values())


def test_the_kernel_log_is_read_from_its_device(tmp_path):
    for name, text in (("dev/kmsg", kmsg(79, 50) + "\n"), ("proc/uptime", "100.0 1.0\n")):
        (tmp_path / "root" / name).parent.mkdir(parents=True)
        (tmp_path / "root" / name).write_text(text)
    found = xid(scene(tmp_path))
    assert found.status is CRITICAL
    assert "79" in found.detail
    assert len(found.evidence) == 1


@pytest.mark.parametrize(
    ("answer", "product", "memory"),
    [
        ({"error": "no torch"}, UNKNOWN, UNKNOWN),
        ({"devices": []}, UNKNOWN, UNKNOWN),
        ({"devices": [{"index": 0, "wrong": "", "memory": "", "tflops": 700, "tested_gib": 60}]}, OK, OK),
        ({"devices": [{"index": 0, "wrong": "2 rows", "memory": "", "tflops": 700}]}, CRITICAL, OK),
        ({"devices": [{"index": 0, "wrong": "", "memory": "1 word", "tflops": 700}]}, OK, CRITICAL),
        ({"devices": [{"index": 0, "wrong": "", "memory": "", "tflops": 100}]}, CRITICAL, OK),
        ({"devices": [{"index": 0, "error": "out of memory"}]}, UNKNOWN, UNKNOWN),
        ({"devices": ["x", {}]}, UNKNOWN, OK),
    ],
    ids=["error", "none", "well", "wrong product", "bad memory", "slow", "failed", "odd"],
)
def test_what_the_long_probe_found(answer, product, memory):
    found = gpu.judge_work(answer, GpuLimits(matmul_min_tflops=500))
    assert [result.status for result in found] == [product, memory]


DIAG = {"DCGM Diagnostic": {"test_categories": [{"category": "Deployment", "tests": [
    {"name": "Denylist", "results": [{"status": "PASS"}]},
    {"name": "Page Retirement/Row Remap", "results": [{"gpu_id": "3", "status": "FAIL", "warnings": "rows pending"}]},
]}]}}  # fmt: skip


def test_what_the_diagnosis_found():
    found = gpu.judge_diagnosis(DIAG)
    assert (found.status, found.detail) == (CRITICAL, "Page Retirement/Row Remap: rows pending")
    good = json.loads(json.dumps(DIAG).replace("FAIL", "PASS"))
    assert gpu.judge_diagnosis(good).status is OK
    assert gpu.judge_diagnosis({}).status is UNKNOWN
    assert gpu.judge_diagnosis({"error": "no hostengine"}).status is UNKNOWN


@pytest.mark.parametrize(
    ("rank", "tasks", "nodes", "pair"),
    [(0, 2, "n[1-2]", ("n1", 0)), (1, 2, "n[1-2]", ("n1", 1)), (3, 5, "n[1-5]", ("n3", 1)), (4, 5, "n[1-5]", None),
     (0, 1, "n1", None), (0, 4, "n[1-2]", None)],
    ids=["first", "second", "second pair", "odd one out", "alone", "two on a node"],
)  # fmt: skip
def test_who_is_paired_with_whom(rank, tasks, nodes, pair):
    found = gpu.pair_of({"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(tasks), "SLURM_JOB_NODELIST": nodes,
                              "SLURM_JOB_ID": "7"})  # fmt: skip
    assert (found and (found[0], found[2])) == pair


def test_outside_of_a_step_there_is_no_pair():
    assert gpu.pair_of({}) is None
    assert gpu.pair_of({"SLURM_PROCID": "x", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}) is None


@pytest.mark.parametrize(
    ("answer", "status"),
    [({"mbps": 900, "backend": "gloo"}, OK), ({"mbps": 10, "backend": "gloo"}, CRITICAL),
     ({"error": "timeout"}, UNKNOWN), ({"wrong": "3 of 8 sums", "backend": "gloo"}, CRITICAL), ({}, UNKNOWN)],
    ids=["well", "slow", "no partner", "wrong", "nothing"],
)  # fmt: skip
def test_what_a_pair_found(answer, status):
    assert gpu.judge_pair(answer, 100).status is status


@pytest.mark.soak
def test_the_long_probes_programs_on_this_machine():
    module = [sys.executable, "-P", "-m"]
    check = subprocess.run([*module, "slurmft.worker.gpu_check", "--cpu", "--size", "128"], capture_output=True,
                           text=True, timeout=120, check=True)  # fmt: skip
    found = gpu.judge_work(json.loads(check.stdout), GpuLimits())
    assert [result.status for result in found] == [OK, OK]
    pair = [subprocess.Popen([*module, "slurmft.worker.gpu_check", "--pair", "127.0.0.1", "29877", rank],
                             stdout=subprocess.PIPE, text=True) for rank in "01"]  # fmt: skip
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in pair]
    assert [gpu.judge_pair(answer, 1).status for answer in answers] == [OK, OK], answers


def test_brief():
    assert (gpu.brief([3]), gpu.brief([0, 7])) == ("GPU 3", "GPUs 0, 7")


@pytest.mark.parametrize(
    ("answer", "statuses"),
    [
        ({"devices": [{"index": 0, "wrong": "", "memory": "", "tflops": 0.1, "tested_gib": 0.1}]}, [OK, OK]),
        ({"devices": [{"index": 0, "wrong": "3 rows", "memory": "", "tflops": 0.1}]}, [CRITICAL, OK]),
        ({"error": "no torch"}, [UNKNOWN, UNKNOWN]),
    ],
    ids=["well", "wrong", "could not"],
)
def test_a_node_without_gpus_computes_on_its_cpu(tmp_path, no_nvml, monkeypatch, answer, statuses):
    asked = []
    monkeypatch.setattr(gpu, "_asked", lambda argv, *_: asked.append(argv) or answer)
    found = gpu.cpu_compute(scene(tmp_path))
    assert [(result.name, result.status) for result in found] == list(
        zip(("cpu-matmul", "cpu-memory"), statuses, strict=True)
    )
    assert "--cpu" in asked[0]
    assert not any("GPU" in result.detail for result in found if result.status is CRITICAL)
    assert gpu.cpu_compute(scene(tmp_path, expected=8)) == [], "there should be GPUs"
