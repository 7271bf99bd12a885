"""The lab cleans up: after `down`, after crashes, after two commands at once."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.errors import LabError
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.members import processes_named
from slurmft.lab.settings import LabPaths, LabSettings, lab_processes

pytestmark = pytest.mark.slurm
CHECKOUT = Path(cluster.slurmft.__file__).parent.parent


def start_up(folder: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "slurmft", "lab", "--folder", str(folder), "up", "--nodes", "2"]
    return subprocess.Popen(argv, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def on_the_host() -> dict[str, object]:
    def ask(*argv: str) -> str:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    return {
        "links": ask("ip", "-o", "link"),
        "namespaces with a name": ask("ip", "netns", "list"),
        "mounts": Path("/proc/mounts").read_text(),
    }


def namespaces_of(pids) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in pids for kind in ("net", "mnt", "pid", "uts", "ipc")}


def all_namespaces() -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found |= namespaces_of([entry.name])
            except OSError:
                continue
    return found


def processes_that_mention(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in words:
            found.append(words)
    return found


def test_down_leaves_nothing_behind(folder, eventually):
    host, existing = on_the_host(), all_namespaces()
    lab = Lab.up(LabSettings(folder=folder, nodes=2, accounting=True))
    assert on_the_host() == host  # not even while it stands
    lab.run(["sbatch", "--wrap", "setsid sleep 4713 & srun sleep 4714"])
    eventually(lambda: len(processes_named(folder, "n1", "sleep")) == 2)
    argv, environment = lab.command(["setsid", "--fork", "sleep", "4715"])
    subprocess.run(argv, env=environment, check=True)
    lab.kill_node("n2")
    lab.start_node("n2")
    lab.partition("n2")
    made = namespaces_of(lab_processes(folder)) - existing
    assert len(made) >= 4 * 4
    lab.down()
    assert lab_processes(folder) == {}
    assert processes_that_mention(str(folder)) == []
    assert all_namespaces() & made == set()
    assert on_the_host() == host
    assert {path.name for path in folder.iterdir()} == {"home", "log", "slurmft-lab.lock"}


def test_up_recovers_from_a_crash_of_everything(folder, eventually):
    lab = Lab.up(LabSettings(folder=folder, nodes=2))
    argv, environment = lab.command(["setsid", "--fork", "sleep", "4716"])
    subprocess.run(argv, env=environment, check=True)
    eventually(lambda: processes_named(folder, "login", "sleep"))
    for pid in lab_processes(folder):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a namespace's end takes others along
            if Path(f"/proc/{pid}/comm").read_text().strip() != "sleep":
                os.kill(pid, signal.SIGKILL)
    eventually(lambda: set(lab_processes(folder).values()) == {"login"})  # a leftover that holds namespaces
    (folder / "lab.json").write_text('{"format": 1, "torn')
    (folder / "munge/munge.socket").touch()
    lab = Lab.up(LabSettings(folder=folder, nodes=2))
    assert lab.run(["srun", "-N2", "true"]).returncode == 0
    assert not processes_named(folder, "login", "sleep")


@pytest.mark.parametrize("program", ["slurmctld", "slurmd", pytest.param("munged", marks=pytest.mark.soak)])
def test_up_repairs_a_lab_that_lost_a_daemon(folder, program):
    lab = Lab.up(LabSettings(folder=folder, nodes=2))
    member = "n2" if program == "slurmd" else "ctl"
    for pid in processes_named(folder, member, program):
        os.kill(pid, signal.SIGKILL)
    lab = Lab.up(LabSettings(folder=folder, nodes=2))
    assert processes_named(folder, member, program)
    assert lab.run(["srun", "-N2", "true"]).returncode == 0


@pytest.mark.parametrize(
    "moment",
    ["slurmctld", *(pytest.param(each, marks=pytest.mark.soak) for each in ("python3.11", "munged", "slurmd"))],
)
def test_up_recovers_when_its_predecessor_was_killed_halfway(folder, eventually, moment):
    members = ("ctl", "n1")
    name = moment if moment != "python3.11" else Path(sys.executable).resolve().name[:15]
    with start_up(folder) as first:
        while not any(processes_named(folder, member, name) for member in members):
            assert first.poll() is None, first.stdout.read()
        first.kill()
    lab = Lab.up(LabSettings(folder=folder, nodes=2))
    assert lab.run(["srun", "-N2", "true"]).returncode == 0
    assert len(processes_named(folder, "ctl", "slurmctld")) == 1


def test_a_strict_umask_of_the_caller_changes_nothing(folder):
    argv = [sys.executable, "-m", "slurmft", "lab", "--folder", str(folder), "up", "--nodes", "1"]
    subprocess.run(argv, cwd=CHECKOUT, umask=0o077, check=True, capture_output=True, timeout=60)
    job = ["sbatch", "--wait", "--output=out", "--wrap", "sinfo -h -p low -o %N"]
    Lab.standing(folder).run(job)
    assert (folder / "home/out").read_text() == "n1\n"


def test_two_commands_at_once_build_one_lab(folder):
    both = [start_up(folder), start_up(folder)]
    for process in both:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, out
    assert len(processes_named(folder, "ctl", "slurmctld")) == 1
    assert len(processes_named(folder, "n1", "slurmd")) == 1


def test_other_settings_build_another_lab_and_keep_the_home(folder):
    lab = Lab.up(LabSettings(folder=folder, nodes=2))
    lab.run(["touch", "kept"])
    lab = Lab.up(LabSettings(folder=folder, nodes=1, kill_wait_s=9))
    assert lab.node_states() == {"n1": "IDLE"}
    assert "KillWait                = 9 sec" in lab.run(["scontrol", "show", "config"]).stdout
    assert lab.run(["ls"]).stdout.split() == ["kept"]


def test_two_labs_stand_side_by_side(shared_lab, folder):
    lab = Lab.up(LabSettings(folder=folder, nodes=1))
    assert set(lab.node_states()) == {"n1"}
    assert set(shared_lab.node_states()) == {"n1", "n2", "n3"}
    assert lab.run(["srun", "hostname"]).stdout.strip() == "n1"


def test_a_failed_up_names_the_reason_and_leaves_nothing(folder, monkeypatch):
    monkeypatch.setattr("slurmft.lab.settings.CLUSTER", "not a valid name =")
    with pytest.raises(LabError, match="slurmctld"):
        Lab.up(LabSettings(folder=folder, nodes=1))
    assert lab_processes(folder) == {}


def test_a_folder_with_other_things_in_it_is_never_touched(tmp_path_factory, folder):
    folder.mkdir()
    (folder / "precious").touch()
    for attempt in (lambda: Lab.up(LabSettings(folder=folder, nodes=1)), lambda: cluster.purge(folder)):
        with pytest.raises(LabError, match="is not a lab's folder"):
            attempt()
    assert [path.name for path in folder.iterdir()] == ["precious"]
    (folder / "precious").unlink()


def test_a_purge_that_was_interrupted_is_finished_by_the_next_one(folder, monkeypatch):
    for name in ("home", "log", "zz"):
        (folder / name).mkdir(parents=True)
    (folder / "stray").touch()
    LabPaths(folder).lock.touch()
    removed: list[Path] = []
    original = cluster._delete

    def interrupted(path: Path) -> None:
        if len([one for one in removed if one.name in ("home", "log", "zz", "stray")]) == 2:
            raise KeyboardInterrupt
        removed.append(path)
        original(path)

    monkeypatch.setattr(cluster, "_delete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.purge(folder)
    assert folder.exists()
    monkeypatch.undo()
    cluster.purge(folder)
    assert not folder.exists()


def test_commands_inside_the_lab_cannot_take_it_down(shared_lab):
    argv = [sys.executable, "-m", "slurmft", "lab", "--folder", str(shared_lab.folder), "down"]
    done = shared_lab.run_as_admin(argv, check=False, cwd=CHECKOUT)
    assert done.returncode == 1
    assert "this command runs inside the lab, on login" in done.stderr
    argv[-1:] = ["kill-node", "n2"]
    done = shared_lab.run_on_as_admin("n1", argv, check=False, cwd=CHECKOUT)
    assert done.returncode == 1
    assert "this command runs inside the lab, on n1" in done.stderr


def test_a_private_checkout_and_a_private_python_work(folder, tmp_path):
    """Like a continuous integration server: everything below folders of mode 0700 that belong to root."""
    checkout = tmp_path / "work" / "clone"
    checkout.mkdir(parents=True, mode=0o700)
    checkout.parent.chmod(0o700)
    (checkout / "slurmft").symlink_to(CHECKOUT / "slurmft")
    (checkout / "data.txt").write_text("readable")
    lab = Lab.up(LabSettings(folder=folder, nodes=1, expose=(checkout,)))
    assert lab.run(["srun", "cat", str(checkout / "data.txt")]).stdout == "readable"
    assert lab.run(["ls", str(tmp_path / "work")]).stdout.split() == ["clone"]
    assert checkout.stat().st_mode & 0o777 == 0o700
    refused = lab.run_as_admin(["touch", str(checkout / "data.txt")], check=False)
    assert refused.returncode != 0
