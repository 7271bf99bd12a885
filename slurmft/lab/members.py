"""The members of the lab: sets of namespaces, each kept alive by its holder, joined by one bridge.

Only argv, mounts and wiring; the programs inside are in ``daemons.py``. ``ip netns`` is not used on purpose: its
``exec`` remounts /sys, which makes slurmd 22.05 refuse to start, and its names and mounts would outlive a crash.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import LabError
from slurmft.lab import holder
from slurmft.lab.exposure import PRIVATE_MEMORY, Mount, root_mounts
from slurmft.lab.processes import CLEAN_ENVIRONMENT, UMASK, mark_source, member_of_process, run
from slurmft.lab.settings import LabSettings
from slurmft.lab.slurm_conf import CONTROLLER, CONTROLLER_ADDRESS, LOGIN, NETWORK_BITS, LabPaths

BRIDGE = "br0"
START_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Member:
    """A member that was started: its name and its holder's process id on the host."""

    name: str
    pid: int

    def is_alive(self, folder: Path) -> bool:
        """Whether the holder still lives; a recycled process id is not mistaken for it."""
        return member_of_process(self.pid, folder) == self.name


def enter_argv(member: Member) -> list[str]:
    """The arguments that run the command after them inside a member, as root."""
    inside = ["nsenter", f"--target={member.pid}", "--net", "--mount", "--uts", "--ipc"]
    # The login member has no PID namespace: without a fork in between, signals and exit codes pass untouched.
    return [*inside, "--"] if member.name == LOGIN else [*inside, "--pid", "--"]


def unshare_argv(name: str, controller: Member | None) -> list[str]:
    """The arguments that run the command after them in fresh namespaces for the member ``name``."""
    fresh = ["unshare", "--mount", "--uts", "--ipc", "--propagation=private"]
    if name == LOGIN:
        if controller is None:
            raise LabError("the login member needs the controller's network")
        return ["nsenter", f"--net=/proc/{controller.pid}/ns/net", "--", *fresh, "--"]
    return [*fresh, "--net", "--pid", "--fork", "--kill-child=KILL", "--"]


def mounts_of(name: str, paths: LabPaths, exposed: Sequence[Mount], root: Path | None = None) -> list[Mount]:
    """Every mount of a member; the mark comes first so that a crash right after it still finds the member.

    Args:
        root: file tree of another release of Slurm, for the member to live in.
    """
    mark = mark_source(paths.folder, name)
    first = [Mount("tmpfs", mark, str(paths.mark))] if root is None else root_mounts(root, mark)
    memory = Mount("tmpfs", "slurmft-lab-shm", str(PRIVATE_MEMORY), mode="1777")
    files = [Mount("bind", str(paths.hosts), "/etc/hosts", read_only=True)]
    # Without a name server nothing waits for DNS; with the host's address it might, inside our own network.
    if root is not None or Path("/etc/resolv.conf").exists():
        files.append(Mount("bind", str(paths.resolv_conf), "/etc/resolv.conf", read_only=True))
    # Commands find the lab also where SLURM_CONF was scrubbed from the environment.
    if root is not None or Path("/etc/slurm").is_dir():
        files.append(Mount("bind", str(paths.etc), "/etc/slurm", read_only=True))
    return [*first, memory, *files, *exposed]


class Starting:
    """A holder that is being started; several can start at once, then each is waited for."""

    def __init__(
        self, name: str, paths: LabPaths, exposed: Sequence[Mount], controller: Member | None = None,
        *, root: Path | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.log = paths.log / f"holder.{name}.log"
        read, write = os.pipe()
        plan = {
            "hostname": name,
            "mounts": [mount.as_json() for mount in mounts_of(name, paths, exposed, root)],
            "new_proc": name != LOGIN or root is not None,
            "root": "" if root is None else str(paths.mark),
            "report_to": write,
        }
        interpreter = [str(Path(sys.executable).resolve()), "-I", "-S", str(Path(holder.__file__).resolve())]
        # setsid --fork: the holder is not a child of the caller, which therefore need not wait for it.
        argv = ["setsid", "--fork", *unshare_argv(name, controller), *interpreter, name]
        try:
            self._answer = os.fdopen(read)
            with self.log.open("ab") as log:
                subprocess.run(
                    argv,
                    input=json.dumps(plan).encode(),
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=CLEAN_ENVIRONMENT,
                    pass_fds=[write],
                    check=False,
                    umask=UMASK,
                )
        except BaseException:
            self.forget()
            raise
        finally:
            os.close(write)

    def forget(self) -> None:
        """Stop listening: a holder that has not reported yet ends itself instead of staying behind unknown."""
        self._answer.close()

    def wait(self) -> Member:
        """The member, once its mounts and name are in place.

        Raises:
            LabError: the holder ended before it was ready; quotes its log.
        """
        # One line, not until the end of file: the process that waits for the holder keeps the pipe open too.
        with self._answer:
            ready, _, _ = select.select([self._answer], [], [], START_WITHIN_S)
            answer = self._answer.readline().strip() if ready else ""
        if not answer.isdigit():
            said = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise LabError(f"member {self.name} did not start: {' '.join(said) or 'no reason given'}")
        return Member(self.name, int(answer))


def _in_network(member: Member, lines: Sequence[str], doing: str) -> None:
    argv = ["nsenter", f"--net=/proc/{member.pid}/ns/net", "--", "ip", "-batch", "-"]
    run(argv, stdin="\n".join(lines) + "\n", doing=doing)


def build_bridge(controller: Member) -> None:
    """Give the controller its address on a bridge that leads nowhere else."""
    lines = [
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {CONTROLLER_ADDRESS}/{NETWORK_BITS} dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ]
    _in_network(controller, lines, f"building the network of {CONTROLLER}")


def connect(controller: Member, nodes: Sequence[Member], settings: LabSettings) -> None:
    """Join nodes to the bridge: ``eth0`` inside, a link with the node's name at the controller."""
    lines = []
    for node in nodes:
        lines += [
            f"link add {node.name} type veth peer name eth0 netns {node.pid}",
            f"link set {node.name} master {BRIDGE}",
            f"link set {node.name} up",
        ]
    _in_network(controller, lines, "connecting the nodes")
    for node in nodes:
        inside = [
            "link set lo up",
            f"addr add {settings.address(node.name)}/{NETWORK_BITS} dev eth0",
            "link set eth0 up",
        ]
        _in_network(node, inside, f"building the network of {node.name}")


def set_link(controller: Member, node: str, state: str) -> None:
    """Plug a node's cable in (``up``) or out (``down``); its processes go on."""
    _in_network(controller, [f"link set {node} {state}"], f"setting the link of {node} {state}")


def connected(controller: Member) -> set[str]:
    """Nodes whose cable is plugged in."""
    argv = ["nsenter", f"--net=/proc/{controller.pid}/ns/net", "--", "ip", "-brief", "link", "show", "master", BRIDGE]
    rows = [line.split() for line in run(argv, doing="looking at the links").splitlines()]
    return {row[0].partition("@")[0] for row in rows if len(row) > 1 and row[1] == "UP"}


def remove_link(controller: Member, node: str) -> None:
    """Take away what is left of a dead node's cable; the kernel may have done it already."""
    argv = ["nsenter", f"--net=/proc/{controller.pid}/ns/net", "--", "ip", "link", "del", node]
    subprocess.run(argv, capture_output=True, timeout=10, check=False)
