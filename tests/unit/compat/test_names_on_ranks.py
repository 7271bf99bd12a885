"""Plain states on two real ranks over gloo."""

from pathlib import Path

from ranks import SAVING, run_ranks

STATES = """
import sys, torch, torch.distributed as dist
from slurmft import CheckpointManager, UsageError
dist.init_process_group("gloo")
rank, manager = dist.get_rank(), CheckpointManager(sys.argv[1])
assert manager.load_checkpoint() is None
manager.save_checkpoint({"a": rank, "t": torch.arange(3)}, "first")
manager.save_checkpoint({"a": rank + 10}, 7)
first = manager.load_checkpoint("first")
assert first["a"] == 0 and first["t"].tolist() == [0, 1, 2], "rank 0's"
assert manager.load_checkpoint() == manager.load_checkpoint(7) == {"a": 10}
assert manager.load_checkpoint("none") is None
try:
    manager.save_checkpoint({}, -1)
except UsageError:
    manager.close()
else:
    raise AssertionError("it was saved")
"""


def test_a_plain_state_is_saved_and_found_by_all_ranks(tmp_path: Path):
    run_ranks(STATES, tmp_path, meet=True, ahead=SAVING)
