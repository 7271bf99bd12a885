"""Agents and workers in containers, on a real cluster: every journey ends with the weights of a run without one."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm.conftest import Run, eventually, preempt, submit_with
from slurm.test_spares import agent_of
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
RESTARTS = {"num_in_job_restarts": 3}
HANGS = Path(__file__).parent / "trainers" / "hangs.py"

REPOSITORY = str(Path(__file__).parents[2])
"""With the Python of these tests; it may lie below /tmp, of which a container has its own."""

STAND_INS = Path(__file__).parent / "stand_ins"

BUBBLEWRAP = [
    "bwrap", "--unshare-pid", "--unshare-ipc", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
    "--tmpfs", "/dev/shm", "--tmpfs", "/tmp", "--ro-bind", REPOSITORY, REPOSITORY, "{mounts}", "--chdir", "{workdir}",
]  # fmt: skip
"""Process ids, mounts, and System V memory of its own; nothing but the mounts can be written to."""

CRUN = "crun --cgroup-manager=disabled --root=/tmp/crun-%u"
OCI_CONF = f"""
RunTimeQuery="{CRUN} state %n.%u.%j.%s.%t"
RunTimeKill="{CRUN} kill -a %n.%u.%j.%s.%t"
RunTimeDelete="{CRUN} delete --force %n.%u.%j.%s.%t"
RunTimeRun="{CRUN} run --bundle %b %n.%u.%j.%s.%t"
"""


def bubblewrap(*words: str, **changes: Any) -> dict[str, Any]:
    return {"runtime": "command", "command": [*BUBBLEWRAP, *words], "python": sys.executable, **changes}


def bundle(lab: Lab) -> Path:
    """An OCI bundle whose root is the node's, with process ids, a /tmp and a /dev/shm of its own."""
    folder, node = lab.home / "bundle", sorted(path for path in Path("/").iterdir() if path.is_dir())
    own = ("proc", "dev", "sys", "tmp")
    if folder.exists():
        return folder
    (folder / "rootfs").mkdir(parents=True)
    for path in node:
        if path.is_symlink():
            (folder / "rootfs" / path.name).symlink_to(path.readlink())
        else:
            (folder / "rootfs" / path.name).mkdir()
    ids = {"uid": lab.uid, "gid": lab.gid}
    mounts = [{"destination": "/proc", "type": "proc", "source": "proc"},
              *({"destination": at, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=1777"]}
                for at in ("/dev", "/dev/shm", "/tmp")),
              *({"destination": str(path), "type": "none", "source": str(path), "options": ["rbind", "ro"]}
                for path in node if path.name not in own and not path.is_symlink()),
              *({"destination": at, "type": "none", "source": at, "options": ["rbind", "ro"]}
                for at in ("/sys", REPOSITORY))]  # fmt: skip
    config = {
        "ociVersion": "1.0.0",
        "process": {"args": ["true"], "cwd": "/", "user": ids, "noNewPrivileges": True, "env": ["OF_THE_BUNDLE=1"]},
        "root": {"path": "rootfs", "readonly": False},
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "mount", "user")],
            "uidMappings": [{"containerID": lab.uid, "hostID": lab.uid, "size": 1}],
            "gidMappings": [{"containerID": lab.gid, "hostID": lab.gid, "size": 1}],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, lab.uid, lab.gid)
    return folder


def oci(lab: Lab) -> dict[str, Any]:
    if shutil.which("crun") is None:
        pytest.skip("crun is missing")
    lab.slurm_conf.with_name("oci.conf").write_text(OCI_CONF)
    for node in lab.nodes:  # crun refuses to work where both versions of cgroups are mounted
        lab.run_on_as_admin(node, ["umount", "-l", "/sys/fs/cgroup/unified"], check=False)
    return {"runtime": "oci", "image": str(bundle(lab)), "python": sys.executable}


def stand_in(lab: Lab, runtime: str) -> dict[str, Any]:
    image = lab.home / f"image.{runtime}"
    image.write_text({"apptainer": "SIF", "pyxis": "squashfs"}[runtime])
    return {"runtime": runtime, "image": str(image), "python": sys.executable}


@pytest.fixture
def contained(lab: Lab, new_run: NewRun) -> NewRun:
    """Makes runs in a container; their working directory is one that can be written to."""
    if lab.run(["bwrap", "--ro-bind", "/", "/", "true"], check=False).returncode:
        pytest.skip("bubblewrap is missing, or may not make namespaces here")

    def make(runtime: str = "bubblewrap", *words: str, **changes: Any) -> Run:
        container = (
            bubblewrap(*words) if runtime == "bubblewrap" else oci(lab) if runtime == "oci" else stand_in(lab, runtime)
        )
        return new_run(container=container, **{"working_directory": str(lab.home), **changes})

    return make


