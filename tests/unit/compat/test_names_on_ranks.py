"""Plain states and Megatron's loop on two real ranks over gloo."""

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

LOOP = """
import torch, torch.distributed as dist
from slurmft import get_rerun_state_machine
from slurmft.compat import RerunDataIterator
dist.init_process_group("gloo")
rank, model = dist.get_rank(), torch.nn.Linear(2, 1)
data = RerunDataIterator(torch.full((2, 2), float(n)) for n in range(9))
machine = get_rerun_state_machine()
runs = []
for step in range(4):
    runs.append(0)
    while machine.should_run_forward_backward(data):
        model.zero_grad()
        loss = model(next(data)).square().mean()
        if (step, rank, runs[-1]) == (2, 1, 0):
            loss = loss * float("nan")
        machine.validate_result(loss, rejection_func=torch.isnan, message="loss is NaN", tolerance=0.0, fatal=True)
        loss.backward()
        runs[-1] += 1
    assert machine.should_checkpoint_and_exit() == (False, False, 0)
assert runs == [1, 1, 2, 1], runs
"""


def test_a_plain_state_is_saved_and_found_by_all_ranks(tmp_path: Path):
    run_ranks(STATES, tmp_path, meet=True, ahead=SAVING)


def test_all_ranks_run_an_iteration_again_that_one_has_rejected(tmp_path: Path):
    run_ranks(LOOP, tmp_path, meet=True, ahead=SAVING)
