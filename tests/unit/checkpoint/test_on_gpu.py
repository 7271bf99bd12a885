"""What only a CUDA device can show: ``pytest -m gpu``. None of it has run on one yet; docs/gpu.md says so.

What is measured goes to the test's properties (``--junitxml``) and to its output (``-rP``).
"""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from listener import Listener
from torch import nn

from slurmft.checkpoint import CheckpointManager, snapshots
from slurmft.checkpoint.snapshots import Arena
from slurmft.policy.reruns import RerunSettings
from slurmft.trainer import streams
from slurmft.trainer.savers import SAVERS
from slurmft.worker.digests import weights_digest
from slurmft.worker.rerun import RerunStateMachine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_environment")]

GIB = 1 << 30
HANG_CYCLES = 20_000_000_000
"""A kernel of about ten seconds, in the place of a collective that a dead rank never joins."""


@pytest.fixture
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture
def listener(tmp_path, monkeypatch) -> Listener:
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    monkeypatch.setenv("SLURMFT_MEMORY_DIR", str(memory))
    SAVERS.listener = one = Listener()
    yield one
    SAVERS.listener, SAVERS.is_armed = None, False


def seconds(work) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 64, device=device)).pow(2).mean().backward()
    optimizer.step()


def a_model(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 1)).to(device)


def test_a_copy_into_pinned_memory_is_as_fast_as_cudas_own(device, tmp_path, record_property):
    source = torch.randint(0, 255, (GIB,), dtype=torch.uint8, device=device)
    own = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    arena = Arena(0, tmp_path)
    place = arena.places[0]
    memory = place.begin(GIB)
    view = torch.frombuffer(memory, dtype=torch.uint8, count=GIB)
    pageable_s = min(seconds(lambda: snapshots.copy_into([view], [source], place.address)) for _ in range(3))
    gpu = streams.device_of(source)
    assert gpu is not None
    arena.pin(gpu)
    assert place._pinned is not None
    place._pinned.wait()
    pinned_s = min(seconds(lambda: snapshots.copy_into([view], [source], place.address)) for _ in range(3))
    cuda_s = min(seconds(lambda: own.copy_(source, non_blocking=True)) for _ in range(3))
    for name, took_s in (("pageable", pageable_s), ("pinned", pinned_s), ("cudaMemcpyAsync", cuda_s)):
        record_property(name, f"{1 / took_s:.1f} GiB/s")
        print(f"{name}: {1 / took_s:.1f} GiB/s, {place._pinned.pinned_bytes >> 20} MiB pinned")
    assert torch.equal(view, source.cpu())
    if place._pinned.pinned_bytes == len(memory):
        assert pinned_s < 1.5 * cuda_s
    arena.close()


def test_pinning_stalls_the_training_for_no_longer_than_a_piece(device, tmp_path, record_property):
    arena = Arena(0, tmp_path)
    arena.places[0].begin(2 * GIB)
    kernel = torch.ones(1024, device=device)
    usual_s = max(seconds(lambda: kernel.add_(1)) for _ in range(200))
    gpu = streams.device_of(kernel)
    assert gpu is not None
    arena.pin(gpu)
    pinned, longest_s = arena.places[0]._pinned, 0.0
    assert pinned is not None
    while pinned._thread.is_alive():
        longest_s = max(longest_s, seconds(lambda: kernel.add_(1)))
    record_property("stall", f"{1e3 * longest_s:.2f} ms, {1e3 * usual_s:.2f} ms without")
    assert longest_s < usual_s + 0.05
    arena.close()


def test_just_in_time_does_not_wait_for_what_hangs_on_the_default_stream(device, listener, tmp_path, record_property):
    model = a_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    checkpoints.save(model, optimizer, step=0, async_save=False)
    for step in (1, 2):
        trained(model, optimizer, device)
        SAVERS.at_boundary(step)
    digest = weights_digest(model)
    torch.cuda._sleep(HANG_CYCLES)
    trained(model, optimizer, device)
    SAVERS.at_boundary(3)  # the host is ahead of a device that hangs
    began = time.perf_counter()
    rescue = threading.Thread(target=SAVERS.rescue)
    rescue.start()
    rescue.join()
    record_property("rescue", f"{time.perf_counter() - began:.3f} s")
    assert listener.rescued == [2]
    torch.cuda.synchronize()
    checkpoints.close()
    SAVERS.listener = None
    other = a_model(device)
    loaded = CheckpointManager(tmp_path / "checkpoints").load_latest(other, torch.optim.AdamW(other.parameters()))
    assert (loaded.step, weights_digest(other)) == (2, digest)


