"""nvidia-resiliency-ext 0.4.1's asynchronous checkpoint on a machine without CUDA.

Two things are changed for that, here and not in the package: its preload of the tensors, which waits for the CUDA
device, is called with ``non_blocking=False``; and it is asked without a collective (``no_dist=True``) whether the write
is over.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from methods import DcpSave
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from state import State

WRITERS = 2


class Nvrx(DcpSave):
    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self.queue = AsyncCallsQueue()

    def save(self, number: int) -> None:
        self._committed_at = None
        self.path(number).mkdir()
        writer = FileSystemWriterAsync(self.path(number), thread_count=WRITERS)
        planned = save_state_dict_async_plan(self.contents(self.state), writer)
        function, _, arguments = writer.get_save_function_and_args()
        preload = partial(FileSystemWriterAsync.preload_tensors, writer.write_buckets, False)
        finalize = partial(save_state_dict_async_finalize, *planned)
        self.queue.schedule_async_request(AsyncRequest(function, arguments, [finalize], preload_fn=preload))

    def committed_at(self) -> float | None:
        if self._committed_at is None and self.queue.maybe_finalize_async_calls(blocking=False, no_dist=True):
            self._committed_at = time.monotonic()
        return self._committed_at

    def close(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        if self.queue.persistent_caller is not None:  # it has none before its first save
            self.queue.persistent_caller.close()
