"""How much memory a family of processes has, each page counted once."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import psutil

EVERY_S = 0.05
LOOK_S = 0.3


def busy_elsewhere() -> float:
    """How many processors are busy now, while this process and its children do nothing."""
    before, began = _busy_s(), time.monotonic()
    time.sleep(LOOK_S)
    return (_busy_s() - before) / (time.monotonic() - began)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _shared_bytes() -> int:
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(row[1]) << 10 for row in rows if row[0] == "Shmem:")


class Watch:
    """The most that a process, its children and those that work for its folder had since ``start``."""

    def __init__(self, pid: int, folder: Path, memory: Path) -> None:
        self.pid, self.folder, self.memory = pid, folder, memory
        self.most_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        before = 0
        while not self._over.is_set():
            now = self.now_bytes()
            # processes are looked at one after the other: pages that one maps meanwhile would count twice
            self.most_bytes = max(self.most_bytes, min(before, now))
            before = now
            self._over.wait(EVERY_S)

    def now_bytes(self) -> int:
        """Anonymous memory, and shared memory: what is mapped, or all files in the memory folder if that is more."""
        own = shared = 0
        for pid in self._family():
            with contextlib.suppress(OSError):
                rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
                of = {row[0]: int(row[1]) << 10 for row in rows if row[0].startswith("Pss_")}
                own, shared = own + of.get("Pss_Anon:", 0), shared + of.get("Pss_Shmem:", 0)
        files = 0
        for path in self.memory.rglob("*"):
            with contextlib.suppress(OSError):
                files += path.stat().st_blocks * 512
        # a look at one process after another counts pages twice that move between them meanwhile: there are no more
        # than all shared pages of the system
        return own + min(max(shared, files), _shared_bytes())

    def _family(self) -> set[int]:
        """A writer may be a session of its own, but it is told where to write."""
        with contextlib.suppress(psutil.Error):
            family = {self.pid, *(each.pid for each in psutil.Process(self.pid).children(recursive=True))}
            for each in psutil.process_iter(["cmdline"]):
                words = " ".join(each.info["cmdline"] or ())
                if str(self.folder) in words or str(self.memory) in words:
                    family.add(each.pid)
            return family
        return set()
