"""``slurmft checkpoint``, as one types it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import stored_state
import torch
from click.testing import CliRunner, Result

from slurmft.checkpoint.image_file import image_file, index_file, reading
from slurmft.checkpoint.state import Trainee
from slurmft.cli.checkpoint import checkpoint
from slurmft.cli.control import inject
from slurmft.config import run as configuration
from slurmft.errors import CheckpointError, StorageError, UsageError
from slurmft.storage.checkpoint_names import MANIFEST, Identity, Quarantine, write_quarantine
from slurmft.storage.run_folder import Owner, RunFolder

LOSSES = {1: 0.5, 2: 0.1, 3: float("nan"), 4: 0.7}


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return Trainee(model, optimizer)


@pytest.fixture(scope="module")
def template(tmp_path_factory, trainee) -> Path:
    """A run with steps 1 to 4, saved by two ranks; step 2 is the best."""
    run = RunFolder(tmp_path_factory.mktemp("runs") / "a run's folder")
    run.create()
    run.config.write_text("")
    for step, loss in LOSSES.items():
        stored_state.publish(
            run.path / "checkpoints", Identity(step, 1, step), trainee, metrics={"loss": loss}, ranks=2
        )
    return run.path


@pytest.fixture
def run(tmp_path, template) -> RunFolder:
    shutil.copytree(template, tmp_path / template.name)
    run = RunFolder(tmp_path / template.name)
    settings = configuration.validate({"command": "x", "run_folder": str(run.path)}, source="test")
    run.config.write_text(settings.as_yaml())
    return run


def typed(*words: object, command=checkpoint) -> Result:
    return CliRunner(env={"COLUMNS": "600"}).invoke(command, [str(word) for word in words], standalone_mode=False)


def said(*words: object) -> str:
    result = typed(*words)
    assert result.exception is None, result.exception
    return result.stdout


def folder(run: RunFolder, step: int) -> Path:
    return run.path / "checkpoints" / f"step-{step:08d}.g1.c{step}"


def steps(run: RunFolder) -> list[int]:
    return sorted(int(path.name[5:13]) for path in (run.path / "checkpoints").iterdir())


def test_the_list_shows_what_is_there(run):
    (folder(run, 3) / MANIFEST).write_text("{")
    (folder(run, 4) / MANIFEST).unlink()
    write_quarantine(folder(run, 1), Quarantine(reason="runs die"))
    table = said("list", run.path)
    assert [line.split()[0] for line in table.splitlines()] == ["step", "2", "1", "3", "4"]
    for words in ("loss=0.1", "newest, best", "quarantined: runs die", "is not JSON", "never finished"):
        assert words in " ".join(table.split())
    value = json.loads(said("list", run.path, "--json"))
    assert value["format"] == 1 and [one["best"] for one in value["checkpoints"]] == [True, False]
    assert [len(value[name]) for name in ("unreadable", "uncommitted")] == [1, 1]


def test_a_directory_or_one_folder_can_be_named_too(run, tmp_path):
    directory = run.path / "checkpoints"
    assert said("list", directory) == said("list", run.path)
    assert len(said("list", folder(run, 2)).splitlines()) == 2
    moved = directory.rename(tmp_path / "elsewhere")
    assert len(said("list", moved).splitlines()) == 5
    assert "there is no checkpoint" in said("list", run.path)


@pytest.mark.parametrize("name", ["", "nonsense", "/dev/null"], ids=["empty", "unknown", "no-folder"])
def test_what_is_no_run_is_said(name):
    assert isinstance(typed("list", name).exception, UsageError)


def test_intact_checkpoints_are_verified(run):
    result = typed("verify", run.path)
    assert (result.exception, result.return_value) == (None, 0)
    assert result.stdout.count(": intact (") == 4
    assert said("verify", run.path, "--newest").count("\n") == 1
    assert "step-00000002" in said("verify", run.path, "--step", 2)


@pytest.mark.parametrize("name", [image_file(0), image_file(1), index_file(1), ".metadata"])
def test_a_flipped_byte_anywhere_is_named(run, name):
    path = folder(run, 3) / name
    whole = path.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        result = typed("verify", run.path, "--json")
        assert result.return_value == 1
        found = {one["step"]: one["problems"] for one in json.loads(result.stdout)["checkpoints"]}
        assert found.pop(3)[0].startswith(f"{name} has the wrong checksum") and not any(found.values())


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        pytest.param(lambda path: path.unlink(), "is missing", id="missing"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes() + b"x"), "has the wrong size", id="longer"),
        pytest.param(lambda path: (path.unlink(), path.mkdir()), "__1_0.", id="folder"),
        pytest.param(lambda path: (path.unlink(), os.mkfifo(path)), "has the wrong size", id="pipe"),
    ],
)
def test_what_else_can_be_wrong_with_an_image(run, harm, words):
    harm(folder(run, 4) / image_file(1))
    result = typed("verify", run.path, "--newest")
    assert result.return_value == 1 and words in result.stdout and "damaged, 1 problem(s)" in result.stdout


def test_verifying_the_newest_tells_of_a_newer_one_whose_marker_is_torn(run):
    (folder(run, 4) / MANIFEST).write_text('{"format": 1, "ste')
    result = typed("verify", run.path, "--newest")
    assert result.return_value == CheckpointError.exit_code
    told = result.stdout.splitlines()
    assert len(told) == 2 and told[0].startswith(f"{folder(run, 3).name}: intact")
    assert told[1].startswith(f"{folder(run, 4).name}: damaged: ")
    (folder(run, 2) / MANIFEST).write_text("")  # older than the newest good one
    found = json.loads(typed("verify", run.path, "--newest", "--json").stdout)
    assert [one["step"] for one in found["checkpoints"]] == [3]
    assert [Path(one["path"]).name for one in found["unreadable"]] == [folder(run, 4).name]


def test_verifying_a_step_tells_of_its_torn_marker(run):
    (folder(run, 4) / MANIFEST).write_text("")
    result = typed("verify", run.path, "--step", 4)
    assert result.return_value == CheckpointError.exit_code and result.stdout.startswith(folder(run, 4).name)
    assert typed("verify", run.path, "--step", 3).return_value == 0


def test_verifying_the_newest_tells_of_torn_markers_alone(run):
    for step in LOSSES:
        (folder(run, step) / MANIFEST).write_text("")
    result = typed("verify", run.path, "--newest")
    assert result.return_value == CheckpointError.exit_code and result.stdout.count(": damaged: ") == 4


def test_a_marker_that_cannot_be_read_is_damage(run):
    (folder(run, 4) / MANIFEST).write_text("{")
    result = typed("verify", run.path)
    assert result.return_value == 1 and "step-00000004.g1.c4: damaged: " in result.stdout


def test_a_checkpoint_becomes_one_file_of_torch(run, trainee, tmp_path):
    said("export", run.path, tmp_path / "a.pt", "--optimizer")
    whole = torch.load(tmp_path / "a.pt", weights_only=True)
    assert whole["step"] == 4 and whole["metrics"] == {"loss": 0.7}
    assert torch.equal(whole["model"]["weight"], trainee.model.weight)
    state = trainee.optimizer.state_dict()["state"]
    assert torch.equal(whole["optimizer"]["state"]["bias"]["exp_avg"], state[1]["exp_avg"])
    assert whole["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert isinstance(typed("export", run.path, tmp_path / "a.pt").exception, UsageError)
    said("export", run.path, tmp_path / "a.pt", "--overwrite", "--best")
    whole = torch.load(tmp_path / "a.pt", weights_only=True)
    assert whole["step"] == 2 and "optimizer" not in whole


def test_a_checkpoint_becomes_safetensors(run, trainee, tmp_path):
    out = tmp_path / "a.safetensors"
    said("export", run.path, out, "--format", "safetensors", "--step", 3, "--optimizer")
    tensors = safetensors.torch.load_file(out)
    assert torch.equal(tensors["weight"], trainee.model.weight)
    assert "optimizer.state.bias.exp_avg" in tensors
    with safetensors.safe_open(out, "pt") as file:
        told = json.loads(file.metadata()["slurmft"])
    assert told["step"] == 3 and told["values"]["optimizer.param_groups.0.params"] == ["weight", "bias"]


def test_without_safetensors_it_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result = typed("export", run.path, tmp_path / "a", "--format", "safetensors")
    assert isinstance(result.exception, UsageError) and "pip install safetensors" in str(result.exception)
    assert not (tmp_path / "a").exists()


def test_a_damaged_one_is_not_exported(run, tmp_path):
    path = folder(run, 4) / image_file(0)
    path.write_bytes(bytes(path.stat().st_size))
    result = typed("export", run.path, tmp_path / "a.pt")
    assert isinstance(result.exception, CheckpointError) and "__0_0.distcp has the wrong checksum" in str(
        result.exception
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == [run.path.name]


def test_old_ones_are_removed_and_the_journal_tells(run):
    said("rm", run.path, 1)
    assert steps(run) == [2, 3, 4]
    (event,) = run.journal().read()
    assert event.event == "checkpoints removed" and event.details["folders"] == ["step-00000001.g1.c1"]


@pytest.mark.parametrize(
    ("step", "why"),
    [(2, "is the best one"), (3, "one of the newest 2"), (4, "one of the newest 2"), (7, "no checkpoint of step 7")],
    ids=["best", "second", "newest", "absent"],
)
def test_some_are_not_removed_without_force(run, step, why):
    result = typed("rm", run.path, step)
    assert isinstance(result.exception, UsageError) and why in str(result.exception)
    assert steps(run) == [1, 2, 3, 4] and not run.journal().read()
    if step != 7:
        said("rm", run.path, step, "--force")
        assert step not in steps(run)


def test_the_last_good_one_is_never_removed(run):
    assert "last good" in str(typed("rm", run.path, 1, 2, 3, 4, "--force").exception)
    for step in (1, 2):  # what stays is damaged, or quarantined
        path = folder(run, step) / image_file(0)
        path.write_bytes(bytes(path.stat().st_size))
    write_quarantine(folder(run, 3), Quarantine(reason="runs die"))
    result = typed("rm", run.path, 4, "--force")
    assert isinstance(result.exception, UsageError) and "last good" in str(result.exception)
    assert steps(run) == [1, 2, 3, 4]
    said("rm", run.path, 1, 3)
    assert steps(run) == [2, 4]


def test_one_that_is_being_read_stays(run):
    with reading(folder(run, 1)):
        assert typed("rm", run.path, 1).return_value == StorageError.exit_code
    assert steps(run) == [1, 2, 3, 4]


def test_a_broken_marker_can_be_removed(run):
    (folder(run, 1) / MANIFEST).write_text("{")
    said("rm", run.path, 1)
    assert steps(run) == [2, 3, 4]


def test_inject_damages_a_part_that_verify_finds(run):
    result = CliRunner().invoke(
        inject, [str(run.path), "corrupt-newest-checkpoint", "--rank", "1"], standalone_mode=False
    )
    assert result.exception is None
    found = typed("verify", run.path)
    assert found.return_value == 1 and "__1_0.distcp has the wrong checksum" in found.stdout
    result = CliRunner().invoke(
        inject, [str(run.path), "corrupt-newest-checkpoint", "--rank", "2"], standalone_mode=False
    )
    assert "has no __2_0.distcp" in str(result.exception)


def test_list_verify_and_rm_do_without_torch(run):
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from slurmft.cli.checkpoint import checkpoint\n"
        "for words in (['list'], ['verify'], ['rm', '1']):\n"
        "    assert not checkpoint.main([words[0], sys.argv[1], *words[1:]], standalone_mode=False)\n"
    )
    result = subprocess.run([sys.executable, "-c", script, str(run.path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# copied and moved folders


@pytest.fixture
def copy(run) -> RunFolder:
    """A copy whose configuration still names the original."""
    return RunFolder(Path(shutil.copytree(run.path, run.path.with_name("copy"))))


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-00000001.g1.c1"])
def test_rm_of_a_copy_leaves_the_original_alone(run, copy, name):
    said("rm", copy.path / name, 1)
    assert (steps(run), steps(copy)) == ([1, 2, 3, 4], [2, 3, 4])


def test_list_and_export_of_a_copy_or_a_moved_run_show_that_one(run, copy, tmp_path):
    said("rm", run.path, 1)
    assert json.loads(said("list", copy.path, "--json"))["directory"] == str(copy.path / "checkpoints")
    moved = RunFolder(copy.path.rename(tmp_path / "moved"))
    shutil.rmtree(run.path)
    assert len(json.loads(said("list", moved.path, "--json"))["checkpoints"]) == 4
    said("rm", moved.path, 1)
    assert steps(moved) == [2, 3, 4]


def test_a_fault_in_a_copy_is_not_the_originals(run, copy):
    before = (folder(run, 4) / image_file(0)).read_bytes()
    result = typed(copy.path, "corrupt-newest-checkpoint", command=inject)
    assert result.exception is None, result.exception
    assert (folder(run, 4) / image_file(0)).read_bytes() == before != (folder(copy, 4) / image_file(0)).read_bytes()


@pytest.fixture
def shared(run, tmp_path) -> Path:
    """A directory outside of the run's folder, which its configuration names."""
    directory = (run.path / "checkpoints").rename(tmp_path / "shared")
    settings = configuration.load(run.config, [f"checkpoint.directory={directory}"])
    run.config.write_text(settings.as_yaml())
    return directory


