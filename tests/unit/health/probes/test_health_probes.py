"""Probes on recorded, awkward trees: looking and judging of host, memory, disks, filesystems and network."""

import fcntl
import math
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from waiting import slowness, until

from slurmft.config.health import (
    DiskLimits,
    FilesystemLimits,
    HealthConfig,
    HostLimits,
    MemoryLimits,
    NetworkLimits,
)
from slurmft.health import gpu, node, probes
from slurmft.health.checker import CONTEXTS, look
from slurmft.health.node import Mount, Scene, mounts
from slurmft.health.probes import PROBES, Link, Port, judge_mounts, judge_space, written_and_read
from slurmft.policy.node_health import Status
from slurmft.system.processes import Answer

OK, WARNING, CRITICAL, UNKNOWN = Status

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


@pytest.fixture
def tree(tmp_path):
    """Makes a scene whose roots hold these files; a key is a path below the root."""

    def make(files: dict[str, str], **settings) -> Scene:
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Scene(node="n1", now=time.time(), root=tmp_path / "root", environment={"PATH": str(tmp_path)},
                     config=HealthConfig(**settings))  # fmt: skip

    return make


STAT = "cpu  1 2 3\ncpu0 1 2\ncpu1 1 2\nintr 5\n"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("0.5 1.0 1.0 1/100 5\n", OK),
        ("99 8.0 1 1/100 5\n", WARNING),
        ("0.5 7.9 1.0 1/100 5\n", OK),
        ("", UNKNOWN),
        ("a b c", UNKNOWN),
        ("1", UNKNOWN),
        ("1 nan 1", UNKNOWN),
        ("1 inf 1", WARNING),
    ],
    ids=["idle", "busy", "nearly", "missing", "no numbers", "half", "nan", "inf"],
)
def test_load(tree, text, status):
    assert probes.load(tree({"proc/loadavg": text, "proc/stat": STAT})).status is status


def process_tree(*states: str) -> dict[str, str]:
    return {f"proc/{10 + number}/stat": f"{10 + number} (a (b) c) {state} 1 1 1" for number, state in enumerate(states)}


@pytest.mark.parametrize(
    ("states", "status"),
    [("SSR", OK), ("D" * 8, WARNING), ("D" * 7 + "S", OK), ("Z" * 100, WARNING), ("Z" * 99, OK)],
    ids=["well", "stuck", "nearly stuck", "zombies", "nearly zombies"],
)
def test_processes(tree, states, status):
    assert probes.processes(tree(process_tree(*states))).status is status


def test_no_proc_is_no_word_about_the_processes(tree):
    assert probes.processes(tree({})).status is UNKNOWN


def test_the_stuck_ones_are_named_with_what_they_wait_for(tree):
    found = probes.processes(tree(process_tree(*"D" * 8) | {"proc/10/wchan": "nfs_wait_bit_killable"}))
    assert "10 a (b) c nfs_wait_bit_killable" in found.evidence
    assert found.remedy


@pytest.mark.parametrize(
    ("up_s", "limits", "status"),
    [
        (100, HostLimits(), OK),
        (100, HostLimits(min_uptime_s=300), WARNING),
        (10 * 86_400, HostLimits(max_uptime_days=10), WARNING),
        (9 * 86_400, HostLimits(max_uptime_days=10), OK),
    ],
    ids=["no limit", "just booted", "old", "nearly old"],
)
def test_uptime(up_s, limits, status):
    assert probes.judge_uptime(up_s, limits).status is status


@pytest.mark.parametrize(
    ("offset", "limits", "status"),
    [
        (0.0, HostLimits(), OK),
        (-0.2, HostLimits(), WARNING),
        (-61.0, HostLimits(), CRITICAL),
        (None, HostLimits(), OK),
        (None, HostLimits(clock_must_be_disciplined=True), WARNING),
        (float("nan"), HostLimits(), OK),
    ],
    ids=["right", "off", "far off", "not known", "must be known", "nan"],
)
def test_clock(offset, limits, status):
    assert probes.judge_clock(offset, limits).status is status


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("A29FC87B,time.example.org,3,1700000000.1,-0.000123,0.1,0.1,-1,0.1,0.1,0.01,0.001,64.2,Normal\n", -0.000123),
        ("00000000,,0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,1.0,1.0,0.0,Not synchronised\n", None),
        ("506 Cannot talk to daemon\n", None),
        ("a,b,c,d,e,f,g,h,i,j,k,l,m,n", None),
        ("", None),
    ],
    ids=["synchronised", "not synchronised", "no daemon", "no numbers", "nothing"],
)  # fmt: skip
def test_chrony(text, offset):
    assert probes.parse_chrony(text) == offset


