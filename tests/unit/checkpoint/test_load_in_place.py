"""A load from a rank's own place in memory: verified where it lies, copied once, and never torn."""

from pathlib import Path

import pytest
import torch
from tiny_run import same

from slurmft.checkpoint import CheckpointManager
from slurmft.checkpoint.image_file import is_held
from slurmft.checkpoint.loading import Prepared
from slurmft.checkpoint.reading import MappedImage
from slurmft.errors import CheckpointError

SAVED, OTHER = 1, 2


class KeepsWhatItGets(torch.nn.Linear):
    """Takes the tensors of a state as they are."""

    def _load_from_state_dict(self, state_dict, prefix, *_):
        for name in ("weight", "bias"):
            setattr(self, name, torch.nn.Parameter(state_dict[prefix + name]))


def trained(seed: int, kind: type[torch.nn.Linear] = torch.nn.Linear):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(kind(64, 32), torch.nn.Linear(32, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def tensors(model, optimizer) -> list[torch.Tensor]:
    moments = [value for each in optimizer.state.values() for value in each.values()]
    return [*model.state_dict().values(), *moments]


def values(*objects) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors(*objects)]


@pytest.fixture
def folder(tmp_path, memory) -> Path:
    """Step 1 is on disk and in memory."""
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    checkpoints.save(*trained(SAVED), step=1)
    checkpoints.close()
    return tmp_path / "checkpoints"


@pytest.fixture
def mapped(monkeypatch) -> list[Path]:
    """The images that were mapped."""
    found, begin = list[Path](), MappedImage.__init__

    def noted(self, image, index, size_bytes):
        found.append(image)
        begin(self, image, index, size_bytes)

    monkeypatch.setattr(MappedImage, "__init__", noted)
    return found


def filled(memory: Path) -> Path:
    (index,) = memory.glob("shard-0.*.json")
    return index.with_suffix(".image")


def overwrite(memory: Path) -> None:
    """As the next save into the same place does, but for its index."""
    for image in memory.glob("shard-*.image"):
        with image.open("r+b") as file:
            file.write(b"\xff" * image.stat().st_size)


@pytest.mark.parametrize("kind", [torch.nn.Linear, KeepsWhatItGets])
def test_what_was_loaded_stays_when_its_place_is_filled_anew(folder, memory, mapped, kind):
    objects = trained(OTHER, kind)
    loaded = CheckpointManager(folder).load_latest(*objects)
    assert "memory" in loaded.source and mapped
    overwrite(memory)
    assert same(values(*trained(SAVED)), tensors(*objects))


def test_the_trainers_own_memory_takes_the_values(folder, memory, mapped):
    objects = trained(OTHER)
    before = [tensor.data_ptr() for tensor in tensors(*objects)]
    CheckpointManager(folder).load_latest(*objects)
    assert [tensor.data_ptr() for tensor in tensors(*objects)] == before
    assert mapped and not any(map(is_held, memory.glob("*.image"))), "the next save may have the place"


def test_a_moment_that_is_the_weight_itself_gets_memory_of_its_own(folder, memory):
    model, optimizer = trained(OTHER)
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"] = parameter.detach()
    CheckpointManager(folder).load_latest(model, optimizer)
    assert same(values(*trained(SAVED)), tensors(model, optimizer))


def test_nothing_is_touched_before_all_is_verified(folder, memory, monkeypatch):
    image = filled(memory)
    content = bytearray(image.read_bytes())
    last = torch.stack([each.flatten()[0] for each in values(*trained(SAVED)) if each.numel() > 1])[-1]
    at = content.rindex(last.numpy().tobytes())
    content[at] ^= 1
    image.write_bytes(content)
    objects, seen = trained(OTHER), []
    before, apply = values(*objects), Prepared.apply
    monkeypatch.setattr(Prepared, "apply", lambda self: (seen.append(values(*objects)), apply(self)))
    loaded = CheckpointManager(folder).load_latest(*objects)
    assert "disk" in loaded.source and same(seen[0], before)
    assert same(values(*trained(SAVED)), tensors(*objects))


def test_a_place_that_is_filled_during_the_load_is_never_trained_on(folder, memory, monkeypatch):
    apply = Prepared.apply

    def late(self):
        assert is_held(filled(memory)), "a manager of this node would take another place"
        for index in memory.glob("shard-*.json"):
            index.unlink()
        overwrite(memory)
        apply(self)

    monkeypatch.setattr(Prepared, "apply", late)
    with pytest.raises(CheckpointError, match="was changed while it was loaded"):
        CheckpointManager(folder).load_latest(*trained(OTHER))
    assert not any(map(is_held, memory.glob("*.image")))


@pytest.mark.parametrize("problem", ["held alone", "cut off"])
def test_an_image_that_cannot_be_mapped_is_read(folder, memory, monkeypatch, problem):
    def refuse(*_):
        raise {"held alone": BlockingIOError, "cut off": OSError}[problem]

    monkeypatch.setattr(MappedImage, "__init__", refuse)
    objects = trained(OTHER)
    assert "memory" in CheckpointManager(folder).load_latest(*objects).source
    assert same(values(*trained(SAVED)), tensors(*objects))


class KeepsItsExtraState(torch.nn.Linear):
    """Its extra state is a tensor, which it takes as it is."""

    scale = torch.full((16,), float(SAVED))

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state


def test_a_tensor_that_a_module_takes_as_its_extra_state_stays(memory, tmp_path):
    checkpoints = CheckpointManager(tmp_path / "others")
    checkpoints.save(*trained(SAVED, KeepsItsExtraState), step=1)
    checkpoints.close()
    model, optimizer = trained(OTHER, KeepsItsExtraState)
    assert "memory" in CheckpointManager(tmp_path / "others").load_latest(model, optimizer).source
    overwrite(memory)
    assert model[0].scale.tolist() == [float(SAVED)] * 16


def shared_by_two(model, optimizer) -> None:
    first, second = (optimizer.state[one] for one in (model[0].bias, model[0].bias))
    second["exp_avg_sq"] = first["exp_avg"]


def view_of_another_weight(model, optimizer) -> None:
    optimizer.state[model[0].bias]["exp_avg"] = model[1].weight.detach().view(-1)[3:35]


def view_into_another_moment(model, optimizer) -> None:
    optimizer.state[model[0].bias]["exp_avg"] = optimizer.state[model[1].weight]["exp_avg"].view(-1)[8:40]


@pytest.mark.parametrize("share", [shared_by_two, view_of_another_weight, view_into_another_moment])
def test_moments_that_share_memory_before_a_load_do_not_share_it_after(folder, memory, share):
    """As an optimizer has them that begins with one tensor of zeros for all."""
    objects = trained(OTHER)
    share(*objects)
    CheckpointManager(folder).load_latest(*objects)
    assert same(values(*trained(SAVED)), tensors(*objects))


class BeginsAnew(torch.optim.Adam):
    """Clears its state before it takes another one."""

    def load_state_dict(self, state_dict):
        for each in self.state.values():
            each["exp_avg"].zero_()
        super().load_state_dict(state_dict)


def test_an_optimizer_with_a_load_of_its_own_gets_tensors_of_their_own(folder, memory):
    model, optimizer = trained(OTHER)
    own = BeginsAnew(model.parameters(), lr=0.1)
    own.load_state_dict(optimizer.state_dict())
    CheckpointManager(folder).load_latest(model, own)
    assert same(values(*trained(SAVED)), tensors(model, own))