@pytest.mark.parametrize("words", [["rm", "1"], ["corrupt-newest-checkpoint"]])
def test_a_directory_that_a_copy_shares_with_its_original_is_not_changed_for_the_copy(run, shared, copy, words):
    before = {path: path.stat().st_mtime_ns for path in shared.rglob("*")}
    if words[0] == "rm":
        result = typed("rm", copy.path, 1)
        assert len(json.loads(said("list", copy.path, "--json"))["checkpoints"]) == 4, "to read it is fine"
    else:
        result = typed(copy.path, *words, command=inject)
    assert isinstance(result.exception, UsageError) and "is a copy of" in str(result.exception)
    assert before == {path: path.stat().st_mtime_ns for path in shared.rglob("*")}
    said("rm", run.path, 1)
    assert len(list(shared.iterdir())) == 3


def test_a_link_into_the_original_is_not_followed_by_rm_of_the_copy(run, copy):
    shutil.rmtree(copy.path / "checkpoints")
    (copy.path / "checkpoints").symlink_to(run.path / "checkpoints")
    assert "is a copy of" in str(typed("rm", copy.path, 1).exception)
    (copy.path / "other").symlink_to(run.path / "checkpoints")
    named = [path for path in (run.path / "checkpoints").iterdir() if path.name.startswith("step-00000001.")]
    for way in ("checkpoints", "other", f"checkpoints/{named[0].name}", f"other/{named[0].name}"):
        assert "is a copy of" in str(typed("rm", copy.path / way, 1).exception), way
    assert steps(run) == [1, 2, 3, 4]


