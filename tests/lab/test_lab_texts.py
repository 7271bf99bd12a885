"""The pure parts of the lab: settings, configuration text, argv, marks. Run everywhere."""

from pathlib import Path

import pytest

from slurmft.errors import UsageError
from slurmft.lab import members
from slurmft.lab.members import Member, enter_argv, mounts_of, unshare_argv
from slurmft.lab.settings import (
    LabPaths,
    LabSettings,
    default_folder,
    gres_conf_text,
    hosts_text,
    mark_source,
    member_of,
    slurm_conf_text,
    slurmdbd_conf_text,
)

FOLDER = Path("/var/lib/some-lab")


def conf(**values) -> dict[str, str]:
    lines = slurm_conf_text(LabSettings(folder=FOLDER, **values)).splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith(("NodeName", "PartitionName")))


def test_the_times_of_the_settings_reach_slurm_conf():
    found = conf(kill_wait_s=3, slurmd_timeout_s=7)
    assert (found["KillWait"], found["SlurmdTimeout"]) == ("3", "7")


def test_every_node_has_an_address_and_the_claimed_cpus():
    settings = LabSettings(folder=FOLDER, nodes=2, cpus=16)
    lines = [line for line in slurm_conf_text(settings).splitlines() if line.startswith("NodeName")]
    assert [line.split()[:3] for line in lines] == [
        ["NodeName=n1", "NodeAddr=10.213.0.11", "CPUs=16"],
        ["NodeName=n2", "NodeAddr=10.213.0.12", "CPUs=16"],
    ]
    assert "10.213.0.12 n2" in hosts_text(settings).splitlines()


def test_nodes_have_their_names_and_more_lines_come_last():
    settings = LabSettings(folder=FOLDER, nodes=2, names=("gpu01", "x1000c0s0b0n0"), lines=("PrivateData=jobs",))
    text = slurm_conf_text(settings)
    assert "NodeName=x1000c0s0b0n0 NodeAddr=10.213.0.12 " in text
    assert text.endswith("\nPrivateData=jobs\n")
    assert "10.213.0.11 gpu01" in hosts_text(settings).splitlines()


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ("low", {"Default=YES", "PreemptMode=REQUEUE", "GraceTime=9", "PriorityTier=1"}),
        ("nograce", {"PreemptMode=REQUEUE", "GraceTime=0", "PriorityTier=1"}),
        ("cancel", {"PreemptMode=CANCEL", "GraceTime=9", "PriorityTier=1"}),
        ("high", {"PreemptMode=OFF", "PriorityTier=10"}),
    ],
)
def test_partition(partition, words):
    lines = slurm_conf_text(LabSettings(folder=FOLDER, grace_s=9)).splitlines()
    assert not any("gpu" in line.lower() for line in lines)
    (line,) = [line for line in lines if line.startswith(f"PartitionName={partition} ")]
    assert words <= set(line.split())


def test_jobs_never_reach_the_hosts_munged():
    assert conf()["AuthInfo"] == f"socket={FOLDER}/munge/munge.socket"
    assert conf(accounting=True)["AccountingStoragePass"] == f"{FOLDER}/munge/munge.socket"


def test_accounting_is_off_unless_asked_for():
    assert conf()["AccountingStorageType"] == "accounting_storage/none"
    assert conf(accounting=True)["AccountingStorageType"] == "accounting_storage/slurmdbd"


def test_slurmdbd_conf_carries_the_password():
    assert "StoragePass=secret" in slurmdbd_conf_text(LabSettings(folder=FOLDER), "secret").splitlines()


def test_settings_survive_json():
    settings = LabSettings(folder=FOLDER, nodes=2, accounting=True, expose=(Path("/opt/x"),), names=("a", "b"),
                           lines=("PrivateData=jobs",), files=(Path("/opt/job_submit.lua"),))  # fmt: skip
    assert LabSettings.from_json(settings.as_json() | {"from_the_future": 1}) == settings


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": 0},
        {"nodes": 65},
        {"cpus": 0},
        {"kill_wait_s": 0},
        {"slurmd_timeout_s": 1},
        {"grace_s": -1},
        {"folder": Path("relative/lab")},
        {"folder": Path("/")},
        {"folder": Path("/home")},
        {"folder": Path("/var/lib/with blank")},
        {"folder": Path("/var/lib/../lab")},
        {"folder": Path("/var/" + "x" * 80)},
        {"nodes": 2, "names": ("gpu01",)},
        {"nodes": 2, "names": ("gpu01", "gpu01")},
        {"nodes": 1, "names": ("ctl",)},
        {"nodes": 1, "names": ("longer-than-a-link",)},
        {"nodes": 1, "names": ("a b",)},
        {"lines": ("A=1\nB=2",)},
        {"files": (Path("job_submit.lua"),)},
    ],
    ids=str,
)
def test_senseless_settings_are_refused(values):
    with pytest.raises(UsageError):
        LabSettings(**{"folder": FOLDER, **values})


