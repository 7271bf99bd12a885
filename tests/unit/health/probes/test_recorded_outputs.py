"""What NVIDIA's tools and NCCL really print, and what our parsers make of it: also of what is cut short or hostile.

Each text names the public page that it stands on; names of hosts and people are replaced. ``data/log_endings.txt``
holds more ends of logs, with their labels.
"""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.agent.workers import gpu_uuids, own_device, pids_on_gpus
from slurmft.config.health import HealthConfig
from slurmft.health import gpu
from slurmft.health.gpu import judge_xids, parse_remapped_rows, parse_smi, parse_xids
from slurmft.health.node import Scene
from slurmft.policy.node_health import Status
from slurmft.policy.symptoms import cause_of_text
from slurmft.policy.verdict import Cause

OK, WARNING, CRITICAL, UNKNOWN = Status
COMMUNICATION, DEVICE_MEMORY = Cause.COMMUNICATION_ERROR, Cause.DEVICE_OUT_OF_MEMORY

# nvidia-smi


def row(index: int = 0, **fields: str) -> str:
    """A row of an A100; ``[N/A]`` for what it has not."""
    known = {name: "0" for name in gpu._SMI_FIELDS} | {
        "index": str(index), "uuid": f"GPU-{index}", "name": "NVIDIA A100-SXM4-80GB", "pci.bus_id": "00000000:07:00.0",
        "retired_pages.pending": "[N/A]", "temperature.gpu": "31",
        "clocks_throttle_reasons.active": "0x0000000000000001", "pcie.link.width.current": "16",
        "pcie.link.width.max": "16", "pcie.link.gen.max": "4",
    }  # fmt: skip
    return ", ".join((known | fields).values())


@of_each(
    value__number=[
        ("7", 7),
        ("[N/A]", None),
        ("N/A", None),  # drivers before 450
        ("[Not Supported]", None),  # https://github.com/enkore/i3pystatus/pull/850
        ("[Unknown Error]", None),  # https://github.com/enkore/i3pystatus/pull/850
        ("[Insufficient Permissions]", None),
        ("-1", -1),
        ("9" * 400, None),
        ("", None),
    ]
)
def test_what_stands_in_the_place_of_a_number(value, number):
    found = parse_smi(row(**{"ecc.errors.uncorrected.volatile.total": value}))
    assert ([each.uncorrected for each in found.gpus], found.errors) == ([number], ())


@pytest.mark.parametrize("value", ["[GPU is lost]", "[GPU requires reset]", "ERR!"])
def test_a_gpu_that_says_in_one_field_that_it_is_dead_is_no_healthy_gpu(value):
    """As NVML's codes 15 and 16: it was counted among the healthy ones, with nothing known of it."""
    found = parse_smi("\n".join([row(0), row(1, **{"temperature.gpu": value})]))
    assert [each.index for each in found.gpus] == [0]
    assert len(found.errors) == 1 and value in found.errors[0]


@of_each(text=[row()[:cut] for cut in range(1, len(row()), 7)] + [row() + ", more", "0" * 100_000])
def test_rows_that_are_cut_are_errors_and_not_gpus(text):
    found = parse_smi(text)
    assert len(found.gpus) + len(found.errors) == 1
    assert not found.gpus or text.count(",") == row().count(","), "only its last value may be cut"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # the fields of https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/user-visible-statistics.html
        ("GPU-a, 0, 0\nGPU-b, 1, 0\nGPU-c, 0, 1\n", {"GPU-a": (False, False), "GPU-b": (True, False),
                                                      "GPU-c": (False, True)}),
        ("GPU-a, No, Yes\n", {"GPU-a": (False, True)}),
        ("GPU-a, [N/A], [N/A]\n", {"GPU-a": (None, None)}),
        ("GPU-a, [Unknown Error], 0\n", {"GPU-a": (None, False)}),
        ("Field \"remapped_rows.failure\" is not a valid field to query.\n", {}),
        ("GPU-a, 1\nGPU-b, 1, 1, 1\n, ,\n\0\n", {}),
    ],
    ids=["numbers", "words", "not known", "error", "an older driver", "damaged"],
)  # fmt: skip
def test_remapped_rows(text, found):
    assert parse_remapped_rows(text) == found