REAL = pytest.mark.parametrize("runtime", ["bubblewrap", "oci"])
ONE_REAL = pytest.mark.parametrize("runtime", ["bubblewrap", pytest.param("oci", marks=pytest.mark.soak)])
"""For what happens outside of the container: the other runtime shows it once more, in soak."""


def pids_of(run: Run, node: str, pattern: str, *, newest: bool = True) -> str:
    which = "-n" if newest else "-o"
    return run.lab.run_on_as_admin(node, ["pgrep", which, "-f", pattern]).stdout.strip()


def namespaces(run: Run, node: str) -> set[str]:
    """The namespaces of process ids that its workers and the node's first process have."""
    pids = ["1", *run.pids(node).values()]
    links = [f"/proc/{pid}/ns/pid" for pid in pids]
    return set(run.lab.run_on_as_admin(node, ["readlink", *links]).stdout.split())


def nothing_is_left(run: Run) -> None:
    """No process of the run on any node, and no memory."""

    def left() -> list[str]:
        found = [run.lab.run_on_as_admin(node, ["pgrep", "-af", f"slurmft.*{run.path}"], check=False).stdout
                 for node in ("n1", "n2", "n3", "n4")]  # fmt: skip
        return [line for text in found for line in text.splitlines() if "pgrep" not in line]

    eventually(lambda: not left(), 20, lambda: "\n".join(left()))


@pytest.mark.long
def test_a_container_in_which_the_user_is_called_root(contained: NewRun, undisturbed: str) -> None:
    run = contained("bubblewrap", "--unshare-user", "--uid", "0", "--gid", "0", launcher="torchrun")
    run.submit()
    run.wait_until_done()
    assert run.digest() == undisturbed
    assert run.events("container limit") == []
    nothing_is_left(run)


@pytest.mark.long
@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_stand_ins_that_take_documented_options_alone(contained: NewRun, undisturbed: str, runtime: str) -> None:
    run = contained(runtime)
    job = submit_with(run, STAND_INS)
    run.wait_for_step(10)
    run.lab.run(["scancel", "--signal=TERM", job])
    run.wait_until_done()
    (stop,) = [event.details for event in run.events("verdict") if event.details["cause"] == "signalled"]
    assert stop["saved_step"] == stop["last_step"] >= 10, run.story()
    assert run.digest() == undisturbed
    nothing_is_left(run)


@pytest.mark.long
@ONE_REAL
def test_a_killed_worker_comes_back_in_the_same_container(contained: NewRun, undisturbed: str, runtime: str) -> None:
    run = contained(runtime, fault_tolerance=RESTARTS)
    job = run.reach(28)
    before = namespaces(run, "n1")
    run.kill_between_steps("n1", 1)
    run.wait_for("first step", 2)
    assert namespaces(run, "n1") == before
    run.wait_until_done()
    assert [event.attempt for event in run.events("attempt started")] == [f"{job}.0.0", f"{job}.0.1"]
    kept, first = run.events("state kept just in time")[0].details, run.events("first step")[1].details
    assert kept["step"] >= 28 and first["resumed_from"] == kept["step"], "memory was read"
    assert run.digest() == undisturbed


@pytest.mark.long
@pytest.mark.parametrize(
    ("runtime", "victim"),
    [
        ("bubblewrap", "agent"),
        pytest.param("bubblewrap", "runtime", marks=pytest.mark.soak),
        pytest.param("bubblewrap", "process outside", marks=pytest.mark.soak),
        pytest.param("oci", "agent", marks=pytest.mark.soak),
        ("oci", "first process"),
    ],
)
def test_a_node_whose_agent_or_container_is_killed_gets_another(
    contained: NewRun, undisturbed: str, runtime: str, victim: str
) -> None:
    """No --die-with-parent: what is inside of a container would outlive its command, if the agent did not notice."""
    run = contained(runtime, fault_tolerance=RESTARTS)
    run.reach(28)
    workers = run.pids("n2")
    pattern = {
        ("bubblewrap", "runtime"): f"^bwrap .*{run.path}",
        ("bubblewrap", "process outside"): f"[s]lurmft.agent.container.outside .*{run.path}",
    }.get((runtime, victim), agent_of(run))
    pid = pids_of(run, "n2", pattern, newest=victim == "agent")
    run.lab.run_on_as_admin("n2", ["kill", "-KILL", pid])
    eventually(lambda: not set(run.pids("n2").values()) & set(workers.values()), 5, "the workers died with it")
    run.wait_until_done(180)
    assert len(run.folder.jobs()) == 1 and not run.events("requeueing"), run.story()
    assert [event.details["node"] for event in run.events("agent back")] == ["n2"]
    assert run.digest() == undisturbed
    nothing_is_left(run)


