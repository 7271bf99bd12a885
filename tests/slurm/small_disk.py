"""A small disk of its own, an image behind a loop device that every member of the lab has mounted: it can be filled."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slurm.conftest import eventually
from slurmft.lab.cluster import Lab


@dataclass(frozen=True)
class SmallDisk:
    lab: Lab
    path: Path

    def fill(self) -> None:
        """Leave nothing for an ordinary user."""
        for name, block in (("ballast", "1M"), ("crumbs", "512")):
            self.lab.run(["dd", "if=/dev/zero", f"of={self.path}/{name}", f"bs={block}"], check=False)

    def free(self) -> None:
        self.lab.run(["rm", "-f", f"{self.path}/ballast", f"{self.path}/crumbs"])

    def forbid(self) -> None:
        """Make it read-only; not in the middle of a save, whose open files would prevent it."""
        argv = ["mount", "-o", "remount,ro", str(self.path)]
        eventually(lambda: self.lab.run_as_admin(argv, check=False).returncode == 0, 20, "read-only")

    def allow(self) -> None:
        self.lab.run_as_admin(["mount", "-o", "remount,rw", str(self.path)])

    def freeze(self) -> None:
        self.lab.run_as_admin(["fsfreeze", "-f", str(self.path)])

    def thaw(self) -> None:
        self.lab.run_as_admin(["fsfreeze", "-u", str(self.path)], check=False)


@contextmanager
def mounted_disk(lab: Lab, image: Path, size_mib: int) -> Iterator[SmallDisk]:
    """The disk, at the same path on all members; a node that is started meanwhile has it too."""
    path = lab.home / "small disk"
    with image.open("wb") as stream:
        stream.truncate(size_mib << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    device = subprocess.run(["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True)
    loop = device.stdout.strip()
    path.mkdir(exist_ok=True)
    members = [None, *lab.nodes]

    def on(member: str | None, *argv: str, check: bool = True) -> None:
        (lab.run_as_admin if member is None else lambda a, **o: lab.run_on_as_admin(member, a, **o))(
            list(argv), check=check
        )

    small = SmallDisk(lab, path)
    try:
        # for the tests, which look from outside, and for nodes to come, which begin with this machine's mounts
        subprocess.run(["mount", loop, str(path)], check=True)
        for member in members:
            on(member, "mount", loop, str(path))
        on(None, "chown", f"{lab.uid}:{lab.gid}", str(path))
        yield small
    finally:
        small.thaw()
        lab.run_as_admin(["scancel", "--user", lab.user], check=False)
        try:
            lab.wait_until_idle(60)
        finally:
            for member in members:
                on(member, "umount", "--lazy", str(path), check=False)
            subprocess.run(["umount", "--lazy", str(path)], check=False)
            subprocess.run(["losetup", "--detach", loop], check=False)