def scene(tmp_path, body: str) -> Scene:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return Scene(node="n1", now=0.0, root=tmp_path / "root", config=HealthConfig(gpu={"expected": 2}),
                 environment={"PATH": f"{tmp_path}:/usr/bin:/bin"})  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "status"),
    [("GPU-0, 0, 0\\nGPU-1, 0, 0", OK), ("GPU-0, 0, 0\\nGPU-1, 1, 0", WARNING), ("GPU-0, 0, 1\\nGPU-1, 0, 0", CRITICAL),
     ("", OK)],
    ids=["well", "waits for a reset", "could not be remapped", "not known"],
)  # fmt: skip
def test_rows_that_could_not_be_remapped_are_seen_without_nvml(tmp_path, monkeypatch, rows, status):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    answer = f"case $1 in --query-gpu*) cat <<'X'\n{row(0)}\n{row(1)}\nX\n;; *) printf '{rows}\\n' ;; esac"
    found = {result.name: result.status for result in gpu.gpus(scene(tmp_path, answer))}
    assert (found["gpu-count"], found["gpu-ecc"]) == (OK, status)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        # https://github.com/JosephKJ/OWOD/issues/81
        ("Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost. Reboot the system to recover this "
         "GPU", 15),
        # https://github.com/NVIDIA/open-gpu-kernel-modules/issues/387
        ("Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error", 255),
        # https://github.com/pdbear/syno_nvidia_gpu_driver/issues/22: no blank
        ("Unable to determine the device handle for GPU0000:07:00.0: Unknown Error", 0),
        # https://github.com/utkuozdemir/nvidia_gpu_exporter/issues/110
        ("Failed to initialize NVML: Unknown Error", 255),
    ],
)  # fmt: skip
def test_a_driver_that_cannot_reach_its_gpu_is_critical_whatever_its_exit_code(tmp_path, monkeypatch, said, code):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = gpu.gpus(scene(tmp_path, f"echo '{said}'; exit {code}"))
    assert (found[0].name, found[0].status) == ("gpu-count", CRITICAL)
    assert said[:60] in found[0].detail


@of_each(
    printed__pids=[
        ("55111\n34965\n56597\n", {55111, 34965, 56597}),  # with MIG, https://github.com/XuehaiPan/nvitop/pull/8
        ("No running processes found\n", set()),
        ("[Not Found]\n12\n-3\n1e3\n0x7\n", {12}),
        ("12, python, 14195 MiB\n", set()),
        ("Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error\n", set()),
        ("1" * 100_000, set()),
        ("\uff15\n", set()),
    ]
)
def test_processes_that_hold_memory(tmp_path, printed, pids):
    (tmp_path / "printed").write_text(printed)
    assert pids_on_gpus(scene(tmp_path, f"cat {tmp_path}/printed").environment, 60.0) == pids


@pytest.mark.parametrize(
    ("visible", "own"),
    [
        # https://github.com/NVIDIA/mig-parted/issues/6
        ("MIG-GPU-63feeb45-94c6-b9cb-78ea-98e9b7a5be6b/0/0,MIG-GPU-63feeb45-94c6-b9cb-78ea-98e9b7a5be6b/1/0",
         "MIG-GPU-63feeb45-94c6-b9cb-78ea-98e9b7a5be6b/1/0"),
        ("MIG-a,,MIG-b", "MIG-b"),
        ("GPU-8932f937", None),
        ("0,1", None),
        (",", None),
    ],
)  # fmt: skip
def test_instances_of_a_split_gpu(visible, own):
    assert own_device({"CUDA_VISIBLE_DEVICES": visible}, 1).get("CUDA_VISIBLE_DEVICES") == own


def test_a_listing_with_errors_names_no_gpu(tmp_path):
    environment = scene(tmp_path, "printf '0, GPU-a\\n1, [Unknown Error]\\n'").environment
    assert gpu_uuids({**environment, "CUDA_VISIBLE_DEVICES": "0"}) == ["GPU-a"]
    assert gpu_uuids({**environment, "CUDA_VISIBLE_DEVICES": "GPU-b"}) == []


# the kernel's log