@pytest.mark.soak
def test_a_container_goes_on_without_its_crun(contained: NewRun, undisturbed: str) -> None:
    """Slurm has lost it then, and slurmft has not: the agent ends with the run."""
    run = contained("oci")
    run.reach(10)
    run.lab.run_on_as_admin("n2", ["kill", "-KILL", pids_of(run, "n2", "^crun .* run ", newest=False)])
    run.wait_until_done()
    assert run.digest() == undisturbed
    nothing_is_left(run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "runtime"),
    [
        ("preempted", "bubblewrap"),
        ("signalled", "oci"),
        pytest.param("preempted", "oci", marks=pytest.mark.soak),
        pytest.param("signalled", "bubblewrap", marks=pytest.mark.soak),
    ],
)
def test_a_stop_saves_and_resumes(lab: Lab, contained: NewRun, undisturbed: str, how: str, runtime: str) -> None:
    """This Slurm signals each process of the step: bubblewrap would die of it, and end the save with it."""
    run = contained(runtime)
    job = run.reach(10)
    assert len(namespaces(run, "n1")) == 2, "the workers have process ids of their own"
    if how == "preempted":
        preempt(lab)
    else:
        lab.run(["scancel", "--signal=TERM", job])
    run.wait_until_done()
    (stop,) = [event.details for event in run.events("verdict") if event.details["cause"] == how]
    assert stop["saved_step"] == stop["last_step"] >= 10, run.story()
    assert run.events("first step")[1].details["resumed_from"] == stop["saved_step"]
    assert run.digest() == undisturbed
    assert run.events("container limit") == []
    nothing_is_left(run)


@pytest.mark.long
@pytest.mark.parametrize("swallows", ["by pids", pytest.param("whole", marks=pytest.mark.soak)])
def test_a_signal_to_the_step_alone_reaches_the_agent_by_the_pipe(
    contained: NewRun, undisturbed: str, swallows: str
) -> None:
    """What a cluster does where cgroups track processes: only the process that srun has started gets it."""
    words = [] if swallows == "by pids" else ["sh", "-c", 'trap "" TERM; "$@"', "sh"]
    run = contained("bubblewrap", *words)
    run.reach(10)
    pid = pids_of(run, "n2", f"[s]lurmft.agent.container.outside .*{run.path}")
    run.lab.run_on_as_admin("n2", ["kill", "-TERM", pid])
    run.wait_until_done()
    assert run.events("stop requested")[0].details["reason"] == "SIGTERM at n2"
    saved = run.events("verdict")[0].details["saved_step"]
    assert run.events("first step")[1].details["resumed_from"] == saved >= 10
    assert run.digest() == undisturbed


@ONE_REAL
def test_a_node_dies_and_the_spare_takes_over(lab: Lab, contained: NewRun, undisturbed: str, runtime: str) -> None:
    run = contained(
        runtime, spare_nodes=1, fault_tolerance=RESTARTS, checkpoint={"interval_steps": 10, "peer_copies": 1}
    )
    run.reach(28)
    node = run.wait_for("agents ready").details["hosts"][1]  # not the one with the supervisor
    lab.kill_node(node)
    try:
        run.wait_until_done(180)
    finally:
        lab.start_node(node)
    assert len(run.folder.jobs()) == 1
    assert run.events("first step")[1].details["resumed_from"] >= 20, "its peer had a copy of its memory"
    assert run.digest() == undisturbed


@pytest.mark.long
@ONE_REAL
def test_a_hang_is_found_with_its_stacks(contained: NewRun, new_run: NewRun, runtime: str) -> None:
    trainer, checkpoint = ["python", str(HANGS), "--steps", "60"], {"interval_steps": 10}
    limits = {**RESTARTS, "num_warmup_iterations": 3, "rank_section_timeouts": "step:3"}
    run = contained(runtime, command=[*trainer, "--hang", "step", "--rank", "1", "--at", "30"], checkpoint=checkpoint,
                    fault_tolerance=limits)  # fmt: skip
    run.submit()
    hung = run.wait_for("worker hung", within_s=60)
    assert hung.details["rank"] == 1
    run.wait_until_done()
    (stacks,) = run.folder.attempts.glob("*.0.0/stacks-rank-1.txt")
    assert "hangs.py" in stacks.read_text()
    evidence = next(run.folder.attempts.glob("*.0.0/evidence-*.json")).read_text()
    assert "time.sleep" in evidence or "hang" in evidence
    outside = new_run(f"outside-{runtime}", command=trainer, checkpoint=checkpoint)
    outside.submit()
    outside.wait_until_done()
    assert run.digest() == outside.digest()


@REAL
def test_the_doctor_starts_the_python_inside(lab: Lab, contained: NewRun, runtime: str) -> None:
    run = contained(runtime)
    command = ["slurmft", "doctor", str(run.config)]
    said = lab.run(command if runtime == "bubblewrap" else ["salloc", "--nodes=1", *command], check=False, timeout=120)
    assert "OK       container python: " in said.stdout and ", torch " in said.stdout, said.stdout + said.stderr
    assert not run.path.exists()
    assert not list(run.path.parent.glob(".slurmft-doctor-*"))
