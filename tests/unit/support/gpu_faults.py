"""Faults of GPUs on the stand-in, what each must lead to, and five nodes whose probes and policy are real."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gpu_stand_in
from gpu_stand_in import Node

from slurmft.config.health import HealthConfig
from slurmft.health.checker import look
from slurmft.health.gpu import NAMES
from slurmft.health.node import Scene
from slurmft.policy.node_health import Checkup, NodeFact, Status, SweepPlan, Visits, sweep_plan
from slurmft.policy.suspicion import Rules

OK, WARNING, CRITICAL, UNKNOWN = Status
UP_S = 40 * 86_400.0
"""The nodes have been up for so long when it begins."""

SETTINGS = {"expected": 8, "pcie_width": 16, "pcie_generation": 5, "nvlinks": 18, "answer_s": 2.0}


@dataclass(frozen=True)
class Fault:
    """One kind."""

    name: str
    check: str
    status: Status
    """Of that check, in a look that can wait."""

    inject: Callable[[NodeUnderTest, int, random.Random], object]

    @property
    def takes_out(self) -> bool:
        return self.status is CRITICAL


@dataclass
class NodeUnderTest:
    """One node: its devices, its kernel log, its uptime."""

    name: str
    root: Path
    gpus: Node = field(init=False)
    kernel_log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder in ("dev", "proc", "run"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        self.gpus = Node(self.root / f"{self.name}.gpus")
        self.at(0.0)

    def at(self, since_s: float) -> None:
        """It is so much later."""
        self.up_s = UP_S + since_s
        (self.root / "proc/uptime").write_text(f"{self.up_s} 1.0\n")
        (self.root / "dev/kmsg").write_text("".join(f"{line}\n" for line in self.kernel_log))

    def log(self, words: str) -> None:
        self.kernel_log.append(f"4,1,{int(self.up_s * 1e6)},-;{words}")
        self.at(self.up_s - UP_S)

    def heal(self) -> None:
        """Another node in its place: no memory of counters, an empty log."""
        self.kernel_log.clear()
        self.gpus.heal()
        self.at(0.0)
        for path in (self.root / "run").rglob("*.json"):
            path.unlink()


def _set(**values: object) -> Callable[[NodeUnderTest, int, random.Random], object]:
    return lambda node, index, dice: node.gpus.set(index, **values)


def _driver(**values: object) -> Callable[[NodeUnderTest, int, random.Random], object]:
    return lambda node, index, dice: node.gpus.set_driver(**values)


def _log(words: str) -> Callable[[NodeUnderTest, int, random.Random], object]:
    return lambda node, index, dice: node.log(words.replace("BUS", f"0000:{0x1B + 0x10 * index:02x}:00"))


def _shrink(node: NodeUnderTest, index: int, dice: random.Random) -> None:
    del node.gpus.gpus[index:]
    node.gpus.write()


def _xid(code: int, words: str = "pid=12, name=python, Ch 00000008") -> Callable[..., object]:
    return _log(f"NVRM: Xid (PCI:BUS): {code}, {words}")


FAULTS = (
    Fault("fell off the bus", "gpu-count", CRITICAL, _set(lost=1)),
    Fault("needs a reset", "gpu-count", CRITICAL, _set(reset=1)),
    Fault("its temperature is an error", "gpu-count", CRITICAL, _set(fail="nvmlDeviceGetTemperature:999")),
    Fault("its UUID is an error", "gpu-count", CRITICAL, _set(fail="nvmlDeviceGetUUID:999")),
    Fault("no handle", "gpu-count", CRITICAL, _set(fail="nvmlDeviceGetHandleByIndex_v2:999")),
    Fault("its power is not connected", "gpu-count", CRITICAL, _set(fail="nvmlDeviceGetHandleByIndex_v2:8")),
    Fault("its interrupts do not come", "gpu-count", CRITICAL, _set(fail="nvmlDeviceGetHandleByIndex_v2:11")),
    Fault("devices are not listed", "gpu-count", CRITICAL, _shrink),
    Fault("the driver is not loaded", "gpu-count", CRITICAL, lambda node, index, dice: node.gpus.remove_driver()),
    Fault("driver and library differ", "gpu-count", CRITICAL, _driver(init=18)),
    Fault("the library fails", "gpu-count", CRITICAL, _driver(init=999)),
    Fault("the count fails", "gpu-count", CRITICAL, _driver(fail="nvmlDeviceGetCount_v2:999")),
    Fault("the library hangs", "gpu-count", CRITICAL, _driver(hang="nvmlInitWithFlags")),
    Fault("a device hangs", "gpu-count", CRITICAL, _set(hang="nvmlDeviceGetTotalEccErrors")),
    Fault("many uncorrected errors", "gpu-ecc", CRITICAL,
          lambda node, index, dice: node.gpus.set(index, uncorrected=dice.randint(5, 500))),
    Fault("a row could not be remapped", "gpu-ecc", CRITICAL, _set(remapped="0:3:0:1")),
    Fault("lanes are lost", "gpu-pcie", CRITICAL,
          lambda node, index, dice: node.gpus.set(index, width=dice.choice([1, 2, 4, 8]))),
    Fault("an older generation of PCIe", "gpu-pcie", CRITICAL, _set(maxgen=4)),
    Fault("NVLinks are down", "gpu-nvlink", CRITICAL,
          lambda node, index, dice: node.gpus.set(index, down=hex(dice.randint(1, 2**18 - 1)))),
    Fault("Xid 48", "xid", CRITICAL, _xid(48)),
    Fault("Xid 62", "xid", CRITICAL, _xid(62)),
    Fault("Xid 64", "xid", CRITICAL, _xid(64)),
    Fault("Xid 74", "xid", CRITICAL, _xid(74)),
    Fault("Xid 79", "xid", CRITICAL, _xid(79, "GPU has fallen off the bus.")),
    Fault("Xid 95", "xid", CRITICAL, _xid(95)),
    Fault("Xid 119", "xid", CRITICAL, _xid(119, "Timeout after 6s of waiting for RPC response from GPU0 GSP!")),
    Fault("Xid 120", "xid", CRITICAL, _xid(120)),
    Fault("Xid 140", "xid", CRITICAL, _xid(140)),
    Fault("Xid 143", "xid", CRITICAL, _xid(143)),
    Fault("a fatal NVLink 5 error", "xid", CRITICAL, _xid(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x0)")),
    Fault("the driver asks for a reset", "xid", CRITICAL,
          _xid(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")),
    Fault("a switch's fatal error", "xid", CRITICAL,
          _log("nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 20034, Fatal, Link 29 LTSSM Fault Up")),
    Fault("a device does not start", "xid", CRITICAL,
          _log("NVRM: GPU BUS.0: RmInitAdapter failed! (0x26:0xffff:1127)")),
    Fault("a few uncorrected errors", "gpu-ecc", WARNING,
          lambda node, index, dice: node.gpus.set(index, uncorrected=dice.randint(1, 4))),
    Fault("a row waits for a reset", "gpu-ecc", WARNING, _set(remapped="0:1:1:0")),
    Fault("hardware slowdown", "gpu-clocks", WARNING, _set(reasons="0x48")),
    Fault("power brake", "gpu-clocks", WARNING, _set(reasons="0x80")),
    Fault("too hot", "gpu-clocks", WARNING, lambda node, index, dice: node.gpus.set(index, temp=dice.randint(87, 110))),
    Fault("NVLinks recover often", "gpu-nvlink", WARNING, _set(linkerrors=400)),
    Fault("Xid 63", "xid", WARNING, _xid(63)),
    Fault("Xid 94", "xid", WARNING, _xid(94)),
    Fault("an NVLink 5 error, not fatal", "xid", WARNING, _xid(145, "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2)")),
    Fault("a switch's error, not fatal", "xid", WARNING,
          _log("nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 24007, Non-fatal, Link 4 corrected")),
    Fault("a program's Xid 31", "xid", OK, _xid(31)),
    Fault("a program's Xid 13", "xid", OK, _xid(13)),
    Fault("no permission", "gpu-count", UNKNOWN, _driver(init=4)),
    Fault("no resources", "gpu-count", UNKNOWN, _set(fail="nvmlDeviceGetHandleByIndex_v2:23")),
)  # fmt: skip


class FaultyCluster:
    """Five nodes with eight devices each; one is ill at a time."""

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        self.dice = random.Random(seed)
        self.nodes = [NodeUnderTest(f"n{number}", folder / f"n{number}") for number in range(1, 6)]
        self.looks: dict[str, list[Checkup]] = {}
        self._well: dict[str, Checkup] = {}
        self.began = 1_800_000_000.0

    def look(self, node: NodeUnderTest, after_s: float, context: str) -> Checkup:
        """The real probes in processes of their own, by the real library."""
        os.environ["NVML_STAND_IN"] = str(node.gpus.path)
        node.at(after_s)
        scene = Scene(node=node.name, now=self.began + after_s, config=HealthConfig(gpu=SETTINGS), context=context,
                      root=node.root, environment={"PATH": "/nowhere"})  # fmt: skip
        found = look(scene, only=[*NAMES, "xid"])
        self.looks.setdefault(node.name, []).append(found)
        self._well.pop(node.name, None)
        return found

    def begin(self) -> None:
        """All nodes are well, and have been looked at: those again that have been looked at since."""
        for node in self.nodes:
            self.looks.pop(node.name, None)
            node.gpus.heal()
            if node.name not in self._well:
                node.heal()
                found = self.look(node, -600.0, "healthcheck")
                self._well[node.name] = found
            self.looks[node.name] = [self._well[node.name]]

    def sweep(self, after_s: float) -> SweepPlan:
        nodes = {node.name: NodeFact(node=node.name, state="IDLE", usable=True, is_idle=True) for node in self.nodes}
        return sweep_plan(nodes, self.looks, observations=(), manual=(), now=self.began + after_s, visits=Visits(),
                          health=HealthConfig().verdict.rules(), rules=Rules())  # fmt: skip


def outcome_of(found: Checkup, fault: Fault) -> Status:
    """What the look says of the check that the fault is about; UNKNOWN where it is silent."""
    return next((result.status for result in found.results if result.name == fault.check), UNKNOWN)


def stand_in(folder: Path) -> Path:
    """Built, and loaded into this process."""
    library = gpu_stand_in.build(folder)
    gpu_stand_in.preload(library)
    return library
