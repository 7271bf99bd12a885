"""The example trainers, run for real with a few steps; a stand-in takes the place of the session."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slurmft.examples
from slurmft.examples import byte_gpt

EXAMPLES = Path(slurmft.examples.__path__[0])

REPOSITORY = Path(slurmft.__path__[0]).parent


def test_the_quickstarts_configuration_is_the_same_in_the_package_and_in_configs():
    """Two plain files and no link: archives and copies lose links."""
    assert (REPOSITORY / "configs/quickstart.yaml").read_text() == (EXAMPLES / "quickstart.yaml").read_text()


SESSION = '''
"""A session without a supervisor: stops where it is told to."""
import contextlib, os, sys
import torch, torch.distributed as dist

class Session:
    def __init__(self, checkpoint_dir, stop_at):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.is_lead = torch.device("cpu"), dist.get_rank() == 0
        self.checkpoint_dir, self.stop_at = checkpoint_dir, stop_at

    def steps(self, start, until, save):
        end = min(until, self.stop_at)
        for step in range(start, end):
            yield step
        save(end)
        if end < until:
            dist.destroy_process_group()
            sys.exit(0)

    def evaluating(self, batches):
        return batches

    def micro_batch(self, samples):
        return samples

    def distributed(self, model, rehearsal):
        return model if self.world_size == 1 else settled_ddp(model, rehearsal)

    def report(self, **values):
        assert all(isinstance(value, float) for value in values.values())

@contextlib.contextmanager
def start_session(seed=0):
    dist.init_process_group("gloo", init_method=os.environ["INIT"], rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))
    yield Session(os.environ["CHECKPOINTS"], int(os.environ["STOP_AT"]))
    dist.destroy_process_group()

import slurmft.worker.session
from slurmft.worker.session import settled_ddp

slurmft.worker.session.start_session = start_session
'''

RUNS = '''
"""Fork the ranks of each run from one process that has torch already; print what rank 0 of each run printed."""
import json, os, sys, tempfile
import torch
from slurmft.examples import byte_gpt, plain_ddp

torch.set_num_threads(1)
root = sys.argv[1]

def run(train, ranks, **environment):
    out = tempfile.TemporaryFile("w+", dir=root)
    children = []
    environment["INIT"] = f"file://{tempfile.mktemp(dir=root)}"
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(ranks))
            status = 1
            try:
                if rank == 0:
                    os.dup2(out.fileno(), 1)
                train()
                status = 0
            except SystemExit as error:
                status = error.code or 0
            except BaseException:
                import traceback
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert statuses == [0] * ranks, statuses
    out.seek(0)
    return out.read().splitlines()

TINY = ["--steps", "6", "--channels", "16", "--layers", "2", "--window", "16", "--batch-size", "2",
        "--eval-every", "3", "--eval-batches", "2", "--log-every", "2", "--data", os.path.dirname(byte_gpt.__file__)]

def gpt(ranks, folder, stop_at):
    train = lambda: byte_gpt.train(byte_gpt.parse(TINY))
    return run(train, ranks, CHECKPOINTS=f"{root}/{folder}", STOP_AT=str(stop_at))

def plain(file, steps):
    def train():
        sys.argv = ["plain", "--steps", str(steps), "--save-every", "4", "--checkpoint", f"{root}/{file}"]
        plain_ddp.train(plain_ddp.parse())
    return run(train, 1, MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_RANK="0")

print(json.dumps({
    "whole": gpt(3, "whole", 99),
    "stopped": gpt(3, "parts", 2), "resumed": gpt(3, "parts", 99), "again": gpt(3, "parts", 99),
    "alone": gpt(1, "alone", 99), "alone stopped": gpt(1, "alone parts", 4), "alone resumed": gpt(1, "alone parts", 99),
    "plain": plain("whole.pt", 12), "plain stopped": plain("parts.pt", 8), "plain resumed": plain("parts.pt", 12),
}))
'''


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SESSION + RUNS, str(tmp_path_factory.mktemp("runs"))],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def digest(lines: list[str]) -> str:
    [line] = [line for line in lines if line.startswith("final weights sha256: ")]
    return line.split()[-1]


def test_three_ranks_stopped_and_resumed_end_with_the_same_bits(runs):
    """Three, because the order of a sum shows from three ranks on."""
    assert digest(runs["resumed"]) == digest(runs["whole"])
    assert not any(line.startswith("final") for line in runs["stopped"])


def test_a_finished_run_that_is_started_again_trains_nothing(runs):
    assert digest(runs["again"]) == digest(runs["whole"])
    assert not any("loss" in line for line in runs["again"])


def test_one_rank_stopped_and_resumed_ends_with_the_same_bits(runs):
    assert digest(runs["alone resumed"]) == digest(runs["alone"]) != digest(runs["whole"])


def test_progress_shows_step_loss_and_rate(runs):
    lines = runs["alone"]
    assert any(line.startswith("step      2/6  loss ") and line.endswith("tokens/s") for line in lines)
    assert any("held-out loss" in line for line in lines)
    assert lines[-1] == "finished step 6"


def test_the_plain_script_resumes_by_itself(runs):
    assert "resuming at step 8" in runs["plain resumed"]
    assert digest(runs["plain resumed"]) == digest(runs["plain"])


def test_the_plain_script_knows_nothing_of_slurmft():
    tree = ast.parse((EXAMPLES / "plain_ddp.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("slurmft") for name in imported)


def test_a_batch_in_parts_has_the_gradient_of_the_whole():
    """Up to the order of the sums; dropout is off, which would draw otherwise for each part."""
    torch.manual_seed(0)
    model = byte_gpt.ByteGPT(16, 8, 1, 2, 0.0)
    batch = (torch.randint(256, (6, 16)), torch.randint(256, (6, 16)))
    gradients, losses = [], []
    for micro_batch in (6, 3, 1):
        model.zero_grad()
        losses.append(byte_gpt.backward_in_parts(model, batch, micro_batch, torch.device("cpu")))
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    for loss, gradient in zip(losses, gradients, strict=True):
        assert torch.allclose(loss, losses[0], rtol=1e-5) and torch.allclose(gradient, gradients[0], atol=1e-6)
    assert len({str(gradient.tolist()) for gradient in gradients}) > 1, "bit for bit they differ"