MEMINFO = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    {} kB\n"
PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60={} avg300=0.00 total=0\n"


@pytest.mark.parametrize(
    ("available", "pressure", "status"),
    [(500, "0.00", OK), (20, "0.00", WARNING), (500, "20.00", WARNING), (0, "99.99", WARNING), (500, "x", OK)],
    ids=["well", "full", "pressure", "a job uses all", "no psi"],
)
def test_memory(tree, available, pressure, status):
    files = {"proc/meminfo": MEMINFO.format(available), "proc/pressure/memory": PRESSURE.format(pressure)}
    assert probes.memory(tree(files)).status is status


@pytest.mark.parametrize("text", ["", "MemTotal: 0 kB\nMemAvailable: 0 kB", "MemTotal: 5 kB"],
                         ids=["missing", "none", "half"])  # fmt: skip
def test_memory_that_cannot_be_read(tree, text):
    assert probes.memory(tree({"proc/meminfo": text})).status is UNKNOWN


def test_memory_below_the_critical_limit():
    assert probes.judge_memory(0.001, None, MemoryLimits(available_critical=0.01)).status is CRITICAL


def controller(number: int, ce: str, ue: str) -> dict[str, str]:
    folder = f"sys/devices/system/edac/mc/mc{number}"
    return {f"{folder}/ce_count": ce, f"{folder}/ue_count": ue}


@pytest.mark.parametrize(
    ("files", "status"),
    [
        (controller(0, "0\n", "0\n"), OK),
        (controller(0, "0\n", "0\n") | controller(1, "0", "1"), CRITICAL),
        (controller(0, "999", "0"), OK),
        (controller(0, "500", "0") | controller(1, "500", "0"), WARNING),
        (controller(0, "x", "0"), UNKNOWN),
        ({"sys/devices/system/edac/mc/mc0/ce_count": "0"}, UNKNOWN),
    ],
    ids=["none", "uncorrected", "few corrected", "many corrected", "no number", "half"],
)
def test_ecc_errors(tree, files, status):
    assert probes.edac(tree(files)).status is status


def test_a_machine_without_edac_is_not_asked(tree):
    assert probes.edac(tree({})) is None


@pytest.mark.parametrize(
    ("space", "inodes", "status"),
    [(0.5, 0.5, OK), (0.04, 0.5, WARNING), (0.5, 0.04, WARNING), (0.005, 0.5, CRITICAL), (0.5, 0.005, CRITICAL),
     (0.0, 0.0, CRITICAL), (float("nan"), 0.5, UNKNOWN)],
    ids=["well", "little space", "few inodes", "no space", "no inodes", "nothing", "nan"],
)  # fmt: skip
def test_space_and_inodes(space, inodes, status):
    assert judge_space("/tmp", space, inodes, 1 << 30, DiskLimits()).status is status