def test_all_senseless_settings_are_named_at_once():
    with pytest.raises(UsageError, match=r"nodes=0 .*cpus=0 "):
        LabSettings(folder=FOLDER, nodes=0, cpus=0)


def test_the_folder_can_come_from_the_environment():
    assert default_folder({}) == Path("/var/lib/slurmft-lab")
    assert default_folder({"SLURMFT_LAB_FOLDER": "/srv/lab"}) == Path("/srv/lab")


def test_the_mark_is_the_first_mount_of_a_member():
    mounts = mounts_of("n1", LabPaths(FOLDER), [])
    assert (mounts[0].kind, mounts[0].source, mounts[0].target) == (
        "tmpfs",
        "slurmft-lab:/var/lib/some-lab:n1",
        f"{FOLDER}/mark",
    )
    assert {mount.target for mount in mounts} >= {"/etc/hosts", "/dev/shm"}


@pytest.mark.parametrize(
    ("line", "member"),
    [
        ("30 29 0:40 / /var/lib/some-lab/mark rw,nosuid - tmpfs slurmft-lab:/var/lib/some-lab:n2 rw", "n2"),
        ("30 29 0:40 / /m rw shared:1 master:2 - tmpfs slurmft-lab:/var/lib/some-lab:ctl rw", "ctl"),
        ("30 29 0:40 / /m rw - tmpfs slurmft-lab:/var/lib/some-lab-2:n2 rw", None),
        ("30 29 0:40 / /m rw - tmpfs tmpfs rw", None),
        ("30 29 0:40 / /slurmft-lab:/var/lib/some-lab:n2 rw - ext4 /dev/vda rw", None),
        ("", None),
    ],
    ids=["node", "optional-fields", "another-lab", "stranger", "look-alike-path", "empty"],
)
def test_a_process_belongs_to_the_lab_whose_mark_it_carries(line, member):
    assert member_of(line, FOLDER) == member


def test_mark_source_round_trip():
    assert member_of(f"1 2 0:1 / /x rw - tmpfs {mark_source(FOLDER, 'login')} rw", FOLDER) == "login"


def test_a_node_gets_every_namespace_and_login_shares_the_controllers_network():
    assert {"--net", "--mount", "--uts", "--ipc", "--pid"} <= set(unshare_argv("n1", None))
    login = unshare_argv("login", Member("ctl", 77))
    assert login[:2] == ["nsenter", "--net=/proc/77/ns/net"]
    assert not {"--net", "--pid"} & set(login[2:])


def test_entering_login_needs_no_fork_so_that_signals_and_exit_codes_pass():
    assert "--pid" not in enter_argv(Member("login", 5))
    assert "--pid" in enter_argv(Member("n1", 5))


@pytest.mark.parametrize(
    ("files", "is_forgiving"),
    [((), False), (("clustername",), True), (("clustername", "assoc_usage"), False)],
    ids=["first start", "crashed within five minutes", "later"],
)
def test_a_controller_that_crashed_young_starts_without_the_file_it_never_wrote(
    tmp_path, monkeypatch, files, is_forgiving
):
    paths, started = LabPaths(tmp_path), list[list[str]]()
    paths.state.mkdir(parents=True)
    for name in files:
        (paths.state / name).touch()
    monkeypatch.setattr(members, "run_inside", lambda member, paths, argv, **_: started.append(argv))
    monkeypatch.setattr(members, "answers", lambda controller, paths: True)
    members.start_slurmctld(Member("ctl", 1), paths)
    assert ("-i" in started[0]) == is_forgiving


def test_gpus_of_the_nodes_are_files():
    settings = LabSettings(folder=FOLDER, nodes=2, gpus=4)
    lines = slurm_conf_text(settings).splitlines()
    assert "GresTypes=gpu" in lines
    assert sum(" Gres=gpu:4 " in line for line in lines if line.startswith("NodeName=")) == 2
    assert gres_conf_text(settings) == f"Name=gpu File={FOLDER}/gpus/[0-3]\n"