def test_a_copy_is_a_copy_also_when_its_original_was_moved(run, shared, tmp_path):
    shutil.copytree(run.path, tmp_path / "copy")
    run.path.rename(tmp_path / "moved")
    result = typed("rm", tmp_path / "copy", 1)
    assert isinstance(result.exception, UsageError) and "copy of its original" in str(result.exception)
    assert len(list(shared.iterdir())) == 4


def test_a_moved_runs_own_directory_outside_stays_its_own(run, shared, tmp_path):
    run.take_over(Owner(job="7", restart=0, generation=1, cluster="slurm", host="n1", pid=1, birth="",
                        folder=str(run.path), inode=run.path.stat().st_ino))  # fmt: skip
    moved = RunFolder(run.path.rename(tmp_path / "moved"))
    said("rm", moved.path, 1)
    assert len(list(shared.iterdir())) == 3


# other users


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's files")
@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-00000001.g1.c1"])
def test_checkpoints_of_another_user_are_read_and_never_removed(run, name):
    for path in (run.path, run.path / "checkpoints"):
        os.chown(path, 4712, 4712)
    assert json.loads(said("list", run.path / name, "--json"))["checkpoints"]
    refused = typed("rm", run.path / name, 1).exception
    assert isinstance(refused, UsageError) and "belongs to user id 4712, not to you" in str(refused)
    assert steps(run) == [1, 2, 3, 4]
