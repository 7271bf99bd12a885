"""A backward pass before the first step, which leaves no trace."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slurmft.worker.session import settle_order_of_gradients


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def inner() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))


def test_weights_buffers_and_gradients_are_what_they_were():
    model = inner()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settle_order_of_gradients(DistributedDataParallel(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters()) and "forward" not in vars(model)


def test_an_optimizer_in_the_backward_pass_takes_no_step():
    model = inner()
    before = [one.detach().clone() for one in model.parameters()]
    for one in model.parameters():
        optimizer = torch.optim.AdamW([one], lr=0.1, weight_decay=0.5)
        one.register_post_accumulate_grad_hook(lambda _one, optimizer=optimizer: optimizer.step())
    settle_order_of_gradients(DistributedDataParallel(model))
    assert all(map(torch.equal, model.parameters(), before))


def test_hooks_of_the_user_are_not_called_without_a_batch():
    model, batches = inner(), []
    model.register_forward_pre_hook(lambda _model, arguments: batches.append(arguments[0]))
    settle_order_of_gradients(DistributedDataParallel(model))
    assert batches == []
