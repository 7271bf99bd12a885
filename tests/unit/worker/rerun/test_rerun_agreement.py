"""How two ranks learn of a rejected result: with DDP's gradients, with the loop's own reduction, with a collective.

The scenarios run one after the other in one pair of processes; each rank writes down what it saw.
"""

import pytest
from ranks import SAVING, reports_of_ranks

SCRIPT = """
import itertools, json, sys
from datetime import timedelta
from pathlib import Path
import numpy as np, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from slurmft.worker.rerun import RerunStateMachine
from slurmft.worker.rerun_data import RerunDataIterator
from slurmft.policy.reruns import RerunSettings

root, rank = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
report = {}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(3, 1)
        self.empty = torch.nn.Parameter(torch.zeros(0))
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.unused = torch.nn.Linear(2, 2)  # the last parameter has no gradient
    def forward(self, x):
        return self.used(x) + self.empty.sum()

collectives = 0
real = dist.all_reduce, dist.all_gather
def counting(function):
    def call(*args, **kwargs):
        global collectives
        collectives += 1
        return function(*args, **kwargs)
    return call
dist.all_reduce, dist.all_gather = map(counting, real)

def train(name, ddp=True, bad=lambda step, run: False, late=False, dtype=torch.float32, gradient=1.0, after=False,
          reject=torch.isnan, message="loss is NaN \\udcff", **options):
    global collectives
    collectives = 0
    torch.manual_seed(0)
    plain = Net().to(dtype)
    model = DistributedDataParallel(plain, find_unused_parameters=True) if ddp else plain
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    machine = RerunStateMachine(RerunSettings(), model=model, reads_late=late, **options)
    data = RerunDataIterator(torch.full((2, 3), float(n + rank), dtype=dtype) for n in itertools.count())
    runs, code = [], 0
    try:
        for step in range(4):
            run = 0
            while machine.should_run_forward_backward(data):
                loss = model(next(data)).mean()
                if bad(step, run):
                    loss = loss * torch.nan
                check = lambda: machine.validate_result(loss, reject, message, tolerance=np.float64(0))
                if not after:
                    check()
                optimizer.zero_grad()
                (loss * (gradient if step == 2 else 1.0)).backward()
                if after:
                    check()
                if options.get("carried_by_loop"):
                    flag = torch.tensor([machine.flag])
                    real[0](flag)
                    machine.agree(flag.item())
                run += 1
            runs.append(run)
            _, is_over, code = machine.should_checkpoint_and_exit()
            if is_over:
                break
            optimizer.step()
        weights = torch.cat([p.detach().double().flatten() for p in plain.used.parameters()]).tolist()
    except RuntimeError as error:
        weights = str(error)
    report[name] = {"runs": runs, "weights": weights, "collectives": collectives, "code": code}
    dist.barrier()

once = lambda step, run: rank == 1 and step == 2 and run == 0
always = lambda step, run: rank == 1 and step == 2
for late in (False, True):
    for dtype in (torch.float32, torch.bfloat16):
        kind = f"{'late' if late else 'soon'} {dtype}"
        train(f"clean {kind}", late=late, dtype=dtype)
        train(f"once {kind}", late=late, dtype=dtype, bad=once)
    train(f"first {late}", late=late, bad=lambda step, run: rank == 1 and step == 0 and run == 0)
    train(f"always {late}", late=late, bad=always)
train("collective", ddp=False, bad=once)
train("loop", bad=once, carried_by_loop=True)
train("loop clean", carried_by_loop=True)
train("overflow", gradient=float("inf"))
train("after", reject=lambda loss: True, after=True)
(root / f"report-{rank}.json").write_text(json.dumps(report))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return reports_of_ranks(
        SCRIPT, tmp_path_factory.mktemp("two ranks"), ahead=SAVING,
        own=lambda rank: {"SLURMD_NODENAME": f"n{rank}", "RANK": str(rank)},
    )  # fmt: skip


KINDS = [f"{when} torch.{dtype}" for when in ("soon", "late") for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_flag_rides_on_the_gradients(reports, kind):
    for report in reports:
        assert report[f"once {kind}"]["runs"] == [1, 1, 2, 1]
        assert report[f"once {kind}"]["weights"] == report[f"clean {kind}"]["weights"]


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_no_collective_while_all_is_well(reports, kind):
    assert [report[f"clean {kind}"]["collectives"] for report in reports] == [0, 0]
    assert [report[f"once {kind}"]["collectives"] for report in reports] == [4, 4], "lengths and rows, twice"


@pytest.mark.parametrize("late", [False, True])
def test_the_first_iteration_is_watched_too(reports, late):
    assert [report[f"first {late}"]["runs"] for report in reports] == [[2, 1, 1, 1]] * 2


@pytest.mark.parametrize("late", [False, True])
def test_all_ranks_leave_together(reports, late):
    assert [report[f"always {late}"]["code"] for report in reports] == [16, 16]
    assert [report[f"always {late}"]["runs"] for report in reports] == [[1, 1, 2]] * 2


def test_without_ddp_one_collective_per_iteration_carries_it(reports):
    for report in reports:
        assert report["collective"]["runs"] == [1, 1, 2, 1]
        assert report["collective"]["collectives"] == 4 + 4


def test_the_loops_own_reduction_carries_it(reports):
    for report in reports:
        assert report["loop"]["runs"] == [1, 1, 2, 1]
        assert report["loop clean"]["runs"] == [1, 1, 1, 1] and report["loop clean"]["collectives"] == 0


def test_gradients_that_overflow_by_themselves_are_no_rejected_result(reports):
    for report in reports:
        assert report["overflow"]["runs"] == [1, 1, 1, 1]


def test_validating_after_the_backward_pass_is_an_error(reports):
    for report in reports:
        assert "validate it before loss.backward()" in report["after"]["weights"]