def test_an_optimizer_on_a_stream_of_its_own(device, tmp_path):
    model, side = a_model(device), torch.cuda.Stream()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(HANG_CYCLES // 20)
        optimizer.step()
    CheckpointManager(tmp_path).save(model, optimizer, step=1, async_save=False)
    other = a_model(device)
    CheckpointManager(tmp_path).load_latest(other, torch.optim.AdamW(other.parameters()))
    torch.cuda.synchronize()
    assert weights_digest(other) == weights_digest(model)


def test_amp_with_its_scaler(device, tmp_path):
    model, scaler = a_model(device), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(8, 64, device=device)).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update(1234.0)
    CheckpointManager(tmp_path).save(model, optimizer, step=1, scaler=scaler, async_save=False)
    other, begun = a_model(device), torch.amp.GradScaler("cuda")
    CheckpointManager(tmp_path).load_latest(other, torch.optim.AdamW(other.parameters()), scaler=begun)
    assert (begun.get_scale(), weights_digest(other)) == (1234.0, weights_digest(model))


def test_a_compiled_model(device, tmp_path):
    plain = a_model(device)
    model = torch.compile(plain)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, device)
    CheckpointManager(tmp_path).save(model, optimizer, step=1, async_save=False)
    other = a_model(device)
    CheckpointManager(tmp_path).load_latest(torch.compile(other), torch.optim.AdamW(other.parameters()))
    assert weights_digest(other) == weights_digest(plain)


def test_checks_of_results_do_not_wait_for_the_device(device):
    """Until the backward pass is over, and then once."""
    model = a_model(device)
    machine = RerunStateMachine(RerunSettings(mode="validate_results"), model=model)
    x = torch.randn(8, 64, device=device)
    assert machine.should_run_forward_backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = model(x).pow(2).mean()
        machine.validate_result(loss, rejection_func=torch.isnan, message="loss is NaN")
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not machine.should_run_forward_backward()


PAIR = """
import os, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
root, rank, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
memory = root / f"memory-{rank}"
memory.mkdir(mode=0o700, exist_ok=True)
os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
               "SLURMFT_MEMORY_DIR": str(memory)}
from slurmft.checkpoint import CheckpointManager
from slurmft.trainer.savers import SAVERS
from test_on_gpu import Listener, a_model, trained
SAVERS.listener = listener = Listener()
dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
device = torch.device("cuda", 0)
model = a_model(device)
optimizer = torch.optim.AdamW(model.parameters())
checkpoints = CheckpointManager(root / "checkpoints")
checkpoints.save(model, optimizer, step=0, async_save=False)
for step in (1, 2):
    trained(model, optimizer, device)
    SAVERS.at_boundary(step)
torch.cuda.synchronize()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
threading.Timer(1.0, SAVERS.rescue).start()
def look():
    while listener.rescued != [2]:
        time.sleep(0.01)
    os._exit(0)
threading.Thread(target=look, daemon=True).start()
dist.all_reduce(torch.ones(1 << 20, device=device))
time.sleep(30)
os._exit(1)
"""


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_that_dies_or_stops_in_an_all_reduce_of_cuda_tensors(tmp_path, how):
    """Two ranks on one device, where NCCL allows none: gloo, with tensors on the device."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support"), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", PAIR, str(tmp_path)]
    ranks = [subprocess.Popen([*argv, str(rank), how], env=environment) for rank in range(2)]
    try:
        assert ranks[0].wait(timeout=120) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


ONE_RANK = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from slurmft.checkpoint import CheckpointManager
from slurmft.worker.session import abort_device_groups
from slurmft.worker.session import start_session
from test_on_gpu import a_model, trained
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
session = start_session(backend="nccl")
print(session._groups.timeouts())
assert len(set(session._groups.timeouts().values())) == 1
mesh = init_device_mesh("cuda", (1,))
model = fully_shard(a_model(session.device), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
trained(model, optimizer, session.device)
CheckpointManager(Path(sys.argv[1])).save(model, optimizer, step=1, async_save=False)
other = fully_shard(a_model(session.device), mesh=mesh)
found = CheckpointManager(Path(sys.argv[1])).load_latest(other, torch.optim.AdamW(other.parameters()))
same = all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters()))
assert found.step == 1 and same
assert abort_device_groups()
os._exit(0)
"""


def test_fsdp2_on_nccl_with_a_group_for_the_host_beside_it(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(ONE_RANK), str(tmp_path)], env=environment,
                          capture_output=True, text=True, timeout=200, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
