"""GPUs without a GPU: builds the stand-in for NVIDIA's management library, and steers it.

The library is loaded by the real nvidia-ml-py: with its folder in LD_LIBRARY_PATH, or, in a process that runs already,
by ``preload``. Which devices a node has, and what ails them, is in ``<folder>/<nodename>.gpus``.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from extras import needs

from slurmft.system.files import replace_atomically

SOURCE = Path(__file__).with_name("nvml_stand_in.c")
LIBRARY = "libnvidia-ml.so.1"
needs_stand_in = [
    needs("pynvml"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)"),
]


def build(folder: Path) -> Path:
    """The library, in ``folder``, under the name that nvidia-ml-py asks for; and an ``nvidia-smi`` that asks it."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / LIBRARY
    argv = ["cc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}",
            "-o", str(target), str(SOURCE), "-ldl"]  # fmt: skip
    subprocess.run(argv, check=True, capture_output=True, text=True)
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!{sys.executable} -P\n{_SMI.format(library=str(target))}")
    smi.chmod(0o755)
    folder.chmod(0o755)
    return target


def preload(library: Path) -> None:
    """Let nvidia-ml-py find the library in this process: one of its name that is loaded already is taken."""
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class Node:
    """The GPUs of one node: what the stand-in answers there."""

    def __init__(self, path: Path, *, count: int = 8, mig: int = 0) -> None:
        self.path, self._count, self._mig = path, count, mig
        self.heal()

    def heal(self) -> None:
        """As new: all well."""
        name = self.path.stem
        self.driver: dict[str, Any] = {"init": 0, "version": "580.65.06"}
        self.gpus: list[dict[str, Any]] = [
            {
                "uuid": uuid_of(name, index), "pci": f"00000000:{0x1B + 0x10 * index:02X}:00.0",
                "name": "NVIDIA_H100_80GB_HBM3", "temp": 34, "power": 72_000, "clock": 345, "reasons": "0x1",
                "uncorrected": 0, "corrected": 0, "remapped": "0:0:0:0", "width": 16, "maxwidth": 16, "maxgen": 5,
                "links": 18, "down": "0x0", "linkerrors": 0, "mig": self._mig,
            }
            for index in range(self._count)
        ]  # fmt: skip
        self.write()

    def set(self, index: int, **values: Any) -> None:
        """Change the answers of one device; None takes one away: it is not supported then."""
        self.gpus[index] |= values
        self.write()

    def set_driver(self, **values: Any) -> None:
        """Change the answers of the driver itself: init, fail, hang, xid."""
        self.driver |= values
        self.write()

    def write(self) -> None:
        """Whole or not at all: the library may read it at any moment."""
        lines = ["driver", *(f"gpu {index}" for index in range(len(self.gpus)))]
        words = [
            " ".join([line, *(f"{key}={value}" for key, value in answers.items() if value is not None)])
            for line, answers in zip(lines, [self.driver, *self.gpus], strict=True)
        ]
        replace_atomically(self.path, "\n".join([*words, ""]), mode=0o644, durable=False)

    def remove_driver(self) -> None:
        """The kernel module is not loaded."""
        self.path.unlink(missing_ok=True)


def uuid_of(node: str, index: int) -> str:
    """The UUID of a node's device."""
    return f"GPU-{int.from_bytes(node.encode()[-4:], 'big'):08x}-0000-0000-0000-{index:012x}"


def environment_of(library: Path) -> dict[str, str]:
    """The environment of a process that loads the library, and finds its nvidia-smi."""
    return {
        "LD_LIBRARY_PATH": str(library.parent),
        "PATH": f"{library.parent}:{os.environ.get('PATH', os.defpath)}",
    }


_SMI = '''\
"""The queries of nvidia-smi that slurmft asks, answered by the real nvidia-ml-py from the stand-in."""
import ctypes
import sys

ctypes.CDLL("{library}", mode=ctypes.RTLD_GLOBAL)
import pynvml as nvml

query, names = next(word[2:].split("=") for word in sys.argv[1:] if word.startswith("--query-"))
try:
    nvml.nvmlInit()
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        if query == "query-compute-apps":
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                print(process.pid)
        elif query == "query-gpu":
            known = {{"index": lambda: index, "uuid": lambda: nvml.nvmlDeviceGetUUID(gpu),
                      "temperature.gpu": lambda: nvml.nvmlDeviceGetTemperature(gpu, 0)}}
            print(", ".join(str(known[name]()) if name in known else "[N/A]" for name in names.split(",")))
        else:
            sys.exit(f"not a query of the stand-in: {{query}}")
except nvml.NVMLError as error:
    sys.exit(f"Unable to determine the device handle: {{error}}")
'''
