"""The floors of an asynchronous save: a copy into warm shared memory, which another process writes.

That process is as polite as slurmft's writer, and trains beside it what trains beside all others. It writes and does
nothing else, or hashes the same bytes in a second thread, as a save with digests must. As a program:
``raw_write.py MEMORY BYTES write|hash`` writes that memory to the file named in each line that it reads, and answers
when it was durable.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from floors import Shared, room
from methods import Method
from state import State

from slurmft.checkpoint.write_requests import yield_to_others


class RawWrite(Method):
    BESIDE = "write"

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self.tensors = [tensor for _, tensor in state.tensors()]
        memory = Path(os.environ["SLURMFT_MEMORY_DIR"]) / "raw"
        self.shared = Shared(memory, sum(map(room, self.tensors)))
        self.views = self.shared.__enter__().views(self.tensors)
        self.writer = subprocess.Popen(
            [sys.executable, __file__, str(memory), str(self.shared.size), self.BESIDE], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert self.writer.stdout is not None
        self.writer.stdout.readline()  # it is ready

    def save(self, number: int) -> None:
        self._committed_at = None
        for tensor, view in zip(self.tensors, self.views, strict=True):
            view.copy_(tensor)
        assert self.writer.stdin is not None
        self.writer.stdin.write(f"{self.path(number)}\n")

    def committed_at(self) -> float | None:
        assert self.writer.stdout is not None
        if self._committed_at is None and select.select([self.writer.stdout], [], [], 0)[0]:
            self._committed_at = float(self.writer.stdout.readline())
        return self._committed_at

    def close(self) -> None:
        assert self.writer.stdin is not None
        self.writer.stdin.close()
        self.writer.wait(30)
        self.views = []
        self.shared.__exit__()


class RawWriteAndHash(RawWrite):
    BESIDE = "hash"


def main() -> None:
    memory, size = Path(sys.argv[1]), int(sys.argv[2])
    yield_to_others()
    with Shared(memory, size, is_new=False) as shared:
        print("ready", flush=True)
        for line in sys.stdin:
            hashing = threading.Thread(target=shared.hash)
            if sys.argv[3] == RawWriteAndHash.BESIDE:
                hashing.start()
            shared.write(Path(line.rstrip("\n")), os.O_DIRECT)
            if hashing.ident is not None:
                hashing.join()
            print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main()
