"""Remember a signal, and share it with all ranks: for own loops, without a session and without an agent."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from slurmft.errors import UsageError
from slurmft.trainer.host_group import host_group, takes_host_data


class DistributedSignalHandler:
    """While it is entered, ``sig`` is remembered instead of ending the process.

        with DistributedSignalHandler() as handler:
            for step in range(steps):
                train(step)
                if any(handler.signals_received()):
                    save(step)
                    break

    The handler does nothing but remember, and call the one that was there before where that is a function. It is put
    back on leaving, unless another one was installed meanwhile. ``session.steps`` does all of this by itself, without a
    collective.

    Args:
        sig: the signal.
        group: the ranks that exchange what they have seen; all of them, and not over NCCL, when not given.
    """

    def __init__(self, sig: int = signal.SIGTERM, *, group: Any = None) -> None:
        try:
            self.sig = signal.Signals(sig)
        except ValueError as error:
            raise UsageError(f"{sig!r} is not a signal") from error
        self._group = group
        self._seen = self._entered = False
        self._before: signal._HANDLER = None

    @property
    def signal_received(self) -> bool:
        """Whether this very process has got it."""
        return self._seen

    def signals_received(self) -> list[bool]:
        """For each rank, whether it has got the signal; the same on all of them. A collective: every rank calls it.

        Without a process group, the answer of this process alone.
        """
        if not dist.is_available() or not dist.is_initialized():
            return [self._seen]
        group = self._group if self._group is not None else host_group()
        device = torch.device("cpu") if takes_host_data(group) else torch.device("cuda", torch.cuda.current_device())
        own = torch.tensor([int(self._seen)], dtype=torch.int32, device=device)
        everybody = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everybody, own, group=group)
        return [bool(flag) for flag in torch.cat(everybody).tolist()]

    def release(self) -> bool:
        """Put the former handler back; False when that is done already."""
        if not self._entered:
            return False
        self._entered = False
        if signal.getsignal(self.sig) == self._note:
            signal.signal(self.sig, self._before if self._before is not None else signal.SIG_DFL)
        return True

    def __enter__(self) -> Self:
        if self._entered:
            raise UsageError("this DistributedSignalHandler is entered already", hint="make another one")
        self._seen = False
        try:
            self._before = signal.signal(self.sig, self._note)
        except (ValueError, OSError) as error:  # not the main thread; SIGKILL
            raise UsageError(f"{self.sig.name} cannot be handled here: {error}") from error
        self._entered = True
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.release()

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self._seen = not self._seen, True
        if first and callable(self._before) and self._before is not signal.default_int_handler:  # that raises
            self._before(number, frame)