MOUNTINFO = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw,nosuid shared:2 - proc proc rw
30 22 8:1 / /boot ro,relatime shared:5 - ext4 /dev/sda1 ro
31 22 7:1 / /snap/core ro,nodev shared:6 - squashfs /dev/loop1 ro
32 22 8:17 / /data\040disk rw,relatime shared:7 - xfs /dev/sdb1 {}
33 22 0:50 / /home rw shared:8 - nfs4 server:/home rw,vers=4.2
34 22 0:50 / /home2 rw shared:8 - nfs4 server:/home rw,vers=4.2
35 22 0:51 / /scratch rw master:9 propagate_from:2 - lustre 10.0.0.1@o2ib:/scratch rw
damaged
"""


def test_a_filesystem_that_the_kernel_made_read_only(tree):
    assert probes.read_only(tree({"proc/self/mountinfo": MOUNTINFO.format("rw")})).status is OK
    found = probes.read_only(tree({"proc/self/mountinfo": MOUNTINFO.format("ro")}))
    assert (found.status, found.evidence) == (CRITICAL, ("/dev/sdb1 on /data disk",))
    assert probes.read_only(tree({"proc/self/mountinfo": ""})).status is UNKNOWN


def test_a_folder_that_must_be_writable_and_is_not():
    mount = Mount(point=Path("/tmp"), kind="tmpfs", source="tmpfs", mount_options=frozenset({"ro"}),
                  super_options=frozenset({"rw"}))  # fmt: skip
    assert judge_mounts([mount], DiskLimits()).status is CRITICAL
    over = Mount(point=Path("/tmp"), kind="tmpfs", source="new", mount_options=frozenset({"rw"}),
                 super_options=frozenset({"rw"}))  # fmt: skip
    assert judge_mounts([mount, over], DiskLimits()).status is OK


def test_what_is_written_comes_back_and_nothing_stays(tmp_path):
    odd = tmp_path / "a 'b'\nc"
    odd.mkdir()
    assert written_and_read(odd, 300_000, name="x").status is OK
    assert list(odd.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a small filesystem")
def test_a_full_disk_is_critical(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], check=True)
    try:
        found = written_and_read(tmp_path, 1 << 20, name="x")
        assert (found.status, list(tmp_path.iterdir())) == (CRITICAL, [])
        assert "No space left" in found.detail
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        assert written_and_read(tmp_path, 1 << 20, name="x").problem == "hardware_problem"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/loop-control").exists(), reason="needs a filesystem to freeze")
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="no mkfs.ext4 (e2fsprogs)")
def test_a_disk_that_takes_no_writes_is_late_and_holds_nobody_up(tmp_path):
    image, folder = tmp_path / "image", tmp_path / "frozen"
    folder.mkdir()
    with image.open("wb") as stream:
        stream.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], check=False, capture_output=True).returncode:
        pytest.skip("no loop device can be mounted here")
    try:
        subprocess.run(["fsfreeze", "--freeze", folder], check=True)
        config = HealthConfig(disk={"write_to": (folder,)}, limits_s={"disk-write": 0.3})
        began = time.monotonic()
        found = look(Scene(node="n1", now=time.time(), config=config), only=["disk-write", "uptime"])
        assert time.monotonic() - began < 10 * slowness()
        status = {result.name: result.status for result in found.results}
        assert status == {"uptime": OK, "disk-write": UNKNOWN}
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", folder], check=True)
        # the one that was left behind wakes up, and ends
        until(lambda: subprocess.run(["umount", folder], check=False, capture_output=True).returncode == 0, 10)


@pytest.mark.parametrize(
    ("answer_s", "context", "limit"),
    [(1.2, "manual", 1.5), (5, "manual", 5.3), (5, "cron", 25.3), (30, "prolog", 5.3), (5, "healthcheck", 40.3)],
)
def test_a_probe_lives_longer_than_what_it_waits_for(answer_s, context, limit):
    probe = next(probe for probe in PROBES if probe.names == ("filesystems",))
    config = HealthConfig(filesystems={"answer_s": answer_s})
    assert probe.limit(Scene(node="n1", now=0, context=context, config=config)) == pytest.approx(limit)


@pytest.mark.parametrize("context", CONTEXTS)
def test_only_a_probe_that_says_so_makes_silence_a_fault(context):
    scene = Scene(node="n1", now=0, context=context, config=HealthConfig())
    assert {probe.names for probe in PROBES if probe.late_after_s(scene) < math.inf} <= {gpu.NAMES}


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs a filesystem of ours")
def test_a_filesystem_that_hangs_is_critical_and_holds_nobody_up(tmp_path):
    """A FUSE filesystem whose server never answers."""
    folder = tmp_path / "a hanging one"
    folder.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other"
    subprocess.run(["mount", "-i", "-t", "fuse", "-o", options, "none", folder], check=True, pass_fds=(server,))
    try:
        paths = {"paths": (folder, Path("/")), "answer_s": 3, "detect": False}
        config = HealthConfig(filesystems=paths, limits_s={"filesystems": 60, "uptime": 60})
        began = time.monotonic()
        found = look(Scene(node="n1", now=time.time(), config=config), only=["filesystems", "uptime"])
        assert time.monotonic() - began < 60
        results = {result.name: result for result in found.results}
        assert results["uptime"].status is OK
        assert results["filesystems"].status is CRITICAL
        assert results["filesystems"].detail == f"{folder} hangs (no answer within 3.0 s)"
    finally:
        os.close(server)
        subprocess.run(["umount", "-l", folder], check=True)


def test_each_source_of_a_shared_filesystem_is_asked_once(tree):
    found = list(mounts(tree({"proc/self/mountinfo": MOUNTINFO.format("rw")})))
    assert [str(path) for path in probes.found_points(found)] == ["/home", "/scratch"]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (Answer(name="/x", value={}, took_s=0.01), OK),
        (Answer(name="/x", value={}, took_s=0.9), WARNING),
        (Answer(name="/x", error="no answer within 1.2 s", timed_out=True, took_s=1.2), CRITICAL),
        (Answer(name="/x", error="it died without an answer"), UNKNOWN),
        (Answer(name="/x", value={"error": "Stale file handle", "errno": 116}), CRITICAL),
        (Answer(name="/x", value={"error": "Permission denied", "errno": 13}), UNKNOWN),
        (Answer(name="/must", value={"error": "No such file or directory", "errno": 2}), CRITICAL),
    ],
    ids=["well", "slow", "hangs", "died", "stale", "may not", "missing"],
)
def test_answers_of_filesystems(answer, status):
    assert probes.judge_answers([answer], frozenset({"/must"}), FilesystemLimits()).status is status


def test_one_that_hangs_does_not_hide_that_others_answer():
    answers = [Answer(name="/a", value={}), Answer(name="/b", error="no answer", timed_out=True)]
    found = probes.judge_answers(answers, frozenset(), FilesystemLimits())
    assert (found.status, found.detail) == (CRITICAL, "/b hangs (no answer)")


def test_default_routes():
    assert probes.default_routes(ROUTES) == ["eth0"]
    assert probes.default_routes("") == probes.default_routes("Iface\nx y\n") == []


def interface(state: str = "up", flags: str = "0x1003", speed: str = "25000", errors: str = "0") -> dict[str, str]:
    folder = "sys/class/net/eth0"
    return {"proc/net/route": ROUTES, f"{folder}/operstate": state, f"{folder}/flags": flags, f"{folder}/speed": speed,
            f"{folder}/statistics/rx_packets": "100000", f"{folder}/statistics/rx_errors": errors}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "limits", "status"),
    [
        (interface(), NetworkLimits(), OK),
        (interface(state="unknown"), NetworkLimits(), OK),
        (interface(state="down"), NetworkLimits(), CRITICAL),
        (interface(flags="0x1002"), NetworkLimits(), CRITICAL),
        (interface(flags="what"), NetworkLimits(), OK),
        (interface(speed="10000"), NetworkLimits(min_speed_mbps=25_000), CRITICAL),
        (interface(speed="-1"), NetworkLimits(min_speed_mbps=25_000), OK),
        (interface(errors="99"), NetworkLimits(), OK),
        (interface(errors="100"), NetworkLimits(), WARNING),
        (interface(), NetworkLimits(links=("ib9",)), CRITICAL),
        (interface(), NetworkLimits(links=("../../../etc",)), CRITICAL),
        ({}, NetworkLimits(), OK),
    ],
    ids=["up", "no state", "down", "switched off", "odd flags", "slow", "no speed", "few errors", "errors", "missing",
         "no name", "none"],
)  # fmt: skip
def test_links(tree, files, limits, status):
    assert probes.links(tree(files, network=limits)).status is status


def test_errors_are_shared_by_the_interfaces_that_have_them():
    found = probes.judge_links([Link(name="a", state="up"), Link(name="b", state="down")], NetworkLimits())
    assert (found.status, found.detail) == (CRITICAL, "b is down")


def port(name: str = "mlx5_0/1", state: str = "ACTIVE", physical: str = "LinkUp", gbps: float | None = 400.0,
         downed: int = 0) -> Port:  # fmt: skip
    return Port(name=name, state=state, physical=physical, gbps=gbps, downed=downed)


@pytest.mark.parametrize(
    ("ports", "limits", "status"),
    [
        ([port()], NetworkLimits(), OK),
        ([port(), port(state="DOWN", physical="Polling")], NetworkLimits(), OK),
        ([port(), port(state="DOWN", physical="Polling")], NetworkLimits(infiniband_ports=2), CRITICAL),
        ([port(state="INIT")], NetworkLimits(), CRITICAL),
        ([port(), port(state="INIT")], NetworkLimits(infiniband_ports=1), WARNING),
        ([port(gbps=200.0)], NetworkLimits(infiniband_min_gbps=400), CRITICAL),
        ([port(gbps=None)], NetworkLimits(infiniband_min_gbps=400), OK),
        ([port(downed=10)], NetworkLimits(), WARNING),
        ([], NetworkLimits(infiniband_ports=1), CRITICAL),
    ],
    ids=["well", "no cable", "expected", "no subnet manager", "one too many", "slow", "no rate", "flaps", "gone"],
)
def test_infiniband(ports, limits, status):
    assert probes.judge_ports(ports, limits).status is status


def test_ports_are_read_from_sys(tree):
    folder = "sys/class/infiniband/mlx5_0/ports/1"
    files = {f"{folder}/state": "4: ACTIVE\n", f"{folder}/phys_state": "5: LinkUp\n",
             f"{folder}/rate": "400 Gb/sec (4X NDR)\n", f"{folder}/counters/link_downed": "12\n"}  # fmt: skip
    found = probes.infiniband(tree(files))
    assert (found.status, found.detail) == (WARNING, "mlx5_0/1 went down 12 times")
    assert found.evidence == ("mlx5_0/1: ACTIVE LinkUp 400 Gb/s",)


def test_no_infiniband_is_not_asked_unless_it_is_expected(tree):
    assert probes.infiniband(tree({})) is None
    assert probes.infiniband(tree({}, network=NetworkLimits(infiniband_ports=1))).status is CRITICAL


def test_names(tree):
    good = probes.names(tree({}, network=NetworkLimits(resolve=("localhost",), resolve_s=60)))
    names = ("localhost", "no-such-name.invalid", "\udcff x")
    bad = probes.names(tree({}, network=NetworkLimits(resolve=names, resolve_s=60)))
    assert (good.status, bad.status) == (OK, CRITICAL)
    assert "no-such-name.invalid" in bad.detail
    assert "localhost" not in bad.detail


def test_left_over_memory_is_proven_by_a_lock_that_nobody_holds(tree, tmp_path):
    scene = tree({})
    shm = tmp_path / "root/dev/shm"
    (shm / "slurmft-4321-live").mkdir(parents=True)
    (shm / "slurmft-4321-dead").mkdir()
    (shm / "slurmft-4321-new").mkdir()
    for name in ("live", "dead"):
        (shm / f"slurmft-4321-{name}" / "lock").touch()
    (shm / "slurmft-4321-dead" / "image").write_bytes(b"x" * 8192)
    (shm / "torch_77_x_1").write_bytes(b"x" * 4096)
    (shm / "dataset").write_bytes(b"x")
    if os.geteuid() != 0:
        pytest.skip("files of another user are needed")
    for path in shm.rglob("*"):
        os.chown(path, 4321, 4321)
        os.utime(path, (1, 1))
    held = os.open(shm / "slurmft-4321-live/lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        found = {path.name for path, _ in node.orphaned_memory(scene, uid=4321)}
        assert found == {"slurmft-4321-dead", "torch_77_x_1"}
        assert node.orphaned_memory(scene, uid=1) == []
        assert node.orphaned_memory(scene) == []  # for the probe they are too young: their inode changed just now
    finally:
        os.close(held)


def test_the_fast_set_is_fast_and_says_something_of_this_machine(tmp_path):
    config = HealthConfig(disk={"write_to": (tmp_path,)})
    scene = Scene(node="n1", now=time.time(), config=config)
    began = time.process_time() + sum(os.times()[2:4])
    checkup = look(scene)
    took = time.process_time() + sum(os.times()[2:4]) - began
    assert {result.name for result in checkup.results} >= {"load", "memory", "disk-space", "disk-write", "links"}
    assert took < 2.0, took


def test_every_name_is_one_probes():
    names = [name for probe in PROBES for name in probe.names]
    assert len(names) == len(set(names))
