"""What an agent reports of a rank that trains, for tests that read a few fields of it."""

from typing import Any

from msgspec.structs import replace

from slurmft.ipc.messages import WorkerFacts
from slurmft.ipc.pages import State

_TRAINING = WorkerFacts(
    rank=0, state=int(State.TRAINING), attached=True, step=0, until=90, saved=-1, durable=-1, resumed=0,
    first_step_at=0.0, answered=-1, metric=0.5, first_step_s=0.0, longest_step_s=0.0, saves=0, save_s=0.0, saving_s=0.0,
    since_saved_s=0.0, save_failures=0, save_errno=0, save_cost_s=0.0,
)  # fmt: skip


def training(**changes: Any) -> WorkerFacts:
    """Rank 0 at some step, with nothing saved, but for ``changes``."""
    return replace(_TRAINING, **changes)
