"""The recipe of docs/how-to/loggers.md, with the real TensorBoard: one curve over a restart."""

import warnings
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")


def curve(folder: Path) -> list[tuple[int, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


@pytest.mark.filterwarnings("ignore")
def test_steps_that_are_done_again_are_in_the_curve_once(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for start, until, loss in ((0, 30, 1.0), (20, 40, 2.0)):
        writer = SummaryWriter(str(tmp_path), purge_step=start, filename_suffix=f".{start}")  # type: ignore[no-untyped-call]
        for step in range(start, until):
            writer.add_scalar("loss", loss, step)  # type: ignore[no-untyped-call]
        writer.close()  # type: ignore[no-untyped-call]
    assert curve(tmp_path) == [*((step, 1.0) for step in range(20)), *((step, 2.0) for step in range(20, 40))]