@of_each(
    line__code__status=[
        # https://plexus.company/guides/gpu-xid-errors/64
        ("NVRM: Xid (PCI:0000:65:00): 64, pid='N/A', Row Remapper: Failed to remap row", 64, CRITICAL),
        # the forms of https://docs.nvidia.com/deploy/xid-errors/
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", 79, CRITICAL),
        (
            "NVRM: Xid (PCI:0000:18:00): 31, pid=2181, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE",
            31,
            OK,
        ),
        ("NVRM: Xid (PCI:0000:03:00): 14, Channel 00000001", 14, WARNING),
        ("NVRM: Xid (0000:03:00): 48, An uncorrectable double bit error (DBE) has been detected", 48, CRITICAL),
        ("NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", 79, CRITICAL),
        ("NVRM: Xid (PCI:0000:3b:00): ", None, OK),
        ("NVRM: Xid (PCI:0000:3b:00): 99999999", None, OK),
        ("NVRM: Xid (PCI:../../etc): 79, x", None, OK),
    ]
)
def test_xid_messages(line, code, status):
    found = parse_xids([f"3,4711,{int(5e6)},-;{line}"])
    assert [each.code for each in found] == ([code] if code is not None else [])
    assert judge_xids(found, 100.0, 24).status is status


# NCCL

WATCHDOG = (  # https://github.com/hiyouga/LlamaFactory/issues/7396
    "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 "
    "milliseconds before timing out.\n"
    "[rank0]:[E321 02:07:08.465150152 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 0] Exception (either an error or timeout) "
    "detected by watchdog at work: 1580, last enqueued NCCL work: 1582, last completed NCCL work: 1579."
)


@of_each(text__cause=[
        (WATCHDOG, COMMUNICATION),
        (WATCHDOG[:180], COMMUNICATION),
        # https://github.com/OFA-Sys/OFA/issues/271
        ("[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508, "
         "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.", COMMUNICATION),
        # https://github.com/NVIDIA/nccl/issues/2076
        ("torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
         "remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed "
         "possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
         "socketProgressOpt: Call to recv from 172.16.0.3<33759> failed : Connection reset by peer", COMMUNICATION),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
         COMMUNICATION),
        # https://github.com/NVIDIA/nccl/issues/975
        ("ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
         COMMUNICATION),
        ("n1:12251:12400 [5] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to fe80::966d:ae03:a2:8cf0%ib1"
         "<17943> failed : Software caused connection abort", COMMUNICATION),
        # https://github.com/NVIDIA/nccl/issues/795
        ("n22:183006:183220 [1] misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.200.84.247<58355> failed : "
         "Broken pipe\nn22:183006:183220 [1] NCCL INFO misc/socket.cc:535 -> 6", COMMUNICATION),
        # https://github.com/NVIDIA/nccl-tests/issues/252
        ("k2:25146:25854 [0] ib_plugin.c:1105 NCCL WARN NET/IB : Got completion from peer 10.0.35.1<49189> with error "
         "4, opcode 5327, len 5327, vendor err 81 (Send)", COMMUNICATION),
        # https://github.com/NVIDIA/nccl/issues/1235
        ("ng3:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'", DEVICE_MEMORY),
        # only remarks
        ("dgx:1050:1315 [0] NCCL INFO Channel 03/0 : 0[90000] -> 1[1000] [send] via NET/Socket/3", None),
        ("k2:25146:25852 [0] NCCL INFO [Service thread] Connection closed by localRank 0", None),
        ("NCCL" * 25_000, None),
    ])  # fmt: skip
def test_words_of_nccl(text, cause):
    assert cause_of_text(text) is cause
    assert cause_of_text("\x1b[31m\0" + text) is cause or cause is None


@given(st.text(alphabet=st.sampled_from(list("0123456789,[]N/AGPU- xeErr!\n\0\x1b:()")), max_size=300))
def test_text_of_any_kind_goes_through_every_parser(text):
    parse_smi(text)
    parse_remapped_rows(text)
    parse_xids(text.splitlines())
    cause_of_text(text)
    cause_of_text(text)
    own_device({"CUDA_VISIBLE_DEVICES": text}, 3)
